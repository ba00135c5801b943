"""Instances as a person reads them."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from awpo.data.decompose import decompose, decompose_source
from awpo.data.inspect import draw, draw_instance, inspect_instances, length_of, read_any, to_html
from awpo.data.sources import Rejected
from awpo.types import Dialogue, Instance, Message, Tool, ToolCall

TOOLS = (
    Tool(
        "find_city",
        "Finds a\n  city [bold]by name[/bold].",
        {"type": "object", "properties": {"name": {"type": "string"}, "limit": {"type": ["integer", "null"]}, "any": {}}, "required": ["name"]},
    ),
    Tool("now", "", {"type": "object", "properties": {}}),
)  # fmt: skip
DIALOGUE = Dialogue(
    "dialogue-1",
    "mine",
    TOOLS,
    (
        Message("system", "Be brief."),
        Message("user", "Where is Rome? [red]\x1b[31mred"),
        Message("assistant", "I look.", (ToolCall("find_city", {"name": "Rome", "limit": 1}), ToolCall("now", {})), "It fits."),
        Message("tool", '{"at": [41.9, 12.5]}', name="find_city"),
        Message("tool", "noon", name="now"),
        Message("assistant", "In Italy."),
    ),
    "train",
)  # fmt: skip
FIRST, SECOND = decompose(DIALOGUE)


def text_of(drawn: RenderableType, width: int = 80, **options: Any) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False, **options)
    console.print(drawn)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_an_instance_reads_from_the_tools_to_the_target() -> None:
    lines = [line.rstrip() for line in text_of(draw_instance(FIRST)).splitlines()]
    assert re.sub("─+", "─", lines[0]) == "mine · call+reply · step 1 of 2 · train ─"
    assert lines[1] == f"instance {FIRST.id} of dialogue dialogue-1"
    assert lines[2:] == [
        "2 tools",
        "  • find_city(name: string, limit?: integer|null, any?: any)  Finds a city",
        "  [bold]by name[/bold].",
        "  • now()",
        "system",
        "  Be brief.",
        "user",
        "  Where is Rome? [red]\\x1b[31mred",
        "target " + "╌" * 73,
        "assistant",
        "  It fits.",
        "  I look.",
        "  → find_city",
        '      name = "Rome"',
        "      limit = 1",
        "  → now",
        "",
    ]


def test_the_history_shows_calls_and_results() -> None:
    text = text_of(draw_instance(SECOND))
    for part in ("→ find_city", "tool find_city\n", '{"at": [41.9, 12.5]}', "tool now\n  noon", "In Italy."):
        assert part in text.replace(" \n", "\n")
    assert "It fits." not in text  # an earlier thought is no part of it


def test_nothing_is_wider_than_the_terminal_and_nothing_steers_it() -> None:
    long = Message("user", "word " * 500 + "\x1b]0;title\x07" + "x" * 300 + "\u202e")
    wide = Dialogue("d" * 200, "s" * 200, TOOLS * 20, (long, Message("assistant", "y" * 5000)), "train")
    drawn = draw(*inspect_instances(decompose(wide)))
    for width in (80, 40, 120):
        text = text_of(drawn, width)
        assert max(map(len, text.splitlines())) <= width
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u202e]", text)
    assert "… 28 more tools" in text
    assert "… (3800 more characters)" in text
    whole = text_of(draw_instance(decompose(wide)[0], whole=True))
    assert "more characters" not in whole
    assert whole.count("y") >= 5000


def test_colour_is_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[" not in text_of(draw_instance(FIRST))
    assert "\x1b[" in text_of(draw_instance(FIRST), force_terminal=True)


def test_a_page_needs_no_other_file() -> None:
    page = to_html(draw_instance(FIRST), "a < b & c")
    assert page.startswith("<!DOCTYPE html>")
    assert "<title>a &lt; b &amp; c</title>" in page
    assert "find_city" in page
    assert "style=" in page
    assert not re.search(r"<(?:script|link|img|iframe)\b|src=|url\(|https?://", page)
    assert "[bold]by name[/bold]" in page


def test_counts_and_filters() -> None:
    other = Dialogue("d2", "mine+functions", TOOLS, (Message("user", "Hi"), Message("assistant", "Hello")), "test")
    items: list[Instance | Rejected] = [FIRST, Rejected(1, "not an object"), SECOND, *decompose(other)]
    chosen, summary = inspect_instances(items, number=2)
    assert chosen == [FIRST, SECOND]
    assert (summary.instances, summary.with_rationale) == (3, 1)
    assert summary.source == {"mine": 2, "mine+functions": 1}
    assert summary.kind == {"call+reply": 1, "reply": 2}
    assert summary.split == {"train": 2, "test": 1}
    assert summary.depth == {1: 2, 2: 1}
    assert summary.offered == {2: 3}
    assert summary.called == {"find_city": 1, "now": 1}
    assert summary.rejected == {"not an object": 1}
    assert summary.length.total() == 3
    assert inspect_instances(items, kind="reply")[0] == [SECOND, *decompose(other)]
    assert inspect_instances(items, kind="call")[1].instances == 0
    assert inspect_instances(items, source="mine")[1].instances == 3  # a masked one is one of its source
    assert inspect_instances(items, source="mine+functions")[1].instances == 1
    assert inspect_instances(items, source="min")[1].instances == 0
    assert inspect_instances(items, number=0)[0] == []


def test_length_is_of_what_the_instance_says() -> None:
    bare = Instance("s", "d", 0, 1, "train", (), (Message("user", "é"),), Message("assistant", "x"))
    messages = json.dumps([{"role": "user", "content": "é"}, {"role": "assistant", "content": "x"}], ensure_ascii=False)
    assert length_of(bare) == len("[]") + len(messages)

    def padded(length: int) -> Instance:
        return Instance(
            "s", "d", 0, 1, "train", (), (Message("user", "x" * (length - length_of(bare) + 1)),), bare.target
        )

    assert [length_of(padded(length)) for length in (500, 501)] == [500, 501]
    summary = inspect_instances(map(padded, (500, 501, 1000, 16000, 16001)))[1]
    assert summary.length == {500: 1, 1000: 2, 16000: 1, 0: 1}
    assert "over 16,000" in text_of(draw([], summary))


def test_a_source_is_shown_as_its_instances_would_be(tmp_path: Path) -> None:
    rows = [
        DIALOGUE.to_json(),
        {"messages": 3},
        {**DIALOGUE.to_json(), "id": "2", "messages": [{"role": "user", "content": "x"}]},
    ]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    items = list(read_any(path))
    assert [type(item).__name__ for item in items] == ["Instance", "Instance", "Rejected", "Rejected"]
    decompose_source(path, tmp_path / "out")
    stored = list(read_any(tmp_path / "out"))
    assert [item.id for item in stored if isinstance(item, Instance)] == [FIRST.id, SECOND.id]
    assert list(read_any(tmp_path / "out" / "instances-00000.parquet")) == stored
