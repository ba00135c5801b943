"""Every real data file of dialogues: what is read, made, rejected and why; and the way to a chat template and back.

The numbers are those of the files as SOURCES.md beside them describes them. What a reader makes of single rows is
worked out by hand, or a second way, in the tests of the readers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import trl
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from awpo.artifacts import Manifest
from awpo.chat import messages_for_template, parse_completion, render_prompt
from awpo.data.decompose import decompose_source
from awpo.data.sources import detect
from awpo.data.store import read_instances
from awpo.errors import UserError
from awpo.types import Instance

TEMPLATES = Path(trl.__file__).parent / "chat_templates"


@dataclass(frozen=True)
class Expected:
    """A file's row of the table."""

    file: str
    format: str
    rows: int
    dialogues: int
    kinds: dict[str, int]
    rejected: dict[str, int] = field(default_factory=dict)
    invalid: dict[str, int] = field(default_factory=dict)


SAME, NOT_OFFERED = "the same as an earlier row", "a call of a tool that is not offered"
TABLE = [
    Expected(
        "api-bank/level-1-api.json",
        "apibank",
        399,
        389,
        {"call": 133, "call+reply": 256},
        {SAME: 10},
        {"missing parameter": 12, "unknown parameter": 8},
    ),
    Expected(
        "api-bank/level-2-api.json",
        "apibank",
        135,
        105,
        {"call": 25, "call+reply": 80},
        {SAME: 16, NOT_OFFERED: 14},
    ),
    Expected("api-bank/level-3-batch-inf.json", "apibank", 245, 245, {"call": 245}),
    Expected("api-bank/level-3.json", "apibank-dialogues", 50, 50, {"call": 245, "reply": 50}),
    Expected("glaive/glaive_first200.json", "sharegpt", 200, 183, {"call": 129, "reply": 477}, {SAME: 17}),
    Expected("hammer/masking_sft_data_example.json", "hammer", 10, 10, {"call": 8, "reply": 2}, {}, {"wrong type": 1}),
    Expected(
        "toolrl/api-bank-level-1-api_processed.json",
        "toolrl",
        399,
        389,
        {"call": 389},
        {SAME: 10},
        {"wrong type": 39, "missing parameter": 8, "unknown parameter": 8},
    ),
    Expected(
        "toolrl/api-bank-level-2-api_processed.json",
        "toolrl",
        67,
        61,
        {"call": 61},
        {NOT_OFFERED: 6},
        {"wrong type": 9},
    ),
    Expected("toolrl/api-bank-level-3-api_processed.json", "toolrl", 131, 131, {"call": 131}, {}, {"wrong type": 55}),
    Expected(
        "toolrl/rlla_4k_test.parquet", "toolrl", 80, 78, {"call": 70, "reply": 8}, {NOT_OFFERED: 2}, {"wrong type": 23}
    ),
    Expected(
        "toolrl/rlla_sft_first260.json",
        "toolrl",
        260,
        259,
        {"call": 221, "reply": 38},
        {NOT_OFFERED: 1},
        {"wrong type": 58, "unknown parameter": 8, "null for a value": 2},
    ),
]
NO_DIALOGUES = ["mmlu-pro/test.jsonl.gz", "mmlu-pro/validation.jsonl"]


@pytest.fixture(scope="module")
def results(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Manifest, Path]]:
    out = tmp_path_factory.mktemp("instances")
    found = {}
    for number, expected in enumerate(TABLE):
        folder = out / str(number)
        found[expected.file] = (decompose_source(shared_data / expected.file, folder), folder)
    return found


def test_the_table_has_every_file(shared_data: Path) -> None:
    files = {path.relative_to(shared_data).as_posix() for path in shared_data.rglob("*") if path.is_file()}
    assert files == {expected.file for expected in TABLE} | {*NO_DIALOGUES, "SOURCES.md"}


@pytest.mark.parametrize("expected", TABLE, ids=lambda expected: expected.file)
def test_the_table(results: dict[str, tuple[Manifest, Path]], expected: Expected) -> None:
    manifest, _ = results[expected.file]
    counts: dict[str, Any] = manifest.counts
    assert manifest.config["format"] == expected.format
    assert counts["rows_read"] == expected.rows == expected.dialogues + sum(expected.rejected.values())
    assert counts["dialogues"] == expected.dialogues
    assert counts["instances_by_kind"] == expected.kinds
    assert counts["instances"] == sum(expected.kinds.values())
    assert counts["rejected"] == expected.rejected
    assert [*counts["invalid_calls"].values()] == ([expected.invalid] if expected.invalid else [])


@pytest.mark.parametrize("file", NO_DIALOGUES)
def test_files_without_dialogues_say_so(shared_data: Path, file: str) -> None:
    with pytest.raises(UserError, match="in no known format"):
        detect(shared_data / file)


def test_benchmarks_are_never_trained_on(results: dict[str, tuple[Manifest, Path]]) -> None:
    for file, (manifest, _) in results.items():
        if "api-bank" in file:
            assert set(manifest.counts["instances_by_split"]) == {"test"}


def _tokenizer(template: str) -> PreTrainedTokenizerFast:
    fast = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a")))
    fast.chat_template = (TEMPLATES / template).read_text("utf-8")
    return fast


def _completion(tokenizer: Any, instance: Instance) -> str:
    """The target as the template itself writes it: the whole conversation less the prompt."""
    prompt = render_prompt(tokenizer, instance)
    target = {**instance.target.to_json(), "reasoning_content": instance.rationale or "Because."}
    whole = tokenizer.apply_chat_template(
        [*messages_for_template(instance.prompt), target],
        tools=[tool.to_json() for tool in instance.tools] or None,
        tokenize=False,
    )
    assert whole.startswith(prompt)
    return whole[len(prompt) :]


@pytest.mark.parametrize("template", ["qwen3.jinja", "qwen3_instruct_2507.jinja"])
@pytest.mark.parametrize("expected", TABLE, ids=lambda expected: expected.file)
def test_every_target_comes_back_from_the_template(
    results: dict[str, tuple[Manifest, Path]], expected: Expected, template: str
) -> None:
    tokenizer = _tokenizer(template)
    for instance in read_instances(results[expected.file][1]):
        parsed = parse_completion(_completion(tokenizer, instance))
        assert parsed.errors == (), instance.id
        assert parsed.tool_calls == instance.target.tool_calls
        assert repr(parsed.tool_calls) == repr(instance.target.tool_calls)  # tells 1 from 1.0 and true
        assert parsed.content == (instance.target.content or "").strip()
        if template == "qwen3.jinja":
            assert parsed.thought == (instance.rationale or "Because.").strip()
