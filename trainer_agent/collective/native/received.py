"""A version that a trainer has received whole before it knows that all others have, too: kept beside what it has, until that is known.

reduced ─► Received ─ all say that they have it ─► the version that the trainer has
              `─ the group breaks: told in the next one ─► who lacks it gets it ─► all say ...
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise

from pydantic import ValidationError

from trainer_agent.collective.mean_blocks import MeanStore, released
from trireme_shared.blocks.buffers import Buffer
from trireme_shared.collective.group import Broken
from trireme_shared.protocol.records.step import StepRecord

HEAD_BYTES = 8


@dataclass(slots=True)
class Received:
    """`generation`: in which it was made: with another one the bits are others. `arrived`: all blocks; it has a reference to each. `store`: which lacks it."""

    store: MeanStore
    generation: int
    version: int
    arrived: dict[int, Buffer | None]
    record: StepRecord

    def follows(self, store: MeanStore | None) -> bool:
        """Whether it is the version after the one that `store` has."""
        return self.store is store and self.version == self.store.has + 1

    def release(self) -> None:
        released(self.arrived)
        self.arrived = {}

    def to_bytes(self) -> bytes:
        blocks = sorted(self.arrived)
        parts = [b"" if (buffer := self.arrived[number]) is None else bytes(buffer.view) for number in blocks]
        told = {"record": self.record.model_dump(mode="json"), "sizes": [len(part) for part in parts]}
        head = json.dumps(told).encode()
        return len(head).to_bytes(HEAD_BYTES, "big") + head + b"".join(parts)

    @classmethod
    def read(cls, data: bytes, store: MeanStore, generation: int) -> Received:
        """Raises Broken: it does not fit what `store` has."""
        first = HEAD_BYTES + int.from_bytes(data[:HEAD_BYTES], "big")
        try:
            told = json.loads(data[HEAD_BYTES:first])
            record, sizes = StepRecord.model_validate(told["record"]), [int(size) for size in told["sizes"]]
        except (ValidationError, ValueError, KeyError, TypeError) as error:
            raise Broken(f"a version that was received elsewhere cannot be read: {str(error)[:200]}") from None
        places = [store.blocks[number].place for number in sorted(store.blocks)]
        fits = len(sizes) == len(places) and all(
            size in (0, place.bytes) for size, place in zip(sizes, places, strict=True)
        )
        if not fits or record.version != store.has + 1 or len(data) != first + sum(sizes):
            raise Broken(f"version {record.version} that was received elsewhere does not follow version {store.has}")
        ends = [first]
        for size in sizes:
            ends.append(ends[-1] + size)
        arrived: dict[int, Buffer | None] = {}
        for place, (begin, end) in zip(places, pairwise(ends), strict=True):
            arrived[place.number] = None
            if end > begin:
                buffer = store.pool.take(place.dtype, place.elements)
                buffer.view[:] = data[begin:end]
                arrived[place.number] = buffer
        return cls(store, generation, record.version, arrived, record)
