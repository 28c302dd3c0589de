"""Which trainer computes which lanes, and which parameter server holds which slots."""

from __future__ import annotations

from shared.records.record import Record


class LaneInterval(Record):
    trainer: str
    first: int
    last: int  # exclusive


class LaneMap(Record):
    """Who computes which lanes in this generation; intervals are disjoint and cover [0, lanes)."""

    generation: int
    lanes: int
    intervals: tuple[LaneInterval, ...] = ()

    def of(self, trainer: str) -> tuple[int, int]:
        """[first, last) of a trainer; (0, 0) for a hot spare."""
        for interval in self.intervals:
            if interval.trainer == trainer:
                return interval.first, interval.last
        return 0, 0


class SlotMap(Record):
    """`owners[slot]` is a pserver index."""

    version: int
    owners: tuple[int, ...]
