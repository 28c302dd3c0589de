"""A metric by step in a terminal: a chart of braille dots (asterisks where the terminal has no such
characters), one for each metric, and the same in one line. Nothing depends on colour.

points (step, value) ─► lines from point to point on a grid of dots ─► rows of characters between axes
"""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Iterator, Sequence

from master_service.core.state.series import Series
from trireme.view.report import number

Points = Sequence[tuple[float, float]]

ROWS = 12
SMALL_ROWS = 8  # one of several charts, or what stays after the end
LEAST_COLUMNS = 20
MOST_COLUMNS = 160
_BITS = (
    (0x01, 0x08),
    (0x02, 0x10),
    (0x04, 0x20),
    (0x40, 0x80),
)  # of the dots in a braille character, by row and column
_BLOCKS = "▁▂▃▄▅▆▇█"
_LEVELS = "_.-=*#"
_EMPTY = 0x2800


def shows_braille(encoding: str | None) -> bool:
    """Whether text in that encoding can hold it."""
    try:
        "⣿│▁".encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def chart(
    name: str, points: Points, width: int, *, rows: int = ROWS, braille: bool = True, unit: str = "step"
) -> list[str]:
    """Lines of at most `width` characters (at least LEAST_COLUMNS for the chart). `points`: by step, at least
    one, all finite. `unit`: of what they are by."""
    values = [value for _, value in points]
    if len(points) == 1:
        return [f"{name} {number(values[0])} at {unit} {points[0][0]:.0f}"]
    title = f"{name} (last {number(values[-1])}, lowest {number(min(values))}, highest {number(max(values))})"
    least, most = _range(values)
    beside = {0: number(most), rows - 1: number(least)}
    if rows > 2 and number(least) != number(most):
        beside[(rows - 1) // 2] = number(least / 2 + most / 2)
    edge = max(map(len, beside.values()))
    columns = min(MOST_COLUMNS, max(LEAST_COLUMNS, width - edge - 3))
    drawn = _drawn(points, least, most, columns, rows, braille=braille)
    tick, bar, corner, line = "┤│└─" if braille else "+|+-"
    body = [
        f"{beside.get(row, ''):>{edge}} {tick if row in beside else bar}{text}".rstrip()
        for row, text in enumerate(drawn)
    ]
    begin, end = f"{points[0][0]:.0f}", f"{unit} {points[-1][0]:.0f}"
    below = f"{'':>{edge}}  {begin}{end:>{columns - len(begin)}}"
    return [title, *body, f"{'':>{edge}} {corner}{line * columns}", below]


def last_chart(name: str, points: Points, encoding: str | None) -> str:
    """What stays on a terminal after the end; "" if there is nothing to draw."""
    finite = [(step, value) for step, value in points if math.isfinite(value)]
    if len(finite) < 2:
        return ""
    columns = shutil.get_terminal_size().columns
    return "\n".join(chart(name, finite, columns, rows=SMALL_ROWS, braille=shows_braille(encoding)))


def show_chart(name: str, series: Series) -> None:
    """On stdout after the end, if that is a terminal."""
    if sys.stdout.isatty():
        points = series.points(0, sys.maxsize, 2 * MOST_COLUMNS, 0, None)
        if drawn := last_chart(name, [(point.first, point.mean) for point in points], sys.stdout.encoding):
            print(f"\n{drawn}")  # noqa: T201


def sparkline(values: Sequence[float], width: int, *, braille: bool = True) -> str:
    """One line of at most `width` characters: the mean of each part of the values."""
    if not values:
        return ""
    levels, parts = _BLOCKS if braille else _LEVELS, min(width, len(values))
    cut = [values[part * len(values) // parts : (part + 1) * len(values) // parts] for part in range(parts)]
    means = [math.fsum(part) / len(part) for part in cut]
    least, most = min(means), max(means)
    if _is_same(least, most):
        return levels[0] * parts
    return "".join(
        levels[round((mean / (most - least) - least / (most - least)) * (len(levels) - 1))] for mean in means
    )


def _is_same(least: float, most: float) -> bool:
    """But for the rounding of means."""
    return math.isclose(least, most, rel_tol=1e-9)


def _range(values: Sequence[float]) -> tuple[float, float]:
    """The lowest and the highest value; around a value that never changes, some space."""
    least, most = min(values), max(values)
    if not _is_same(least, most):
        return least, most
    space = abs(most) / 10 or 1.0
    return least - space, most + space


def _drawn(points: Points, least: float, most: float, columns: int, rows: int, *, braille: bool) -> list[str]:
    wide, high = (2, 4) if braille else (1, 1)
    cells = [[0] * columns for _ in range(rows)]
    for x, y in _dots(points, least, most, columns * wide, rows * high):
        cells[y // high][x // wide] |= _BITS[y % high][x % wide] if braille else 1
    shown = (
        (lambda cell: chr(_EMPTY + cell) if cell else " ") if braille else (lambda cell: "*" if cell else " ")
    )
    return ["".join(map(shown, row)) for row in cells]


def _dots(points: Points, least: float, most: float, wide: int, high: int) -> Iterator[tuple[int, int]]:
    """Those of the lines from point to point; (0, 0) is above on the left."""
    first = points[0][0]
    steps = points[-1][0] - first or 1.0

    def place(step: float, value: float) -> tuple[int, int]:
        part = value / (most - least) - least / (
            most - least
        )  # the difference of two very large numbers may be infinite
        return round((step - first) / steps * (wide - 1)), round((1 - min(1.0, max(0.0, part))) * (high - 1))

    x, y = place(*points[0])
    yield x, y
    for step, value in points[1:]:
        to_x, to_y = place(step, value)
        long = max(abs(to_x - x), abs(to_y - y))
        for part in range(1, long + 1):
            yield x + round((to_x - x) * part / long), y + round((to_y - y) * part / long)
        x, y = to_x, to_y
