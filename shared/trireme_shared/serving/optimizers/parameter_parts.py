"""Where parameters end, if a step rounds by that: then their ends are stepped by themselves, with the bits of plain PyTorch.

A kernel takes a vector of numbers at a time and the last few of a tensor one by one. torch's fused kernels, and sums with a factor
(`add` with `alpha`) of 16-bit numbers, round these otherwise. Blocks are cut at 64 bytes, which are whole vectors, so it is enough that
no step goes beyond the end of a parameter.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

from trireme_shared.protocol.records.layout import ALIGNMENT_BYTES, ELEMENT_BYTES, Block, Layout, OptimizerSpec, Segment
from trireme_shared.serving.optimizers.classes import OF_WHOLE_PARAMETERS

Parts = tuple[tuple[int, int], ...]
"""(first element in a block, how many) of each parameter in it."""


def rounds_by_parameter(optimizer: OptimizerSpec, segment: Segment) -> bool:
    """Whether bits of a step of this segment depend on where its parameters end."""
    if segment.kind != "param" or optimizer.name in OF_WHOLE_PARAMETERS:
        return False
    options = {**optimizer.defaults, **optimizer.groups[segment.group]}
    return is_narrow(segment.dtype) or bool(options.get("fused"))


def is_narrow(dtype: str) -> bool:
    return ELEMENT_BYTES[dtype] == 2


class ParameterParts:
    """Of the segments that tell the sizes of their parameters."""

    def __init__(self, layout: Layout) -> None:
        self._firsts: list[list[int]] = []
        self._sizes = [segment.parameters for segment in layout.segments]
        for segment in layout.segments:
            grain = ALIGNMENT_BYTES // ELEMENT_BYTES[segment.dtype]
            self._firsts.append(
                list(accumulate((-(-size // grain) * grain for size in segment.parameters), initial=0))[:-1]
            )

    def of(self, block: Block) -> Parts:
        """() if its steps do not depend on them."""
        firsts, sizes, end = self._firsts[block.segment], self._sizes[block.segment], block.first + block.elements
        found = []
        for number in range(max(0, bisect_right(firsts, block.first) - 1), len(firsts)):
            if firsts[number] >= end:
                break
            first, last = max(firsts[number], block.first), min(firsts[number] + sizes[number], end)
            if first < last:
                found.append((first - block.first, last - first))
        return tuple(found)


def ends_of(parts: Parts, elements: int, element_bytes: int) -> Parts:
    """What is left of the parameters in a block of so many elements behind their last 64 bytes, unless the block ends there too."""
    grain = ALIGNMENT_BYTES // element_bytes
    ends = (first + count for first, count in parts)
    return tuple((end - end % grain, end % grain) for end in ends if end % grain and end != elements)
