"""How much of a step is done before others have their turn."""

from __future__ import annotations

from collections.abc import Iterator

AT_ONCE = 4096  # rows, so that what is made of them stays in the processor's cache
BYTES_AT_ONCE = 4 << 20  # of wide rows fewer
COUNTED_AT_ONCE = 1 << 16  # ids of which nothing but their slots are computed: half a millisecond
TOLD_AT_ONCE = 1 << 15  # rows: a millisecond or two, if they are copied


def portions(count: int, at_once: int = AT_ONCE) -> Iterator[slice]:
    """Of so many rows, `at_once` after `at_once`."""
    return (slice(first, first + at_once) for first in range(0, count, at_once))


def rows_at_once(numbers: int) -> int:
    """Of rows with so many float32."""
    return max(1, min(AT_ONCE, BYTES_AT_ONCE // (4 * numbers)))
