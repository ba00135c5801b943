"""What nights leave behind, and the table of the last of them."""

from __future__ import annotations

import json
from pathlib import Path

from evaluation.compare import EvaluationRun
from evaluation.diff import find_flips
from evaluation.items import Item
from evaluation.nightly import Part, decide
from evaluation.nights import FLIPS, NIGHT, trend, write_night


def leave(folder: Path, champion: str, candidate: str) -> None:
    first, second = (tuple(float(digit) for digit in text) for text in (champion, candidate))
    night = decide([Part("held_out/test", first, second, tuple(map(str, range(len(first)))))])
    runs = [
        EvaluationRun(folder, tuple(item(number, digit == "1") for number, digit in enumerate(digits)), {}, {})
        for digits in (champion, candidate)
    ]
    state = "regressed" if night.regressed else "passed"
    write_night(
        folder,
        champion="models:/m/1",
        candidate="models:/m/2",
        state=state,
        night=night,
        diff=find_flips(runs[0], runs[1]),
    )


def item(number: int, correct: bool) -> Item:
    return Item("held_out", "test", f"i{number}", f"d{number}", "made", 0, 1, "call", -1, correct, "said", 1, False)


def test_the_last_nights_newest_first(tmp_path: Path) -> None:
    leave(tmp_path / "2026-01-01T023000", "1" * 40, "1" * 40)
    leave(tmp_path / "2026-01-02T023000", "1" * 40, "0" * 30 + "1" * 10)
    (tmp_path / "2026-01-03T023000").mkdir()
    write_night(
        tmp_path / "2026-01-04T023000",
        champion="models:/m/1",
        candidate=None,
        state="passed",
        scores={"held_out/test/greedy": 0.725},
        accepted={"held_out/test/greedy": 0.72},
    )
    rows = trend(tmp_path, 4)
    assert [row["state"] for row in rows] == ["passed", "no result", "regressed", "passed"]
    assert rows[0]["held_out/test/greedy %"] == "72.5"
    assert rows[1] == {"night": "2026-01-03T023000", "state": "no result"}
    assert (rows[2]["champion %"], rows[2]["candidate %"], rows[2]["broken"], rows[2]["fixed"]) == (
        "100.0",
        "25.0",
        30,
        0,
    )
    assert rows[2]["difference (95%)"].startswith("-75.0 [")
    assert [row["night"] for row in trend(tmp_path, 2)] == ["2026-01-04T023000", "2026-01-03T023000"]
    assert trend(tmp_path / "none", 5) == []


def test_a_night_s_file_holds_the_decision_and_its_flips_lie_beside(tmp_path: Path) -> None:
    leave(tmp_path, "1" * 40, "0" * 30 + "1" * 10)
    found = json.loads((tmp_path / NIGHT).read_text())
    assert (found["state"], found["whole"]["difference"], found["broken"]) == ("regressed", -0.75, 30)
    flipped = json.loads((tmp_path / FLIPS).read_text())["flipped"]
    assert len(flipped) == 30
    assert (flipped[0]["change"], flipped[0]["first"]["output"]) == ("broken", "said")
