from pathlib import Path

import pytest

from awpo.events import EVENTS, METRICS, LineTail, RunLog, Tail


def test_what_was_written_is_read_once_and_in_order(tmp_path: Path) -> None:
    log, tail = RunLog(tmp_path), Tail(tmp_path / METRICS)
    assert list(tail) == []
    log.metrics(1, {"loss": 2.0})
    log.metrics(2, {"loss": 1.0})
    assert [(row["step"], row["metrics"]["loss"]) for row in tail] == [(1, 2.0), (2, 1.0)]
    assert list(tail) == []
    log.metrics(3, {"loss": 0.5})
    assert [row["step"] for row in tail] == [3]


def test_half_a_line_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / EVENTS
    path.write_text('{"event": "progress"}\n{"event": "war')
    tail = Tail(path)
    assert [row["event"] for row in tail] == ["progress"]
    with open(path, "a") as file:
        file.write('ning"}\n')
    assert [row["event"] for row in tail] == ["warning"]


def test_a_line_that_cannot_be_read_is_told_and_does_not_hide_the_next(tmp_path: Path) -> None:
    path = tmp_path / EVENTS
    path.write_text('not json\n{"event": "progress"}\n')
    first, second = Tail(path)
    assert first["event"] == "warning"
    assert "unreadable" in first["message"]
    assert second["event"] == "progress"


@pytest.mark.parametrize("line", ["1", "null", '["event"]', "[" * 100_000, "\0" * 20, "\udcff"])
def test_a_line_of_json_that_is_no_event_is_told_and_does_not_hide_the_next(tmp_path: Path, line: str) -> None:
    path = tmp_path / EVENTS
    path.write_text(f'{line}\n{{"event": "progress"}}\n', "utf-8", "surrogateescape")
    first, second = Tail(path)
    assert "unreadable" in first["message"]
    assert second["event"] == "progress"


def test_the_lines_of_a_log_are_read_once_from_where_it_ended(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    assert LineTail(path).read() == []
    path.write_text("of an earlier attempt\n")
    tail = LineTail(path)
    with open(path, "a", newline="") as file:
        for text, lines in (
            ("one\ntw", ["one"]),
            ("o\n\n 10%|#   \r100%|####\nthree\r\n", ["two", "", "100%|####", "three"]),
            ("", []),
            ("four\n", ["four"]),
        ):
            file.write(text)
            file.flush()
            assert tail.read() == lines
