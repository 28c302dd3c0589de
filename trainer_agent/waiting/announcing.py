"""Blocks that backward has finished with, told to the event loop from the thread that computes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from shared.records.layout import Block

ANNOUNCED_BYTES = 256 << 10  # finished blocks are announced when there are so many bytes of them, or no more will come


def announcer(blocks: Sequence[Block], finished: Callable[[int], None]) -> Callable[[int], None]:
    """A function to call in a thread, once for each block; `finished` is called in the running event loop. Small blocks are announced together: waking
    the event loop and a parameter server for each costs too much."""
    loop = asyncio.get_running_loop()
    waiting: list[int] = []
    size, left = 0, len(blocks)

    def announce(block: int) -> None:
        nonlocal size, left
        waiting.append(block)
        size, left = size + blocks[block].bytes, left - 1
        if size >= ANNOUNCED_BYTES or not left:
            loop.call_soon_threadsafe(all_finished, tuple(waiting))
            waiting.clear()
            size = 0

    def all_finished(numbers: tuple[int, ...]) -> None:
        for number in numbers:
            finished(number)

    return announce
