"""Layout of the flat vectors and where each block lives: pure arithmetic for trainers, pservers and master.

parameters --64-byte aligned--> flat vector of a segment --cut--> blocks --mod slot_count--> slots --slot map--> pserver
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shared.records import Record

ALIGNMENT_BYTES = 64
ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8}


class Segment(Record):
    """One flat vector: parameters (kind "param", stepped by optimizer group `group`) or buffers (kind "buffer")."""

    kind: str
    dtype: str
    elements: int
    group: int = -1

    @property
    def bytes(self) -> int:
        return self.elements * ELEMENT_BYTES[self.dtype]


class OptimizerSpec(Record):
    """A torch.optim class by name, with its constructor defaults and the options of each parameter group."""

    name: str
    defaults: dict[str, Any]
    groups: tuple[dict[str, Any], ...]


class Layout(Record):
    """`digest`: SHA-256 over names, shapes and dtypes of all parameters and buffers, in order."""

    segments: tuple[Segment, ...]
    block_bytes: int
    digest: str
    optimizer: OptimizerSpec
    slot_count: int = 1024

    def blocks(self) -> Iterator[Block]:
        """All blocks, numbered from 0 through the segments in order; the last block of a segment may be shorter."""
        number = 0
        for index, segment in enumerate(self.segments):
            step = self.block_bytes // ELEMENT_BYTES[segment.dtype]
            for first in range(0, segment.elements, step):
                yield Block(number, index, first, min(step, segment.elements - first), segment.dtype)
                number += 1


@dataclass(frozen=True, slots=True)
class Block:
    """`elements` elements of segment `segment` from `first`."""

    number: int
    segment: int
    first: int
    elements: int
    dtype: str

    @property
    def bytes(self) -> int:
        return self.elements * ELEMENT_BYTES[self.dtype]


def slot_of(block: int, slot_count: int) -> int:
    """Block numbers are dense, so the identity spreads them evenly: no hash does better."""
    return block % slot_count


def spread(slot_count: int, pservers: int) -> tuple[int, ...]:
    """Owners of all slots for a first slot map: round robin, so that neighbouring blocks go to different pservers."""
    return tuple(slot % pservers for slot in range(slot_count))
