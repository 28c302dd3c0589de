"""One pserver without a network: pulls that wait, records of versions, values on their way out, memory."""

import asyncio
import gc
import time
import tracemalloc
from contextlib import aclosing
from types import SimpleNamespace

import pytest
import torch

from tests.pserver_service.jobs import (
    LAYOUT,
    ONES,
    async_header,
    check_invariants,
    initialised,
    item,
    layout_of,
    payload_of,
    pserver,
    pull_request,
    pulled,
    push_header,
    stream,
    whole_step,
)
from trireme_shared.protocol.errors import InvalidArgument, NotReady
from trireme_shared.protocol.records import Mode
from trireme_shared.protocol.records.layout import OptimizerSpec
from trireme_shared.protocol.records.step import LanePosition
from trireme_shared.protocol.wire.messages import PullEnd
from trireme_shared.serving.ports import ServerPorts

__all__ = ["pserver"]


async def test_a_pull_of_a_version_has_one_version_of_every_block_and_its_record(pserver):
    values, _ = await pulled(pserver, pull_request(0, range(3)))
    await pserver.push(*whole_step(0, 1))  # a torn step: only block 1 has it
    old, end = await pulled(pserver, pull_request(0, range(3)))
    assert all(torch.equal(old[number], values[number]) for number in values)
    assert end.record.positions == tuple(LanePosition(lane=lane) for lane in range(4))
    await pserver.push(*whole_step(0))
    new, end = await pulled(pserver, pull_request(1, range(3)))
    assert all(torch.equal(new[number], values[number] - 1) for number in values)
    assert end.record.version == 1
    assert end.record.positions == push_header(0).positions
    assert end.record.lane_zero == push_header(0).lane_zero


async def test_a_pserver_in_doubt_about_its_index_answers_nobody(pserver):
    pserver.own_place = SimpleNamespace(in_doubt=True)
    with pytest.raises(NotReady, match="may have run out"):
        await pulled(pserver, pull_request(0, range(3)))
    with pytest.raises(NotReady, match="ask again"):
        await pserver.push(*whole_step(0))
    pserver.own_place.in_doubt = False
    _, end = await pulled(pserver, pull_request(0, range(3)))
    assert end.record.version == 0


async def test_records_are_merged_from_the_pushes_of_all_trainers(pserver):
    await pserver.push(push_header(0, lanes=(2, 3)), stream(item(0, ONES, (2, 4))))
    await pserver.push(push_header(0, lanes=(0, 1)), stream(item(0, ONES, (0, 2))))
    _, end = await pulled(pserver, pull_request(1, [0]))
    assert [(position.lane, position.offset) for position in end.record.positions] == [
        (lane, lane) for lane in range(4)
    ]


async def test_the_record_of_a_slow_pull_is_that_of_its_version(pserver):
    async with aclosing(pserver.pull(pull_request(0, range(3)))) as answer:
        parts = [await anext(answer) for _ in range(3)]
        for step in range(8):
            await pserver.push(*whole_step(step))
        end = await anext(answer)
    assert [part[0].version for part in parts] == [0, 0, 0]
    assert (end.code, end.record.version) == ("OK", 0)


async def test_a_pull_of_no_blocks_asks_for_the_record(pserver):
    await pserver.push(*whole_step(0))
    _, end = await pulled(pserver, pull_request(1, []))
    assert (end.code, end.record.version) == ("OK", 1)


async def test_a_pull_beyond_the_previous_version_is_gone(pserver):
    for step in range(2):
        await pserver.push(*whole_step(step))
    found, end = await pulled(pserver, pull_request(0, range(3)))
    assert (found, end.code) == ({}, "GONE")
    assert end.message == "block 0 is at version 2, 0 was asked: join again"


async def test_a_pull_waits_for_each_block_and_sends_it_as_soon_as_it_is_there(pserver):
    order = []

    async def puller():
        async with aclosing(pserver.pull(pull_request(1, range(3), wait_s=30))) as answer:
            async for part in answer:
                # seen from outside
                order.append(part.code if isinstance(part, PullEnd) else part[0].block)  # noqa: PERF401

    await pserver.push(*whole_step(0, 1))
    async with asyncio.TaskGroup() as group:
        group.create_task(puller())
        await asyncio.sleep(0.01)
        assert order == [1]
        await pserver.push(*whole_step(0, 2))
        await asyncio.sleep(0.01)
        assert order == [1, 2]
        await pserver.push(*whole_step(0, 0))
    assert order == [1, 2, 0, "OK"]


async def test_a_pull_that_waits_too_long_says_for_what(pserver):
    await pserver.push(*whole_step(0, 1))
    found, end = await pulled(pserver, pull_request(1, range(3), wait_s=0.02))
    assert list(found) == [1]
    assert end == PullEnd(
        code="TOO_EARLY", message="2 blocks have not reached version 1 (block 0 is at 0): ask again"
    )


async def test_a_block_that_comes_in_the_moment_the_wait_runs_out_is_sent(pserver):
    """As after a freeze: the deadline has passed and the block is there in the same turn of the loop."""
    asking = asyncio.ensure_future(pulled(pserver, pull_request(1, [0], wait_s=0.02)))
    await asyncio.sleep(0.005)
    pushing = pserver.begin_push(push_header(0))
    time.sleep(0.05)
    pushing.apply(*item(0, ONES))
    blocks, end = await asking
    assert (set(blocks), end.code) == ({0}, "OK")


async def test_a_block_that_is_named_twice_is_not_sent_twice(pserver):
    with pytest.raises(InvalidArgument, match="block 0 is named twice in one pull: name each block once"):
        await pulled(pserver, pull_request(0, [2, 0, 1, 2, 0]))
    assert not pserver.pulls


async def test_the_wait_of_a_pull_is_capped():
    pserver, _ = await initialised(LAYOUT, ports=ServerPorts(max_wait_s=0.02))
    async with asyncio.timeout(5):
        assert (await pulled(pserver, pull_request(1, [0], wait_s=1e9)))[1].code == "TOO_EARLY"


async def test_a_pull_that_falls_behind_while_it_is_sent_hears_gone(pserver):
    async with aclosing(pserver.pull(pull_request(0, range(3)))) as answer:
        await anext(answer)
        for step in range(2):
            await pserver.push(*whole_step(step))
        end = await anext(answer)
    assert end.code == "GONE"


async def test_values_on_their_way_out_are_not_overwritten_by_steps(pserver):
    await pserver.push(*whole_step(0))
    async with (
        aclosing(pserver.pull(pull_request(1, range(3)))) as answer,
        aclosing(pserver.pull(pull_request(0, [0]))) as old,
    ):
        _, slow = await anext(answer)
        _, older = await anext(old)
        copies = bytes(slow), bytes(older)
        for step in range(1, 8):
            await pserver.push(*whole_step(step))
        assert (bytes(slow), bytes(older)) == copies


async def test_async_updates_do_not_touch_values_on_their_way_out():
    pserver, values = await initialised(LAYOUT, Mode.ASYNC)
    async with aclosing(pserver.pull(pull_request(None, [0]))) as answer:
        _, slow = await anext(answer)
        for start in range(4):
            await pserver.push(async_header(0, start, start + 1, 4), stream(item(0, ONES)))
        assert bytes(slow) == payload_of(values[0])
    found, end = await pulled(pserver, pull_request(None, [0]))
    assert torch.equal(found[0], values[0] - 1 - 1 - 1 - 1)
    assert end == PullEnd(code="OK")
    with pytest.raises(InvalidArgument, match="version 3 was asked for in async mode"):
        await pulled(pserver, pull_request(3, [0]))
    check_invariants(pserver)


async def test_a_pull_without_a_version_takes_what_is_there(pserver):
    await pserver.push(*whole_step(0, 0))
    async with aclosing(pserver.pull(pull_request(None, range(3)))) as answer:
        parts = [part if isinstance(part, PullEnd) else part[0].version async for part in answer]
    assert parts[:3] == [1, 0, 0]
    assert parts[3].record.version == 0


async def test_a_vanished_puller_leaves_nothing_behind(pserver):
    task = asyncio.ensure_future(pulled(pserver, pull_request(1, range(3), wait_s=30)))
    await asyncio.sleep(0.01)
    assert len(pserver.pulls) == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not pserver.pulls


async def test_a_steady_state_allocates_nothing():
    lanes, layout = (
        8,
        layout_of(
            512, block_bytes=1024, optimizer=OptimizerSpec(name="Adam", defaults={"lr": 0.1}, groups=({},))
        ),
    )
    pserver, _ = await initialised(layout, lanes=lanes)
    gradient = torch.ones(256)

    async def steps(first: int, last: int) -> None:
        for step in range(first, last):
            for lane in (3, 0, 1, 2, 6, 7, 5, 4):
                items = (item(number, gradient, (lane, lane + 1)) for number in range(2))
                await pserver.push(push_header(step, lanes=[lane]), stream(*items))
            _, end = await pulled(pserver, pull_request(step + 1, range(2)))
            assert end.code == "OK"

    await steps(0, 10)
    gc.collect()
    pool = pserver.store.pool.allocated_bytes
    tracemalloc.start()
    try:
        await steps(10, 15)
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        await steps(15, 115)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert pserver.store.pool.allocated_bytes == pool
    assert pool <= layout.segments[0].bytes * (2 + 8 / 2) + 2 * 1024
    assert grown < 20_000, f"{grown} bytes more after 100 steps"
    check_invariants(pserver)
