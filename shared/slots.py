"""Which slot a block belongs to, and which parameter servers hold the slots of a new job."""

from __future__ import annotations


def slot_of(block: int, slot_count: int) -> int:
    """Block numbers are dense, so the remainder spreads them evenly; no hash does better."""
    return block % slot_count


def spread(slot_count: int, pservers: int) -> tuple[int, ...]:
    """The owners in a first slot map: round robin, so that neighbouring blocks go to different pservers."""
    return tuple(slot % pservers for slot in range(slot_count))
