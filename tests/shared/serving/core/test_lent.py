"""Blocks that wait for their siblings where their sender has them: until the push is answered or given up,
and no longer."""

import asyncio
import weakref
from contextlib import suppress

import pytest
import torch

from tests.pserver_service.jobs import (
    PLAIN,
    check_invariants,
    initialised,
    layout_of,
    pull_request,
    pulled,
    push_header,
)
from trireme_shared.blocks.buffers import bytes_of
from trireme_shared.protocol.wire.messages import PushBlock
from trireme_shared.serving.core.blocks import Accumulator
from trireme_shared.serving.core.calls import OpenPush

ELEMENTS = 16
LEFT, RIGHT = torch.linspace(0, 1, ELEMENTS), torch.linspace(3, 5, ELEMENTS)
MEAN = (LEFT + RIGHT) * 0.5


def half(number, values):
    """The block of one of two trainers, in memory that may only be read."""
    return PushBlock(block=0, lanes=(2 * number, 2 * number + 2), count=2), bytes_of(values).toreadonly()


async def blocks(*items, then_wait_s=0.0):
    for item in items:
        yield item
    await asyncio.sleep(then_wait_s)


def pushed(pserver, number, values, then_wait_s=0.0):
    lanes = range(2 * number, 2 * number + 2)
    return asyncio.ensure_future(
        pserver.push(push_header(0, lanes), blocks(half(number, values), then_wait_s=then_wait_s))
    )


async def server():
    return await initialised(layout_of(ELEMENTS, optimizer=PLAIN))


async def gradient(pserver, before):
    """That made version 1, by plain SGD with a learning rate of 1."""
    found = (await pulled(pserver, pull_request(1, [0])))[0][0]
    check_invariants(pserver)
    return torch.equal(found, before[0] - MEAN)


async def test_a_block_that_waits_is_read_where_it_is_and_the_push_is_answered_then(monkeypatch):
    kept = []
    monkeypatch.setattr(Accumulator, "keep", lambda tree: kept.append(tree))
    pserver, before = await server()
    first = pushed(pserver, 0, LEFT)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not first.done()
    await pushed(pserver, 1, RIGHT)
    assert (await first).applied == 1
    assert not kept
    assert await gradient(pserver, before)


@pytest.mark.parametrize("copies", [True, False])
@pytest.mark.parametrize("given_up", [False, True])
async def test_memory_is_the_senders_again_after_the_push(monkeypatch, copies, given_up):
    """Without the copy, what is written then is averaged."""
    if not copies:
        monkeypatch.setattr(OpenPush, "keep_some", lambda *_: False)
        monkeypatch.setattr("trireme_shared.serving.block_server.settled", _at_once)
    pserver, before = await server()
    memory = LEFT.clone()
    pushing = pushed(pserver, 0, memory, then_wait_s=30.0 if given_up else 0.0)
    if given_up:
        while not pserver.store.blocks[0].tree.nodes:
            await asyncio.sleep(0)
        pushing.cancel()
    with suppress(asyncio.CancelledError):
        await pushing
    memory.zero_()
    await pushed(pserver, 1, RIGHT)
    assert await gradient(pserver, before) == copies


@pytest.mark.parametrize("waits", [True, False])
async def test_an_open_push_keeps_no_parameters_of_a_job_that_goes_back_and_is_answered(waits):
    """They were freed when its sender ended it, or by chance: a block that waits and its push held each
    other."""
    pserver, _ = await server()
    store = weakref.ref(pserver.store)
    settled = []
    pushing = pserver.begin_push(push_header(0, [0, 1]), lambda: settled.append(pushing.waiting))
    if waits:
        pushing.apply(*half(0, LEFT))
        assert pushing.waiting == 1
    pserver.drop(5)
    assert store() is None
    pushing.apply(*half(0, LEFT))
    assert not pushing.keep_some(1)
    assert (pushing.waiting, settled) == (0, [0] * waits)
    answer = pushing.answer()
    assert (answer.applied, [refusal.code for refusal in answer.refused]) == (waits, ["STALE_GENERATION"])
    assert pushing.most_bytes(half(0, LEFT)[0], 64) == 64
    pushing.close()


async def _at_once(*_):
    return True
