"""Which blocks a layout has, by arithmetic: a layout that comes from outside is never enumerated."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from trireme_shared.protocol.errors import InvalidArgument, TooLarge
from trireme_shared.protocol.records.layout import (
    ALIGNMENT_BYTES,
    ELEMENT_BYTES,
    Block,
    Layout,
    OptimizerSpec,
    Segment,
)
from trireme_shared.protocol.records.step import ParameterNumbers, is_among
from trireme_shared.serving.optimizers.classes import OF_WHOLE_PARAMETERS

MAX_BLOCKS = 1 << 20
MAX_INIT_PARTS = 8 * MAX_BLOCKS  # values, and the state of an optimizer
MAX_BLOCK_BYTES = 64 << 20
KINDS = ("param", "buffer", "first")


class Geometry:
    """The blocks of a layout by number. Raises InvalidArgument or TooLarge for an impossible layout."""

    def __init__(self, layout: Layout) -> None:
        if not 64 <= layout.block_bytes <= MAX_BLOCK_BYTES or layout.block_bytes % 64:
            msg = f"block_bytes is {layout.block_bytes}: expected a multiple of 64 up to {MAX_BLOCK_BYTES}"
            raise InvalidArgument(msg)
        self.layout = layout
        self.blocks = 0
        self._firsts: list[int] = []  # number of each segment's first block
        for index, segment in enumerate(layout.segments):
            if segment.kind not in KINDS or segment.dtype not in ELEMENT_BYTES or segment.elements < 1:
                msg = (
                    f"segment {index} is {segment.elements} elements of {segment.dtype!r}, kind "
                    f"{segment.kind!r}: expected "
                    f"at least 1 of {', '.join(ELEMENT_BYTES)}, kind {' or '.join(KINDS)}"
                )
                raise InvalidArgument(msg)
            if segment.kind == "param" and segment.dtype == "int64":
                msg = f"segment {index} holds int64 parameters: integers have no gradients, make them buffers"
                raise InvalidArgument(msg)
            self._firsts.append(self.blocks)
            step = layout.block_bytes // ELEMENT_BYTES[segment.dtype]
            self.blocks += -(-segment.elements // step)
        if self.blocks > MAX_BLOCKS:
            msg = (
                f"the layout has {self.blocks} blocks: at most {MAX_BLOCKS}; use larger blocks than "
                f"{layout.block_bytes} bytes"
            )
            raise TooLarge(msg)
        self._parts = ParameterParts(layout)

    def block(self, number: int) -> Block | None:
        """The block, None if the layout has no such number."""
        if not 0 <= number < self.blocks:
            return None
        index = bisect_right(self._firsts, number) - 1
        segment = self.layout.segments[index]
        step = self.layout.block_bytes // ELEMENT_BYTES[segment.dtype]
        first = (number - self._firsts[index]) * step
        return Block(number, index, first, min(step, segment.elements - first), segment.dtype)

    def parts(self, block: Block) -> Parts:
        """Of its parameters, if their sizes are known."""
        return self._parts.of(block)


def check_parameters(index: int, segment: Segment, sizes: Sequence[int]) -> None:
    """Raises InvalidArgument: the sizes of its parameters do not fill it."""
    grain = ALIGNMENT_BYTES // ELEMENT_BYTES[segment.dtype]
    filled = sum(-(-size // grain) * grain for size in sizes[:-1]) + sum(sizes[-1:])
    if sizes and filled != segment.elements:
        msg = f"the {len(sizes)} parameters of segment {index} take {filled} elements of {segment.elements}"
        raise InvalidArgument(msg)


Parts = tuple[tuple[int, int], ...]
"""(first element in a block, how many) of each parameter in it."""


def rounds_by_parameter(optimizer: OptimizerSpec, segment: Segment) -> bool:
    """Whether bits of a step of this segment depend on where its parameters end."""
    if segment.kind != "param" or optimizer.class_of(segment.group) in OF_WHOLE_PARAMETERS:
        return False
    options = {**optimizer.defaults, **optimizer.groups[segment.group]}
    return is_narrow(segment.dtype) or bool(options.get("fused"))


def is_narrow(dtype: str) -> bool:
    return ELEMENT_BYTES[dtype] == 2


class ParameterParts:
    """Of the segments that tell the sizes of their parameters. Raises InvalidArgument: they do not fill
    them."""

    def __init__(self, layout: Layout) -> None:
        self._firsts: list[list[int]] = []
        self._is_numbered = bool(layout.sizes)
        told = layout.sizes or ((),) * len(layout.segments)
        if len(told) != len(layout.segments):
            msg = f"sizes of the parameters of {len(told)} segments: the layout has {len(layout.segments)}"
            raise InvalidArgument(msg)
        segments = list(zip(layout.segments, told, strict=True))
        self._sizes = [sizes or segment.parameters for segment, sizes in segments]
        #: the number of each segment's first parameter
        self._offsets = list(accumulate((len(sizes) for sizes in self._sizes), initial=0))
        for number, (segment, sizes) in enumerate(zip(layout.segments, self._sizes, strict=True)):
            check_parameters(number, segment, sizes)
            grain = ALIGNMENT_BYTES // ELEMENT_BYTES[segment.dtype]
            self._firsts.append(
                list(accumulate((-(-size // grain) * grain for size in sizes), initial=0))[:-1]
            )

    def of(self, block: Block) -> Parts:
        """() if the sizes of its parameters are not known."""
        return tuple(part for _, part in self._numbered(block))

    def numbers_in(self, block: Block) -> list[int]:
        """Of the parameters in `of(block)`."""
        return [number for number, _ in self._numbered(block)]

    def frozen_in(self, block: Block, numbers: ParameterNumbers) -> tuple[int, ...]:
        """The places in `of(block)` of the parameters with these numbers. Raises InvalidArgument: the layout
        is of an earlier version, and does not tell where its parameters are."""
        if not numbers:
            return ()
        if not self._is_numbered:
            raise InvalidArgument(
                "a parameter requires no gradient any more, and the layout of this job does not say where "
                "its parameters lie: it is of an earlier version of Trireme",
                hint="start a new job, with the last model: --init-from",
            )
        return tuple(
            place for place, number in enumerate(self.numbers_in(block)) if is_among(number, numbers)
        )

    def _numbered(self, block: Block) -> list[tuple[int, tuple[int, int]]]:
        """The number and the part of each parameter in the block."""
        firsts, sizes, end = (
            self._firsts[block.segment],
            self._sizes[block.segment],
            block.first + block.elements,
        )
        found = []
        for number in range(max(0, bisect_right(firsts, block.first) - 1), len(firsts)):
            if firsts[number] >= end:
                break
            first, last = max(firsts[number], block.first), min(firsts[number] + sizes[number], end)
            if first < last:
                found.append((self._offsets[block.segment] + number, (first - block.first, last - first)))
        return found


def ends_of(parts: Parts, elements: int, element_bytes: int) -> Parts:
    """What is left of the parameters in a block of so many elements behind their last 64 bytes, unless the
    block ends there too."""
    grain = ALIGNMENT_BYTES // element_bytes
    ends = (first + count for first, count in parts)
    return tuple((end - end % grain, end % grain) for end in ends if end % grain and end != elements)
