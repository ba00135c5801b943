"""Axes and places of the report's figures."""

from __future__ import annotations

import re

import pytest

from evaluation.charts import MOST_POINTS, interval_chart, line_chart, nice_ticks, number, smooth


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.25, 0.5, 0.75, 1]),
        (0, 80, [0, 20, 40, 60, 80]),
        (-2.7, 3.1, [-2, 0, 2]),
        (0.071, 0.083, [0.075, 0.08]),
        (5, 5, [5]),
        (float("nan"), 1, [0]),
    ],
)
def test_ticks_are_round_and_within(low: float, high: float, expected: list[float]) -> None:
    assert nice_ticks(low, high) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.5, "0.5"), (3.14159, "3.14"), (-2, "-2"), (1234.5, "1,234"), (1e-7, "1e-07"), (float("nan"), "–")],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text


def test_smoothing_is_a_mean_over_what_came_before() -> None:
    points = [(float(x), float(x)) for x in range(5)]
    assert smooth(points, 2) == [(0, 0), (1, 0.5), (2, 1.5), (3, 2.5), (4, 3.5)]
    assert smooth(points, 0) == points


def test_lines_keep_to_their_frame_and_higher_is_up() -> None:
    chart = line_chart("t", "u", [("a", 0, [(0, 1.0), (10, 3.0)]), ("b", 9, [(5, 2.0)])])
    assert chart is not None
    first, second = chart.lines
    places = [float(found) for found in re.findall(r"[\d.]+", first.path)]
    assert places[0] == chart.left
    assert places[2] == chart.right
    assert chart.top < places[3] < places[1] < chart.bottom
    assert (second.colour, second.dash) == (1, 1)
    assert line_chart("t", "u", [("a", 0, [])]) is None


def test_a_constant_line_is_drawn_in_the_middle() -> None:
    chart = line_chart("t", "u", [("a", 0, [(0, 2.0), (1, 2.0)])])
    assert chart is not None
    assert chart.lines[0].end[1] == pytest.approx((chart.top + chart.bottom) / 2)


def test_long_lines_are_thinned_and_keep_their_end() -> None:
    chart = line_chart("t", "u", [("a", 0, [(x, float(x)) for x in range(10_000)])])
    assert chart is not None
    assert chart.lines[0].path.count("L") == MOST_POINTS - 1
    assert chart.lines[0].end[0] == chart.right


def test_a_band_surrounds_its_line_within_the_frame() -> None:
    band = [(0, 0.0, 2.0), (10, 1.0, 9.0)]
    chart = line_chart("t", "u", [("a", 0, [(0, 1.0), (10, 5.0)]), ("b", 1, [(0, 4.0)])], bands={"a": band})
    assert chart is not None
    first, second = chart.lines
    assert second.band == ""
    corners = [(float(x), float(y)) for x, y in re.findall(r"([\d.]+) ([\d.]+)", first.band)]
    (x0, high0), (x1, high1), (_, low1), (_, low0) = corners
    assert (x0, x1) == (chart.left, chart.right)
    places = [float(found) for found in re.findall(r"[\d.]+", first.path)]
    assert chart.top <= high1 < places[3] < low1 <= chart.bottom
    assert chart.top <= high0 < places[1] < low0 <= chart.bottom


def test_intervals_surround_their_value_and_what_is_missing_has_no_place() -> None:
    chart = interval_chart("s", [("a", 0, (0.5, 0.4, 0.7)), ("b", 1, None)])
    first, second = chart.rows
    assert first.low is not None
    assert first.place is not None
    assert first.high is not None
    assert chart.left <= first.low < first.place < first.high <= chart.right
    assert (second.place, second.label) == (None, "not run")
    assert interval_chart("s", [("b", 1, None)]).ticks
