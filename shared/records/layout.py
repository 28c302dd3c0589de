"""Layout of the flat vectors: their segments, and the blocks they are cut into.

parameters --64-byte aligned--> flat vector of a segment --cut--> blocks --mod slot_count--> slots --slot map--> pserver
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from shared.records.job_spec import Narrow, Transported
from shared.records.record import Record

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

    def travels_as(self, dtype: Transported) -> Narrow | None:
        """The dtype its blocks are cast to if float32 parameters are sent as `dtype`; None: they are not cast.

        Buffers are never cast: they are few, and running statistics would lose small changes.
        """
        return None if dtype == "float32" or self.kind != "param" or self.dtype != "float32" else dtype


class OptimizerSpec(Record):
    """A class of shared.optimizers.classes by name, with its constructor defaults and the options of each parameter group."""

    name: str
    defaults: dict[str, Any]
    groups: tuple[dict[str, Any], ...]


class Layout(Record):
    """`digest`: SHA-256 over names, shapes, dtypes and memory formats of all parameters and buffers, in order. `device`: the kind
    of device (cpu, cuda) of the trainer that initialised the parameters; "" if it is not known. `initial`: digest of the model's values
    after `init_from` was loaded; "": none was."""

    segments: tuple[Segment, ...]
    block_bytes: int
    digest: str
    optimizer: OptimizerSpec
    slot_count: int = 1024
    device: str = ""
    initial: str = ""

    @property
    def offsets(self) -> tuple[int, ...]:
        """Byte offsets of the segments, laid end to end, each aligned to ALIGNMENT_BYTES."""
        sizes = [-(-segment.bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for segment in self.segments]
        return tuple(accumulate(sizes, initial=0))[:-1]

    @property
    def vector_bytes(self) -> int:
        """Bytes of all segments laid end to end."""
        return self.offsets[-1] + self.segments[-1].bytes if self.segments else 0

    def blocks(self) -> Iterator[Block]:
        """All blocks, numbered from 0 through the segments in order; the last block of a segment may be shorter."""
        number = 0
        for index, segment in enumerate(self.segments):
            step = self.block_bytes // ELEMENT_BYTES[segment.dtype]
            for first in range(0, segment.elements, step):
                yield Block(number, index, first, min(step, segment.elements - first), segment.dtype)
                number += 1

    def payloads(self, dtype: Transported) -> list[Narrow | None]:
        """Segment.travels_as of each block."""
        return [self.segments[block.segment].travels_as(dtype) for block in self.blocks()]


@dataclass(frozen=True, slots=True)
class Block:
    """`elements` elements of segment `segment`, starting at `first`."""

    number: int
    segment: int
    first: int
    elements: int
    dtype: str

    @property
    def bytes(self) -> int:
        return self.elements * ELEMENT_BYTES[self.dtype]
