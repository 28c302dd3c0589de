"""Blocks that travel in one operation: of one dtype, in the order in which backward finishes them, about `bucket_bytes` each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shared.blocks.narrow import DTYPES
from shared.records.job_spec import Narrow
from shared.records.layout import Block, Layout


@dataclass(frozen=True, slots=True)
class Bucket:
    """`dtype`: of the blocks; `narrow`: the one in which they travel, if it is another."""

    blocks: tuple[Block, ...]
    dtype: str
    narrow: Narrow | None

    @property
    def numbers(self) -> list[int]:
        return [block.number for block in self.blocks]

    @property
    def elements(self) -> int:
        return sum(block.elements for block in self.blocks)

    @property
    def travels(self) -> torch.dtype:
        return DTYPES[self.narrow or self.dtype]

    def described(self) -> str:
        return f"{self.blocks[0].number} to {self.blocks[-1].number}, {self.elements} x {self.narrow or self.dtype}"


def buckets_of(layout: Layout, payloads: Sequence[Narrow | None], bucket_bytes: int) -> list[Bucket]:
    """Of all parameters. The last layers first. `payloads[block]`: the narrower dtype in which it travels, if any. A block that is larger than a bucket
    has one to itself."""
    found: list[Bucket] = []
    waiting: dict[tuple[str, Narrow | None], list[Block]] = {}
    sizes: dict[tuple[str, Narrow | None], int] = {}
    trained = [block for block in layout.blocks() if layout.segments[block.segment].kind == "param"]
    for block in reversed(trained):
        kind = block.dtype, payloads[block.number]
        size = block.elements * DTYPES[kind[1] or kind[0]].itemsize
        if kind in waiting and sizes[kind] + size > bucket_bytes:
            found.append(Bucket(tuple(waiting.pop(kind)), *kind))
            sizes[kind] = 0
        waiting.setdefault(kind, []).append(block)
        sizes[kind] = sizes.get(kind, 0) + size
    return found + [Bucket(tuple(blocks), *kind) for kind, blocks in waiting.items()]


def buffers_of(layout: Layout) -> list[Block]:
    """What is no parameter: running means, counters."""
    return [block for block in layout.blocks() if layout.segments[block.segment].kind != "param"]
