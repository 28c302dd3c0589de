"""Where a gradient's blocks go in tests that push none."""

from __future__ import annotations


class DoneBlocks(list[int]):
    """A BlockSink that keeps the numbers of the blocks that are done, in their order."""

    def done(self, block: int) -> None:
        self.append(block)
