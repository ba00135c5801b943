"""Progress: lines now and then where there is no terminal, bars where there is one."""

from __future__ import annotations

import io

from rich.console import Console

from tasks.progress import BarReporter, PlainReporter, open_line, reporting, say


def test_plain_lines_come_now_and_then() -> None:
    stream = io.StringIO()
    with reporting(PlainReporter(stream, every=3600)):
        line = open_line("train")
        for step in range(100):
            line.update(step, 100, "steps")
        line.note("careful")
        line.end("done")
        say("all well")
    lines = stream.getvalue().splitlines()
    assert lines[:2] == ["train: started", "train: careful"]
    assert lines[2].startswith("train: done (")
    assert lines[3] == "all well"
    assert len(lines) == 4


def test_a_total_that_nobody_knows_is_not_told() -> None:
    stream = io.StringIO()
    with reporting(PlainReporter(stream, every=0)):
        open_line("count").update(3, 0, "items")
    assert "count: 3 items\n" in stream.getvalue()


def test_bars_of_two_stages_at_once() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with BarReporter(console) as reporter, reporting(reporter):
        first, second = open_line("train grpo"), open_line("train awpo")
        first.update(3, 10, "steps")
        second.update(1, 10, "steps")
        assert [(bar.completed, bar.total) for bar in reporter.bars.tasks] == [(3, 10), (1, 10)]
        first.end("done")
        second.end("failed")
        assert reporter.bars.tasks == []
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "train grpo" in text
    assert "failed" in text


def test_the_reporter_is_the_one_before_afterwards() -> None:
    outer, inner = io.StringIO(), io.StringIO()
    with reporting(PlainReporter(outer)):
        with reporting(PlainReporter(inner)):
            say("inner")
        say("outer")
    say("nobody")
    assert inner.getvalue() == "inner\n"
    assert outer.getvalue() == "outer\n"
