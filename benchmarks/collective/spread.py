"""How values are told."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def spread(values: Sequence[float], digits: int = 2) -> str:
    """`median (quartile-quartile)`."""
    if len(values) < 2:
        return f"{values[0]:.{digits}f}" if values else ""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"
