"""The two versions of the leaderboard that can be evaluated: their categories, averages and the release that scores.

They are releases of one package, `bfcl-eval`, so that only one of them can be installed in an environment. Version 3
stands in that of this project; version 4 has one of its own (`evaluation.bfcl.package`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from evaluation.bfcl.averages import (
    AVERAGES_V3,
    AVERAGES_V4,
    LIVE_AST,
    MEMORY,
    MULTI_TURN,
    NON_LIVE_AST_V3,
    NON_LIVE_AST_V4,
    WEB_SEARCH,
    Average,
)


@dataclass(frozen=True, eq=False, slots=True)
class Version:
    """A version of BFCL.

    `name` is the benchmark's, `release` that of the package `bfcl-eval`, `prefix` the beginning of its data files'
    names. `agentic` are categories of one question and as many steps as the model likes, judged by its last words.
    `not_supported` gives, by category, the reason why no model can be asked here; stored outputs can be scored.
    `held_out_hint` says whether functions that join later have the hint about the language in their description,
    `all_calls_or_none` whether one call that cannot be read makes all of a completion void: both are as that release
    has it.
    """

    name: str
    title: str
    release: str
    prefix: str
    non_live_ast: tuple[str, ...]
    averages: tuple[Average, ...]
    held_out_hint: bool
    all_calls_or_none: bool
    own_environment: bool = False
    agentic: tuple[str, ...] = ()
    not_supported: Mapping[str, str] = field(default_factory=dict)

    @property
    def source(self) -> str:
        """The items' source, as results name it."""
        return self.name.replace("_", "-")

    @property
    def ast(self) -> tuple[str, ...]:
        """The categories of one turn whose calls are compared with a reference."""
        return (*self.non_live_ast, *LIVE_AST)

    @property
    def single_turn(self) -> tuple[str, ...]:
        return (*self.non_live_ast, "irrelevance", *LIVE_AST, "live_relevance", "live_irrelevance")

    @property
    def categories(self) -> tuple[str, ...]:
        return (*self.single_turn, *MULTI_TURN, *self.agentic)


V3 = Version(
    name="bfcl_v3",
    title="BFCL v3",
    release="2025.8.6.2",
    prefix="BFCL_v3",
    non_live_ast=NON_LIVE_AST_V3,
    averages=AVERAGES_V3,
    held_out_hint=True,
    all_calls_or_none=True,
)

_NO_SEARCH = "it searches the live web by SerpAPI, with a key, where model text is executed without a network"
V4 = Version(
    name="bfcl_v4",
    title="BFCL v4",
    release="2026.3.23",
    prefix="BFCL_v4",
    non_live_ast=NON_LIVE_AST_V4,
    averages=AVERAGES_V4,
    held_out_hint=False,
    all_calls_or_none=False,
    own_environment=True,
    agentic=(*WEB_SEARCH, *MEMORY),
    not_supported={
        **dict.fromkeys(WEB_SEARCH, _NO_SEARCH),
        "memory_vector": "its memory loads the encoder all-MiniLM-L6-v2 from the hub, where model text is executed "
        "without network and files",
    },
)
