"""Small jobs for these tests: layouts, headers, and a pserver that was initialised with them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing
from typing import Any

import pytest_asyncio
import torch

from trireme_shared.blocks.buffers import bytes_of
from trireme_shared.platform.runtime.process_setup import optimizers_without_compiler
from trireme_shared.protocol.records import Mode
from trireme_shared.protocol.records.layout import Layout, OptimizerSpec, Segment
from trireme_shared.protocol.records.step import LanePosition, LaneZero, StepRecord
from trireme_shared.protocol.wire.messages import (
    InitBlock,
    InitHeader,
    PulledBlock,
    PullEnd,
    PullRequest,
    PushBlock,
    PushHeader,
)
from trireme_shared.serving.pserver import Pserver

optimizers_without_compiler()
JOB = "ctr"
SGD = OptimizerSpec(name="SGD", defaults={"lr": 0.1, "momentum": 0.9}, groups=({},))


def layout_of(
    *segments: Segment | int, block_bytes: int = 64, optimizer: OptimizerSpec = SGD, digest: str = "abc"
) -> Layout:
    """A number is a float32 parameter segment of group 0."""
    made = tuple(
        Segment(kind="param", dtype="float32", elements=s, group=0) if isinstance(s, int) else s
        for s in segments
    )
    return Layout(segments=made, block_bytes=block_bytes, digest=digest, optimizer=optimizer)


def init_header(layout: Layout, mode: Mode = Mode.SYNC, lanes: int = 4, **fields: Any) -> InitHeader:
    record = StepRecord(version=0, positions=tuple(LanePosition(lane=lane) for lane in range(lanes)))
    return InitHeader(
        **{
            "job": JOB,
            "generation": 0,
            "mode": mode,
            "lanes": lanes,
            "layout": layout,
            "pserver": 0,
            "record": record,
            **fields,
        }
    )


def push_header(
    step: int, lanes: Iterable[int] = range(4), options: tuple[dict[str, Any], ...] = ({},), **fields: Any
) -> PushHeader:
    positions = tuple(LanePosition(lane=lane, epoch=0, index=step, offset=lane) for lane in lanes)
    lane_zero = LaneZero(options=options) if any(position.lane == 0 for position in positions) else None
    return PushHeader(
        **{
            "job": JOB,
            "generation": 1,
            "mode": Mode.SYNC,
            "trainer": "t",
            "step": step,
            "positions": positions,
            "lane_zero": lane_zero,
            **fields,
        }
    )


def async_header(
    task: int, start: int, end: int, minibatches: int, attempt: int = 1, **fields: Any
) -> PushHeader:
    return PushHeader(
        **{
            "job": JOB,
            "generation": 1,
            "mode": Mode.ASYNC,
            "trainer": "t",
            "task_id": str(task),
            "attempt": attempt,
            "start": start,
            "end": end,
            "minibatches": minibatches,
            "lane_zero": LaneZero(options=({},)),
            **fields,
        }
    )


def pull_request(
    version: int | None, blocks: Iterable[int], wait_s: float = 0.0, **fields: Any
) -> PullRequest:
    return PullRequest(
        **{
            "job": JOB,
            "generation": 1,
            "version": version,
            "blocks": tuple(blocks),
            "wait_s": wait_s,
            **fields,
        }
    )


def payload_of(tensor: torch.Tensor) -> bytes:
    return bytes(bytes_of(tensor.contiguous()))


async def stream(*items: Any) -> AsyncIterator[Any]:
    for item in items:
        yield item


def values_of(layout: Layout, seed: int = 0) -> dict[int, torch.Tensor]:
    """Initial values of all blocks."""
    torch.manual_seed(seed)
    return {
        block.number: torch.randint(0, 9, (block.elements,))
        if block.dtype == "int64"
        else torch.randn(block.elements)
        for block in layout.blocks()
    }


async def initialised(
    layout: Layout, mode: Mode = Mode.SYNC, lanes: int = 4, kind: type[Pserver] = Pserver, **fields: Any
) -> tuple[Pserver, dict[int, torch.Tensor]]:
    pserver = kind(JOB, "ps-1", index=0, **fields)
    values = values_of(layout)
    items = [(InitBlock(block=number), payload_of(value)) for number, value in values.items()]
    await pserver.init(init_header(layout, mode, lanes), stream(*items))
    return pserver, values


def item(
    block: int, gradient: torch.Tensor, lanes: tuple[int, int] = (0, 4), count: int = 8
) -> tuple[PushBlock, bytes]:
    return PushBlock(block=block, lanes=lanes, count=count), payload_of(gradient)


async def pulled(pserver: Pserver, request: PullRequest) -> tuple[dict[int, torch.Tensor], PullEnd]:
    """Copies of the float32 blocks that came, and the end."""
    found: dict[int, torch.Tensor] = {}
    async with aclosing(pserver.pull(request)) as answer:
        async for part in answer:
            if isinstance(part, PullEnd):
                return found, part
            assert isinstance(part[0], PulledBlock)
            found[part[0].block] = torch.frombuffer(bytearray(part[1]), dtype=torch.float32)
    raise AssertionError("no end")


def check_invariants(pserver: Pserver) -> None:
    """At the end of a test: nothing waits, and every buffer is held exactly by those who should hold it."""
    assert not pserver.pulls
    if pserver.store is None:
        return
    for state in pserver.store.blocks.values():
        holders = [state.current, *([state.previous] if state.previous else [])]
        for buffer in holders:
            assert buffer.references == sum(other is buffer for other in holders), (state, buffer)
        for node in state.tree.nodes.values():
            assert node.buffer is None or node.buffer.references == 1
    kept = {id(b): b for s in pserver.store.blocks.values() for b in [s.current, s.previous] if b is not None}
    waiting = [
        n.buffer for s in pserver.store.blocks.values() for n in s.tree.nodes.values() if n.buffer is not None
    ]
    held = sum(buffer.view.nbytes for buffer in [*kept.values(), *waiting])
    assert pserver.store.pool.allocated_bytes == held + pserver.store.pool.free_bytes


async def settled(pserver: Pserver, limit_s: float = 5.0) -> None:
    """`check_invariants`, but a connection that was cut off gives back what it held a moment later."""
    until = time.monotonic() + limit_s
    while True:
        try:
            return check_invariants(pserver)
        except AssertionError:
            if time.monotonic() >= until:
                raise
        await asyncio.sleep(0.01)


PLAIN = OptimizerSpec(name="SGD", defaults={"lr": 1.0}, groups=({},))
LAYOUT = layout_of(40, optimizer=PLAIN)  # blocks of 16, 16 and 8
ONES = torch.ones(16)


@pytest_asyncio.fixture
async def pserver():
    made, _ = await initialised(LAYOUT)
    yield made
    check_invariants(made)


def whole_step(step: int, *blocks: int, **fields):
    sizes = {0: 16, 1: 16, 2: 8}
    return push_header(step, **fields), stream(
        *(item(number, torch.ones(sizes[number])) for number in blocks or (0, 1, 2))
    )
