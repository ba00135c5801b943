"""The embedded corpus: multi-step tool-use dialogues that a small model can learn from, made from a seed.

Four splits, disjoint in their dialogues: `train`; `validation`, other dialogues of the same kind;
`test_phrasings`, the same tools asked for in sentences that train never uses; `test_tools`, tools whose names,
descriptions and parameters train never shows.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from awpo.artifacts import Manifest, open_stage
from awpo.config import CorpusConfig
from awpo.embedded.catalogue import load_catalogue, slots_of
from awpo.embedded.drafting import Draft, write_draft
from awpo.embedded.plans import Plan, draw_plan
from awpo.errors import UserError
from awpo.events import Progress, silent
from awpo.files import write_atomically
from awpo.types import Dialogue, Split, canonical_json

DIALOGUES = "dialogues.jsonl"
VERSION = 2  # of the generator and its data: raise it whenever the same seed gives other dialogues
_ATTEMPTS = 500


def drafts(config: CorpusConfig) -> Iterator[tuple[Split, Draft]]:
    """The dialogues of all splits in order, without ids.

    Each has a random generator of its own, seeded by seed, split and number, so that a longer split begins with
    the dialogues of a shorter one. No two dialogues are equal, and a dialogue of another split does not open with
    a sentence that opens one of train (its first step would be the same question), unless the sentence holds no
    values ("Tell me a joke."). Raises UserError where a split is larger than the catalogue can fill.
    """
    catalogue = load_catalogue()
    sizes: dict[Split, int] = {
        "train": config.train_dialogues,
        "validation": config.validation_dialogues,
        "test_phrasings": config.test_dialogues,
        "test_tools": config.test_dialogues,
    }
    train_openings: set[str] = set()
    known: set[str] = set()
    for split, size in sizes.items():
        taken = set() if split == "train" else train_openings
        for number in range(size):
            plan: Plan | None = None
            for attempt in range(_ATTEMPTS):
                rng = Random(f"{config.seed}/{split}/{number}/{attempt}")
                drawn = draw_plan(rng)
                # The first attempt's plan stays: else plans with few dialogues would get rare in the later splits.
                plan = plan or drawn
                draft = write_draft(rng, split, catalogue, plan)
                opening = draft.messages[0].content or ""
                content = canonical_json(
                    [[message.to_json() for message in draft.messages], sorted(tool.name for tool in draft.tools)]
                )
                if content not in known and opening not in taken:
                    break
            else:
                raise UserError(f"no new dialogue is left for {split} after {number} of {size}; ask for fewer")
            known.add(content)
            if split == "train" and slots_of(draft.templates[0]):
                train_openings.add(opening)
            yield split, draft


def dialogues(config: CorpusConfig) -> Iterator[Dialogue]:
    """The corpus as dialogues; ids are `<split>-<number>`."""
    numbers: Counter[str] = Counter()
    for split, draft in drafts(config):
        yield Dialogue(f"{split}-{numbers[split]:05d}", "embedded", draft.tools, draft.messages, split)
        numbers[split] += 1


def corpus_identity(config: CorpusConfig) -> tuple[dict[str, str], dict[str, Any]]:
    """The inputs and the config of the stage's manifest."""
    return {}, {"version": VERSION, **config.model_dump(mode="json")}


def write_corpus(out: Path, config: CorpusConfig, *, progress: Progress = silent) -> Manifest:
    """Stage "corpus": writes `dialogues.jsonl` into `out`, one dialogue a line; equal configs give equal bytes.

    The manifest counts dialogues and, by split, dialogues, assistant steps, steps with a call and tools.
    Raises UserError where `out` cannot be written.
    """
    with open_stage(out, "corpus", *corpus_identity(config)) as stage:
        if stage.finished:
            return stage.manifest
        total = config.train_dialogues + config.validation_dialogues + 2 * config.test_dialogues
        lines: list[str] = []
        splits: dict[str, Counter[str]] = {}
        tools: dict[str, set[str]] = {}
        for dialogue in dialogues(config):
            lines.append(json.dumps(dialogue.to_json(), ensure_ascii=False) + "\n")
            split = str(dialogue.split)
            steps = [message for message in dialogue.messages if message.role == "assistant"]
            splits.setdefault(split, Counter()).update(
                dialogues=1, steps=len(steps), call_steps=sum(bool(step.tool_calls) for step in steps)
            )
            tools.setdefault(split, set()).update(tool.name for tool in dialogue.tools)
            if len(lines) % 500 == 0 or len(lines) == total:
                progress(len(lines), total, "dialogues")
        write_atomically(out / DIALOGUES, "".join(lines))
        counts: dict[str, Any] = {
            split: {**counter, "tool_names": len(tools[split])} for split, counter in splits.items()
        }
        return stage.finish({"dialogues": total, "splits": counts})
