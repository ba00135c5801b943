"""Geometry of the report's figures: numbers in, coordinates out. The template draws them as inline SVG.

Coordinates are pixels of a drawing of fixed size with the origin at its upper left.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

Point = tuple[float, float]
Range = tuple[float, float, float]
Row = TypeVar("Row", Point, Range)

COLOURS = 8  # hues of the template; series beyond them repeat the hues with another dash
MOST_POINTS = 300


@dataclass(frozen=True, slots=True)
class Tick:
    place: float
    label: str


@dataclass(frozen=True, slots=True)
class Line:
    """One series: SVG path data, its style by number, and what the pointer reads on it. `band`: empty, or an area."""

    name: str
    path: str
    band: str
    colour: int
    dash: int
    last: str
    end: Point


@dataclass(frozen=True, slots=True)
class LineChart:
    title: str
    unit: str
    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    lines: list[Line]


@dataclass(frozen=True, slots=True)
class Interval:
    """One row of an interval plot; places along the axis, None where there is nothing to show."""

    name: str
    y: float
    place: float | None
    low: float | None
    high: float | None
    label: str
    colour: int


@dataclass(frozen=True, slots=True)
class IntervalChart:
    title: str
    width: int
    height: int
    left: int
    right: int
    bottom: int
    ticks: list[Tick]
    rows: list[Interval]


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers within [low, high]; one number where the two are equal."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low if math.isfinite(low) else 0.0]
    raw = (high - low) / max(1, count - 1)
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * magnitude for factor in (1, 2, 2.5, 5, 10) if factor * magnitude >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(step * number, 12) for number in range(first, last + 1)]


def number(value: float) -> str:
    """A number for an axis or a cell: three significant digits, no exponent where it can be avoided."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "–"
    if 1e-3 <= abs(value) < 1e6:
        digits = max(0, 2 - math.floor(math.log10(abs(value))))
        text = f"{value:,.{digits}f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    return f"{value:.2g}"


def smooth(points: Sequence[Point], window: int) -> list[Point]:
    """The mean over the last `window` points, as many as there are at the start."""
    if window <= 1:
        return list(points)
    result, total = [], 0.0
    for index, (x, y) in enumerate(points):
        total += y - (points[index - window][1] if index >= window else 0.0)
        result.append((x, total / min(window, index + 1)))
    return result


def _thinned(points: list[Row]) -> list[Row]:
    if len(points) <= MOST_POINTS:
        return points
    stride = len(points) / (MOST_POINTS - 1)
    return [points[int(index * stride)] for index in range(MOST_POINTS - 1)] + [points[-1]]


def line_chart(
    title: str,
    unit: str,
    series: Sequence[tuple[str, int, Sequence[Point]]],
    *,
    bands: Mapping[str, Sequence[Range]] = MappingProxyType({}),
    bounds: tuple[float, float] | None = None,
) -> LineChart | None:
    """Lines over steps; `series` holds (name, style number, points with finite values). None without a point.

    `bands` has the area of a series, by its name, as (step, low, high); `bounds` fixes the vertical axis, for shares.
    """
    drawn = [(name, style, _thinned(list(points))) for name, style, points in series if points]
    if not drawn:
        return None
    shown = {name: _thinned(list(bands[name])) for name, _, _ in drawn if name in bands}
    everything = [point for _, _, points in drawn for point in points]
    everything += [(x, y) for band in shown.values() for x, *both in band for y in both]
    x_low, x_high = min(x for x, _ in everything), max(x for x, _ in everything)
    y_low, y_high = bounds or (min(y for _, y in everything), max(y for _, y in everything))
    if y_high - y_low <= 1e-9 * max(1.0, abs(y_high)):
        y_low, y_high = y_low - 0.5, y_high + 0.5
    if bounds is None:
        y_low, y_high = y_low - 0.05 * (y_high - y_low), y_high + 0.05 * (y_high - y_low)
    y_values = nice_ticks(y_low, y_high)
    width, height, left, right, top, bottom = 420, 230, 52, 12, 10, 28

    def place(point: Point) -> Point:
        across = (point[0] - x_low) / (x_high - x_low) if x_high > x_low else 0.5
        up = (point[1] - y_low) / (y_high - y_low)
        return round(left + across * (width - left - right), 1), round(
            height - bottom - up * (height - top - bottom), 1
        )

    lines = []
    for name, style, points in drawn:
        places = [place(point) for point in points]
        path = "M" + "L".join(f"{x} {y}" for x, y in places)
        if len(places) == 1:
            path += "h0.1"  # a path of one point draws nothing, a round cap on a hair does
        edge = [(x, high) for x, _, high in shown.get(name, [])] + [(x, low) for x, low, _ in shown.get(name, [])[::-1]]
        band = "M" + "L".join(f"{x} {y}" for x, y in map(place, edge)) + "Z" if edge else ""
        lines.append(Line(name, path, band, style % COLOURS, style // COLOURS % 3, number(points[-1][1]), places[-1]))
    x_values = nice_ticks(x_low, x_high)
    return LineChart(
        title=title,
        unit=unit,
        width=width,
        height=height,
        left=left,
        right=width - right,
        top=top,
        bottom=height - bottom,
        x_ticks=[Tick(place((value, y_low))[0], number(value)) for value in x_values],
        y_ticks=[Tick(place((x_low, value))[1], number(value)) for value in y_values],
        lines=lines,
    )


def interval_chart(title: str, rows: Sequence[tuple[str, int, tuple[float, float, float] | None]]) -> IntervalChart:
    """Shares with their intervals, a row each; `rows` holds (name, style, (value, low, high) or None)."""
    row_height, left, right, width, bottom = 22, 10, 14, 360, 24
    known = [bound for _, _, found in rows if found for bound in found[1:]] or [0.0, 1.0]
    low, high = max(0.0, min(known) - 0.02), min(1.0, max(known) + 0.02)
    ticks = nice_ticks(low, high, 6)

    def place(value: float) -> float:
        return round(left + (value - low) / (high - low) * (width - left - right), 1)

    drawn = []
    for index, (name, style, found) in enumerate(rows):
        y = row_height * index + row_height / 2
        if found is None:
            drawn.append(Interval(name, y, None, None, None, "not run", style % COLOURS))
            continue
        label = f"{name}: {percent(found[0])} ({percent(found[1])} to {percent(found[2])})"
        value, least, most = (place(share) for share in found)
        drawn.append(Interval(name, y, value, least, most, label, style % COLOURS))
    height = row_height * len(rows) + bottom
    return IntervalChart(
        title=title,
        width=width,
        height=height,
        left=left,
        right=width - right,
        bottom=height - bottom,
        ticks=[Tick(place(value), percent(value, 0)) for value in ticks],
        rows=drawn,
    )


def percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f}%"
