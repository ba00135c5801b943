"""API-Bank's items: ToolRL's prompts with one reference call each, and the original dialogues up to each call."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from awpo.errors import UserError
from awpo.types import Message, ToolCall
from evaluation.api_bank.dialogues import read_call
from evaluation.benchmark_data import PinnedFile, find
from evaluation.generate import Question

SOURCE = "api-bank"
TOOLRL, DIALOGUES = "toolrl", "dialogues"

_TOOLRL_COMMIT = "8cee13ec0ca72f0461da372a93a6fd8140dbb840"
_ORIGINAL_COMMIT = "1d76900822d9ecfcd6e9eb0ca64a073cb892b735"


def _toolrl(level: int, sha256: str) -> PinnedFile:
    name = f"level-{level}-api_processed.json"
    return PinnedFile(
        f"toolrl/api-bank-{name}", "qiancheng0/ToolRL", _TOOLRL_COMMIT, f"benchmarks/API-Bank/{name}", sha256
    )


def _original(level: int, sha256: str) -> PinnedFile:
    name = f"level-{level}-api.json"
    return PinnedFile(
        f"api-bank/{name}", "AlibabaResearch/DAMO-ConvAI", _ORIGINAL_COMMIT, f"api-bank/test-data/{name}", sha256
    )


FILES = {
    (TOOLRL, 1): _toolrl(1, "51ebc8209ba467ce4cc1854d23b2cfd89759f3c45ff2aaf90de4f003162ea98f"),
    (TOOLRL, 2): _toolrl(2, "75c8097b3127d1f7aec13edb6b7a8428565d753b107f2b1e20daa3d0cfda51db"),
    (TOOLRL, 3): _toolrl(3, "57228427976f05725d9cf2f0ab03ac16487efaed67d5a929b28e974b9b27ef05"),
    (DIALOGUES, 1): _original(1, "0d3155c5495399836b5b1f1cc4eb6d5d50efa16b2734af50a016a158e9dd79bb"),
    (DIALOGUES, 2): _original(2, "c61966448d9d5cf98334f39b44c0db1fe5a9c6c84a1f53e652f4aacdbbfc5da0"),
}
"""The file of each set of prompts and level. Level 3 of the originals has no dialogues that end in a call's request."""


@dataclass(frozen=True, slots=True)
class ApiBankItem:
    """One prompt and the call that is due. `dialogue_id` groups the items that were cut from one dialogue."""

    id: str
    dialogue_id: str
    question: Question
    reference: ToolCall


def read_level(prompts: str, level: int, data: Path | None = None) -> list[ApiBankItem]:
    """All items of one level in the file's order; `prompts` is "toolrl" or "dialogues", `data` the setting.

    Raises UserError where the file is nowhere, or is another one.
    """
    path = find(FILES[prompts, level], data)
    rows = json.loads(path.read_text("utf-8"))
    read = _toolrl_item if prompts == TOOLRL else _dialogue_item
    try:
        return [read(level, number, row) for number, row in enumerate(rows)]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} holds a row that is not API-Bank's ({error!r:.100}); fetch it anew") from None


def _toolrl_item(level: int, number: int, row: dict[str, Any]) -> ApiBankItem:
    answer = row["answer"][0] if isinstance(row["answer"], list) else row["answer"]
    other = row["other"]
    return ApiBankItem(
        id=f"Level{level}_{number}",  # as ToolRL's results name it
        dialogue_id=str(other["file"] if "file" in other else f"level-3-sample-{other['sample_id']}"),
        question=Question((Message("system", row["system"]), Message("user", row["user"]))),
        reference=ToolCall(answer["name"], answer["parameters"]),
    )


def _dialogue_item(level: int, number: int, row: dict[str, Any]) -> ApiBankItem:
    reference = read_call(row["expected_output"])
    if reference is None:
        raise ValueError(row["expected_output"])
    return ApiBankItem(
        id=f"{row['file']}#{row['id']}",
        dialogue_id=row["file"],
        question=Question((Message("system", row["instruction"].strip()), Message("user", row["input"].strip()))),
        reference=reference,
    )
