"""How values are told."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper quartile; of one value it is all three."""
    if len(values) == 1:
        return (values[0],) * 3
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def spread(values: Sequence[float], digits: int = 2) -> str:
    """`median (quartile-quartile)`."""
    if len(values) < 2:
        return f"{values[0]:.{digits}f}" if values else ""
    low, middle, high = quartiles(values)
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"
