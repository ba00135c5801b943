import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from awpo.errors import UserError
from evaluation.study_cells import CellResult, add_cell, read_cells, write_cells

CELL = CellResult(
    method="awpo",
    judge="correlated +0.8 x3",
    correlation=0.8,
    scale=3.0,
    seed=1,
    settings="abc",
    code="61961e4",
    accuracy=0.25,
    accuracy_tools=0.125,
    greedy=0.5,
    response_length=31.5,
    steps=8,
    steps_per_rollout=4,
    reward=-0.5,
    gate_open_share=0.75,
    reward_curve=(-1.0, -0.5),
)
SFT = CellResult("sft", "none", math.nan, math.nan, 0, "abc", "61961e4", 0.2, 0.1, 0.3, 33.0)


def test_a_file_reads_back_what_was_written_and_empty_is_unknown(tmp_path: Path) -> None:
    path = tmp_path / "cells.csv"
    write_cells(path, [SFT, CELL])
    [awpo, sft] = read_cells(path)
    assert (awpo.key, awpo.reward_curve, awpo.gate_open_share) == (CELL.key, (-1.0, -0.5), 0.75)
    assert math.isnan(awpo.gradient_norm)
    assert math.isnan(sft.correlation)
    assert sft.reward_curve == ()
    assert "nan" not in path.read_text()


def test_the_same_cells_give_the_same_bytes_in_any_order(tmp_path: Path) -> None:
    write_cells(tmp_path / "a.csv", [SFT, CELL])
    add_cell(tmp_path / "b.csv", CELL)
    add_cell(tmp_path / "b.csv", replace(SFT, accuracy=0.9))
    add_cell(tmp_path / "b.csv", SFT)  # in the place of the row before
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()


def test_no_file_holds_no_cells(tmp_path: Path) -> None:
    assert read_cells(tmp_path / "nothing.csv") == []


def test_another_file_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("name,age\nx,3\n")
    with pytest.raises(UserError, match="no file of study cells: its first line must be method,judge,correlation"):
        add_cell(path, CELL)
    assert path.read_text() == "name,age\nx,3\n"


@pytest.mark.parametrize("broken", ["x", "1 2 x"])
def test_a_broken_line_is_named(tmp_path: Path, broken: str) -> None:
    path = tmp_path / "cells.csv"
    write_cells(path, [CELL])
    path.write_text(path.read_text().replace("-1 -0.5", broken))
    with pytest.raises(UserError, match=r"cells\.csv, line 2: could not convert"):
        read_cells(path)
    path.write_text(path.read_text().splitlines()[0] + "\nawpo,none\n")
    with pytest.raises(UserError, match="line 2"):
        read_cells(path)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda text: text[: text.rindex("abc")], "line 3: it has more or fewer than 26 fields"),
        (lambda text: text.rstrip() + ",7\n", "line 3: it has more or fewer than 26 fields"),
        (lambda text: text.replace(",0.25,", ",7.5,"), "line 2: accuracy is 7.5, not a share"),
        (lambda text: text.replace(",0.25,", ",x,"), "line 2: could not convert string to float: 'x'"),
        (lambda text: text.replace("-1 -0.5", "-1 inf"), "line 2: it holds a number that is not finite"),
        (lambda text: text.replace(",3,1,abc", ",3,-1,abc"), "line 2: its seed is -1"),
        (lambda text: text + text.splitlines()[1] + "\n", "line 4: the cell awpo · correlated .* · 1 is there twice"),
    ],
)
def test_damaged_rows_are_told_with_their_line(tmp_path: Path, damage: Callable[[str], str], said: str) -> None:
    path = tmp_path / "cells.csv"
    write_cells(path, [SFT, CELL])
    whole = path.read_text()
    assert damage(whole) != whole
    path.write_text(damage(whole))
    with pytest.raises(UserError, match=said):
        read_cells(path)


def test_what_is_no_text_is_refused_and_a_byte_order_mark_is_not(tmp_path: Path) -> None:
    path = tmp_path / "cells.csv"
    write_cells(path, [SFT, CELL])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert len(read_cells(path)) == 2
    path.write_bytes(b"\xff\xfe\x00m")
    with pytest.raises(UserError, match="cannot be read as a file of study cells"):
        read_cells(path)
    with pytest.raises(UserError, match="cannot be read as a file of study cells"):
        read_cells(tmp_path)
