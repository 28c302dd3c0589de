"""Blocks that move to another store go on there with the same bits: values of two versions, optimizer's
state, ledger."""

from __future__ import annotations

import asyncio

import pytest
import torch

from tests.equipment.replaced import replaced
from tests.pserver_service.jobs import (
    async_header,
    check_invariants,
    init_header,
    initialised,
    item,
    layout_of,
    pull_request,
    pulled,
    push_header,
    stream,
)
from trireme_shared.blocks.buffers import BufferPool
from trireme_shared.protocol.errors import BadFrame
from trireme_shared.protocol.records import Mode
from trireme_shared.protocol.records.layout import Layout, OptimizerSpec
from trireme_shared.protocol.wire.messages import HandoffPart, LedgerQuery
from trireme_shared.serving.core import moving
from trireme_shared.serving.core.ledger import SavedLedger
from trireme_shared.serving.core.moving import ArrivingBlocks, LeavingBlocks, adopt, forget
from trireme_shared.serving.core.stores import store_of
from trireme_shared.serving.pserver import Pserver

ADAM = OptimizerSpec(name="Adam", defaults={"lr": 0.1}, groups=({},))
LION = OptimizerSpec(name="Lion", defaults={"lr": 0.1, "betas": [0.9, 0.5]}, groups=({},))
LAYOUT = layout_of(40, optimizer=ADAM)  # blocks of 16, 16 and 8
SIZES = {0: 16, 1: 16, 2: 8}
MOVED = (1, 2)


def gradient(step: int, block: int) -> torch.Tensor:
    """Of the other sign in step 4: without its state Lion would go the other way."""
    return torch.full((SIZES[block],), (1.0 + step + block) * (-1 if step == 4 else 1))


async def make_step(pserver: Pserver, step: int, blocks=(0, 1, 2)):
    return await pserver.push(push_header(step), stream(*(item(n, gradient(step, n)) for n in blocks)))


def empty(mode: Mode = Mode.SYNC, layout: Layout = LAYOUT) -> Pserver:
    target = Pserver("ctr", "ps-2", index=1)
    target.store = store_of(init_header(layout, mode, pserver=1))
    target.store.seal()
    return target


def hand_over(source: Pserver, target: Pserver, leaving: LeavingBlocks) -> None:
    """What the two ends do, without a wire."""
    assert source.store is not None
    assert target.store is not None
    places = {number: place for number in MOVED if (place := source.store.geometry.block(number)) is not None}
    arriving = ArrivingBlocks(places, target.store.pool)
    for parts in (leaving.early(), leaving.rest()):
        for part, payload in parts:
            arriving.take(part, payload)
            arriving.take(part, payload)  # a repetition
    ledger = leaving.ledger() if source.store.mode is Mode.ASYNC else SavedLedger({})
    arriving.complete(leaving.described(), source.store.history.handed(), ledger)
    forget(source.store, frozenset(MOVED))
    leaving.release()
    adopt(target.store, [arriving])


@pytest.mark.parametrize("optimizer", [ADAM, LION], ids=["Adam", "Lion"])
def test_a_block_freezes_at_its_next_version_and_goes_on_elsewhere_with_the_same_bits(
    optimizer: OptimizerSpec,
) -> None:
    async def main() -> None:
        layout = layout_of(40, optimizer=optimizer)
        (source, _), (alone, _) = await initialised(layout), await initialised(layout)
        target = empty(layout=layout)
        for step in range(3):
            await make_step(source, step)
            await make_step(alone, step)
        assert source.store is not None
        leaving = LeavingBlocks(source.store, MOVED)
        leaving.begin()
        assert not leaving.frozen
        await make_step(source, 3)
        assert leaving.frozen
        refused = await make_step(source, 4)
        assert {(each.block, each.code) for each in refused.refused} == {(1, "MOVING"), (2, "MOVING")}
        late = await make_step(source, 3)
        assert (late.duplicate, late.refused) == (3, ())
        hand_over(source, target, leaving)
        assert sorted(source.store.blocks) == [0]
        answer = await make_step(target, 4, MOVED)
        assert (answer.applied, answer.refused) == (2, ())
        await make_step(alone, 3)
        await make_step(alone, 4)
        for version in (4, 5):
            expected, _ = await pulled(alone, pull_request(version, MOVED))
            found, end = await pulled(target, pull_request(version, MOVED))
            assert all(torch.equal(found[number], expected[number]) for number in MOVED)
            assert end.record is not None
            assert (
                end.record.positions
                == (await pulled(alone, pull_request(version, MOVED)))[1].record.positions  # type: ignore[union-attr]
            )
        assert (await make_step(source, 4, (1,))).refused[0].code == "WRONG_OWNER"
        for pserver in (source, target, alone):
            check_invariants(pserver)

    asyncio.run(main())


def test_a_pull_that_waits_for_a_block_that_moves_ends_and_says_so() -> None:
    async def main() -> None:
        source, _ = await initialised(LAYOUT)
        assert source.store is not None
        waiting = asyncio.create_task(pulled(source, pull_request(1, (0, 1), wait_s=20.0)))
        await asyncio.sleep(0)
        leaving = LeavingBlocks(source.store, MOVED)
        leaving.begin()
        leaving.freeze_idle()
        hand_over(source, empty(), leaving)
        source.forgotten(MOVED)
        found, end = await waiting
        assert (found, end.code) == ({}, "WRONG_OWNER")

    asyncio.run(main())


def test_what_stays_is_thawed_and_goes_on() -> None:
    async def main() -> None:
        source, _ = await initialised(LAYOUT)
        assert source.store is not None
        leaving = LeavingBlocks(source.store, MOVED)
        leaving.begin()
        leaving.freeze_idle()
        assert leaving.frozen
        leaving.thaw()
        assert (await make_step(source, 0)).applied == 3
        assert (await make_step(source, 1)).applied == 3
        check_invariants(source)

    asyncio.run(main())


def test_a_block_with_a_part_of_a_step_does_not_freeze_before_the_step_is_whole() -> None:
    async def main() -> None:
        source, _ = await initialised(LAYOUT)
        assert source.store is not None
        half = item(1, gradient(0, 1), lanes=(0, 2))
        await source.push(push_header(0, range(2)), stream(half))
        leaving = LeavingBlocks(source.store, (1,))
        leaving.begin()
        leaving.freeze_idle()
        assert not leaving.frozen
        await source.push(push_header(0, range(2, 4)), stream(item(1, gradient(0, 1), lanes=(2, 4))))
        assert leaving.frozen
        leaving.release()

    asyncio.run(main())


def test_the_ledger_moves_with_its_block_and_each_minibatch_still_counts_once() -> None:
    async def main() -> None:
        source, _ = await initialised(LAYOUT, Mode.ASYNC)
        target = empty(Mode.ASYNC)

        async def push(pserver: Pserver, task: int, start: int, blocks=(0, 1, 2)):
            parts = (item(n, gradient(start, n), lanes=(0, 1)) for n in blocks)
            return await pserver.push(async_header(task, start, start + 1, 3), stream(*parts))

        for start in range(3):
            await push(source, 5, start)  # closed
        await push(source, 6, 0)
        await push(source, 6, 1, (0,))  # block 0 is ahead
        assert source.store is not None
        assert target.store is not None
        leaving = LeavingBlocks(source.store, MOVED)
        leaving.begin()
        assert not leaving.frozen
        leaving.freeze()
        assert leaving.frozen
        assert (await push(source, 6, 1)).refused[0].code == "MOVING"
        hand_over(source, target, leaving)
        assert (await push(target, 6, 0, MOVED)).duplicate == 2
        assert (await push(target, 5, 2, MOVED)).duplicate == 2
        assert (await push(target, 6, 2, MOVED)).refused[0].code == "TOO_EARLY"
        assert (await target.ledger(LedgerQuery(epoch=0, task_id="6"))).next == 1
        assert (await source.ledger(LedgerQuery(epoch=0, task_id="6"))).next == 2
        for start in (1, 2):
            assert (await push(target, 6, start, MOVED)).applied == 2
        await push(source, 6, 2, (0,))
        for pserver in (source, target):
            (counts,) = (await pserver.info()).ledger
            assert (
                counts.applied_lowest,
                counts.applied_highest,
                counts.tasks_open,
                counts.tasks_closed,
            ) == (
                6,
                6,
                0,
                2,
            )

    asyncio.run(main())


def test_a_push_by_a_newer_slot_map_may_name_blocks_that_are_not_here_yet() -> None:
    async def main() -> None:
        target = empty()
        _, blocks = target.memory_for(push_header(0))
        answer = await make_step(target, 0)
        assert {each.code for each in answer.refused} == {"WRONG_OWNER"}
        assert blocks == 2 * 4 * len(SIZES)  # of all lanes, and some room

    asyncio.run(main())


def test_parts_that_do_not_belong_to_the_group_and_groups_that_are_not_whole_are_refused() -> None:
    async def main() -> None:
        source, _ = await initialised(LAYOUT)
        assert source.store is not None
        place = source.store.geometry.block(1)
        assert place is not None
        arriving = ArrivingBlocks({1: place}, source.store.pool)
        for part, size in (
            (HandoffPart(block=2, dtype="float32"), 32),
            (HandoffPart(block=1, dtype="float32"), 60),
            (HandoffPart(block=1, dtype="float64"), 128),
            (HandoffPart(block=1, dtype="float16"), 32),
            (HandoffPart(block=1, name="step", dtype="float32", scalar=True), 8),
        ):
            with pytest.raises(BadFrame, match=r"does not belong|: expected"):
                arriving.take(part, memoryview(bytearray(size)))
        leaving = LeavingBlocks(source.store, (1,))
        with pytest.raises(BadFrame, match="values are missing of"):
            arriving.complete(leaving.described(), source.store.history.handed(), SavedLedger({}))
        arriving.release()
        check_invariants(source)

    asyncio.run(main())


async def leaving_after_a_step() -> tuple[Pserver, LeavingBlocks]:
    source, _ = await initialised(LAYOUT)
    await make_step(source, 0)
    assert source.store is not None
    return source, LeavingBlocks(source.store, MOVED)


def places_of(source: Pserver) -> dict:
    assert source.store is not None
    return {number: source.store.geometry.block(number) for number in MOVED}


def test_all_memory_that_a_group_needs_is_taken_and_written_to_before_it_freezes() -> None:
    async def main() -> None:
        source, leaving = await leaving_after_a_step()
        pool = BufferPool()
        arriving = ArrivingBlocks(places_of(source), pool)
        with replaced(moving, "TOUCHED_BYTES", 16):
            pieces = list(arriving.reserve(leaving.coming()))
        values, states = 2 * (64 + 32), 2 * (64 + 32) + 2 * 4
        assert (pool.allocated_bytes, pool.free_bytes) == (values, 0)
        assert len(pieces) == (values + states - 2 * 4) // 16 + 2  # each of the two scalars is a piece
        assert list(arriving.reserve(leaving.coming())) == []
        leaving.begin()
        early = list(leaving.early())
        await make_step(source, 1)
        with replaced(moving, "_empty", None):  # nothing is allocated any more
            for part, payload in (*early, *leaving.rest()):
                arriving.take(part, payload)
        arriving.complete(leaving.described(), source.store.history.handed(), SavedLedger({}))  # type: ignore[union-attr]
        assert (pool.allocated_bytes, pool.free_bytes) == (values, 0)
        arriving.release()
        leaving.release()
        assert pool.free_bytes == values

    asyncio.run(main())


def test_memory_that_is_being_reserved_twice_is_kept_once_and_never_written_to_after_a_part_came() -> None:
    """The first request was slow, and the source repeated it."""

    async def main() -> None:
        source, leaving = await leaving_after_a_step()
        pool = BufferPool()
        arriving = ArrivingBlocks(places_of(source), pool)
        with replaced(moving, "TOUCHED_BYTES", 16):
            slow = arriving.reserve(leaving.coming())
            next(slow)
            list(arriving.reserve(leaving.coming()))
            leaving.begin()
            early = {part.block: (part, bytes(payload)) for part, payload in leaving.early()}
            for part, payload in early.values():
                arriving.take(part, memoryview(payload))
            list(slow)
        await make_step(source, 1)
        for part, payload in leaving.rest():
            arriving.take(part, payload)
        arriving.complete(leaving.described(), source.store.history.handed(), SavedLedger({}))  # type: ignore[union-attr]
        target = empty()
        adopt(target.store, [arriving])  # type: ignore[arg-type]
        for number, (_, payload) in early.items():
            assert bytes(target.store.pull(number, 1).view) == payload  # type: ignore[union-attr]
        assert pool.allocated_bytes - pool.free_bytes == 2 * (64 + 32)
        leaving.release()

    asyncio.run(main())


def test_a_group_that_is_dropped_while_memory_is_reserved_gives_all_of_it_back() -> None:
    async def main() -> None:
        source, leaving = await leaving_after_a_step()
        pool = BufferPool()
        arriving = ArrivingBlocks(places_of(source), pool)
        with replaced(moving, "TOUCHED_BYTES", 16):
            reserving = arriving.reserve(leaving.coming())
            next(reserving)
            arriving.release()
            list(reserving)
        assert pool.free_bytes == pool.allocated_bytes > 0
        foreign = HandoffPart(block=0, dtype="float32")
        with pytest.raises(BadFrame, match="does not belong"):
            list(ArrivingBlocks(places_of(source), pool).reserve((foreign,)))

    asyncio.run(main())
