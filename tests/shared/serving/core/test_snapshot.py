"""Copies of a version: which versions, what they hold, and that training goes on unhindered."""

from __future__ import annotations

import pytest
import torch

from tests.pserver_service.jobs import (
    JOB,
    LAYOUT,
    async_header,
    check_invariants,
    init_header,
    initialised,
    item,
    layout_of,
    payload_of,
    pull_request,
    pulled,
    push_header,
    stream,
    values_of,
    whole_step,
)
from trireme_shared.blocks.snapshot import Snapshot
from trireme_shared.checkpoints.schedule import Schedule, is_newer, kept_after
from trireme_shared.protocol.records import Mode, SlotMap
from trireme_shared.protocol.records.checkpoints import CheckpointLatest, CheckpointRef, history
from trireme_shared.protocol.records.step import CheckpointAsked, LanePosition, LaneZero, StepRecord
from trireme_shared.protocol.wire.messages import InitBlock

EVERY = Schedule(every_steps=1, every_epochs=None, epochs=9)


def record(version, epoch=0, exhausted=False):
    positions = tuple(LanePosition(lane=lane, epoch=epoch, exhausted=exhausted) for lane in range(2))
    return StepRecord(version=version, positions=positions)


def due(schedule, *records):
    return [record.version for record in records if schedule.rank(record) is not None]


def test_the_first_version_is_always_due():
    assert due(Schedule(None, None, 3), *map(record, range(4))) == [0]


def test_steps_are_due_at_multiples():
    assert due(Schedule(3, None, 3), *map(record, range(10))) == [0, 3, 6, 9]


def test_an_epoch_is_due_when_all_lanes_are_exhausted():
    one_lane = StepRecord(version=4, positions=(LanePosition(lane=0, exhausted=True), LanePosition(lane=1)))
    assert due(Schedule(None, 1, 3), record(3), one_lane, record(5, 0, True), record(6, 1)) == [5]


def test_a_version_that_was_asked_for_is_due_and_none_that_only_carries_the_wish():
    def carrying(version):
        asked = CheckpointAsked(operation="op", attempt=1, generation=1, version=7)
        return record(version).model_copy(update={"lane_zero": LaneZero(options=(), asked=asked)})

    assert due(Schedule(None, None, 3), carrying(5), carrying(6), carrying(7), carrying(8)) == [7]


def test_every_second_epoch_and_the_last_one():
    ends = [record(10 * (epoch + 1), epoch, True) for epoch in range(5)]
    assert due(Schedule(None, 2, 5), *ends) == [20, 40, 50]
    assert due(Schedule(None, None, 5), *ends) == [50]


def test_epochs_outrank_steps_and_rarer_ones_outrank_others():
    schedule = Schedule(2, 1, 9)
    ranks = [
        schedule.rank(each)
        for each in (record(2), record(4), record(6), record(8), record(9, 0, True), record(0))
    ]
    assert sorted(ranks, key=lambda rank: rank) == [
        ranks[0],
        ranks[2],
        ranks[1],
        ranks[3],
        ranks[4],
        ranks[5],
    ]


async def saving(layout=LAYOUT, schedule=EVERY, mode=Mode.SYNC):
    from trireme_shared.serving.pserver import Pserver

    pserver = Pserver(JOB, "ps-1", index=0)
    pserver.schedule = schedule
    values = values_of(layout)
    items = [(InitBlock(block=number), payload_of(value)) for number, value in values.items()]
    await pserver.init(init_header(layout, mode), stream(*items))
    return pserver, values


def copied(snapshot: Snapshot):
    return {name: saved.buffer.tensor.clone() for name, saved in snapshot.tensors.items()}


async def test_the_initial_values_are_copied():
    pserver, values = await saving()
    snapshot = pserver.store.take_snapshot()
    assert (snapshot.version, snapshot.whole) == (0, True)
    found = copied(snapshot)
    assert set(found) == {"block.0", "block.1", "block.2"}
    assert all(torch.equal(found[f"block.{n}"], value) for n, value in values.items())
    snapshot.release()
    check_invariants(pserver)


async def test_a_block_is_copied_when_it_reaches_the_version_and_not_later():
    pserver, values = await saving()
    pserver.store.take_snapshot().release()
    await pserver.push(*whole_step(0, 0, 1))
    assert pserver.store.take_snapshot() is None, "block 2 is still at version 0"
    await pserver.push(*whole_step(0, 2))
    assert pserver.snapshot_ready.is_set()
    snapshot = pserver.store.take_snapshot()
    before = copied(snapshot)
    for step in (1, 2, 3):
        await pserver.push(*whole_step(step))
    after = copied(snapshot)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(torch.equal(after[f"block.{n}"], value - 1) for n, value in values.items())
    snapshot.release()
    pserver.store.take_snapshot().release()
    check_invariants(pserver)


async def test_the_optimizers_state_is_that_of_the_version():
    pserver, _ = await saving(layout_of(16))
    pserver.store.take_snapshot().release()
    await pserver.push(push_header(0), stream(item(0, torch.full((16,), 2.0))))
    snapshot = pserver.store.take_snapshot()
    await pserver.push(push_header(1), stream(item(0, torch.full((16,), 5.0))))
    assert torch.equal(copied(snapshot)["block.0.momentum_buffer"], torch.full((16,), 2.0))


async def test_the_record_of_the_version_comes_along():
    pserver, _ = await saving()
    pserver.store.take_snapshot().release()
    await pserver.push(*whole_step(0))
    snapshot = pserver.store.take_snapshot()
    assert snapshot.record == pserver.store.history.record(1)
    assert [position.lane for position in snapshot.record.positions] == [0, 1, 2, 3]


async def test_of_two_versions_that_are_evaluated_neither_is_left_out():
    pserver, _ = await saving(schedule=Schedule(None, None, 9, evaluate_every=2))
    pserver.store.take_snapshot().release()
    for step in range(5):  # 2 and 4 are evaluated; 3 and 5 are not
        await pserver.push(*whole_step(step))
    taken = [pserver.store.take_snapshot() for _ in range(3)]
    assert [snapshot and snapshot.version for snapshot in taken] == [2, 4, None]
    for snapshot in taken[:2]:
        snapshot.release()
    check_invariants(pserver)


async def test_of_two_copies_that_wait_the_higher_rank_stays():
    pserver, _ = await saving()
    pserver.store.take_snapshot().release()
    for step, kept in enumerate([1, 2, 2, 4, 4, 4, 4, 8]):
        await pserver.push(*whole_step(step))
        assert pserver.store.snapshot.version == kept
    assert pserver.store.skipped == 7
    pserver.store.take_snapshot().release()
    check_invariants(pserver)


async def test_a_pserver_without_a_schedule_copies_nothing():
    pserver, _ = await initialised(LAYOUT)
    await pserver.push(*whole_step(0))
    assert pserver.store.take_snapshot() is None


async def test_asynchronous_mode_copies_nothing():
    pserver, _ = await saving(mode=Mode.ASYNC)
    await pserver.push(async_header(0, 0, 1, 1), stream(item(0, torch.ones(16), (0, 1))))
    assert pserver.store.take_snapshot() is None


async def test_a_dropped_store_ends_the_pulls_that_wait_and_refuses_older_pushes():
    import asyncio

    pserver, _ = await initialised(LAYOUT)
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(pulled(pserver, pull_request(1, [0], wait_s=30.0)))
        await asyncio.sleep(0.01)
        pserver.drop(7)
    blocks, end = waiting.result()
    assert (blocks, end.code) == ({}, "NOT_READY")
    assert (await pserver.info()).ready is False
    header, blocks = whole_step(0, generation=6)
    with pytest.raises(Exception, match="no parameters yet"):
        await pserver.push(header, blocks)
    check_invariants(pserver)


async def test_a_pull_from_before_the_roll_back_has_to_join_again():
    pserver, _ = await initialised(LAYOUT)
    store = pserver.store
    pserver.drop(7)
    pserver.restore(store, 7, "c")
    _, end = await pulled(pserver, pull_request(0, [0], generation=6))
    assert end.code == "GONE"
    blocks, end = await pulled(pserver, pull_request(0, [0], generation=7))
    assert (set(blocks), end.code) == ({0}, "OK")
    with pytest.raises(Exception, match="stale"):
        await pserver.push(*whole_step(0, generation=6))
    assert (await pserver.push(*whole_step(0, generation=8))).applied == 3


# ------------------------------------------------------------ what is kept


def ref(step, timeline=0, origin=""):
    return CheckpointRef(uuid=f"{timeline}-{step}", step=step, timeline=timeline, manifest="m", origin=origin)


def latest_of(*refs):
    head = refs[0].model_dump()
    return CheckpointLatest(**head, term=1, timestamp="", slots=SlotMap(version=1, owners=(0,)), kept=refs)


@pytest.mark.parametrize(
    ("latest", "new", "damaged", "kept"),
    [
        (None, ref(0), (), [ref(0)]),
        (latest_of(ref(0)), ref(2), (), [ref(2), ref(0)]),
        (latest_of(ref(2), ref(0)), ref(4), (), [ref(4), ref(2)]),
        (latest_of(ref(4), ref(2)), ref(6, 9, "0-4"), (), [ref(6, 9, "0-4"), ref(4)]),
        (latest_of(ref(4), ref(2)), ref(4, 9, "0-2"), ("0-4",), [ref(4, 9, "0-2"), ref(2)]),
        (latest_of(ref(4, 9, "0-2"), ref(2)), ref(6, 9, "0-2"), (), [ref(6, 9, "0-2"), ref(4, 9, "0-2")]),
    ],
)
def test_two_of_the_history_are_kept_and_none_that_is_damaged(latest, new, damaged, kept):
    assert kept_after(latest, new, damaged, 2) == tuple(kept)


def test_checkpoints_that_somebody_asked_for_are_not_pushed_out_by_the_schedule():
    asked = [ref(step).model_copy(update={"asked": True}) for step in (1, 2, 5)]
    kept = kept_after(latest_of(ref(6), asked[2], ref(4), ref(3), asked[1], asked[0]), ref(7), (), 2)
    assert kept == (ref(7), ref(6), asked[2], asked[1])
    assert kept_after(latest_of(*kept), ref(8), (), 2) == (ref(8), ref(7), asked[2], asked[1])


def test_evaluations_that_were_to_come_when_the_job_went_back_are_still_to_come():
    """It goes back to a version that is saved again in the new timeline."""
    first, second = (ref(step).model_copy(update={"evaluation": number}) for number, step in ((1, 3), (2, 6)))
    again = ref(6, 4, second.uuid).model_copy(update={"evaluation": 2})
    kept = kept_after(latest_of(second, first), again, (), 1)
    assert history(kept, 4, second.uuid) == (again, second, first)
    last = ref(7)
    kept = kept_after(latest_of(last, second, first), ref(7, 4, last.uuid), (), 1)
    assert history(kept, 4, last.uuid) == (ref(7, 4, last.uuid), last, second, first)
    third = ref(9, 4, last.uuid).model_copy(update={"evaluation": 3})
    fourth = ref(12, 4, last.uuid).model_copy(update={"evaluation": 4})
    kept = kept_after(latest_of(*kept), third, (), 1)
    assert history(kept, 4, last.uuid) == (third, last, second)
    assert kept_after(latest_of(*kept), fourth, (), 1)[:2] == (fourth, third)


def test_the_best_one_stays_also_after_a_checkpoint_that_the_job_went_back_to_is_gone():
    """Whatever is before that one is not in the job's history then."""
    best, back = ref(2), ref(6)
    kept = kept_after(latest_of(back, best), ref(9, 4, back.uuid), (), 1, {best.uuid})
    assert kept == (ref(9, 4, back.uuid), best)
    again = ref(9, 7, "4-9")
    assert kept_after(latest_of(kept[0], ref(4), best), again, (), 1, {best.uuid}) == (again, ref(4), best)


def test_what_the_job_left_by_going_back_stays_beside_its_history_and_pushes_nothing_out():
    went_back = kept_after(latest_of(ref(6), ref(4)), ref(5, 9, "0-4"), (), 2)
    assert went_back == (ref(5, 9, "0-4"), ref(4), ref(6))
    further = kept_after(latest_of(*went_back), ref(8, 9, "0-4"), (), 2)
    assert further == (ref(8, 9, "0-4"), ref(5, 9, "0-4"), ref(6))
    changed_its_mind = kept_after(latest_of(*further), ref(7, 12, "0-6"), (), 2)
    assert changed_its_mind == (ref(7, 12, "0-6"), ref(6), ref(8, 9, "0-4"), ref(5, 9, "0-4"))
    assert history(changed_its_mind, 12, "0-6") == (ref(7, 12, "0-6"), ref(6))


def test_the_best_checkpoint_stays_when_the_one_of_a_rollback_is_not_kept_any_more():
    asked = [ref(step).model_copy(update={"asked": True}) for step in (5, 4)]
    kept = kept_after(latest_of(ref(6), *asked, ref(1)), ref(7, 9, "0-6"), (), 2, {"0-1"})
    for step in range(8, 12):
        kept = kept_after(latest_of(*kept), ref(step, 9, "0-6"), (), 2, {"0-1"})
        assert ref(1) in kept, step
    assert len(kept) <= 2 + 2 + 1


def test_an_evaluation_that_has_not_begun_stays_in_the_history_behind_a_rollback():
    evaluated = ref(4).model_copy(update={"evaluation": 2})
    kept = kept_after(latest_of(ref(6), ref(5), evaluated), ref(7, 9, "0-6"), (), 1)
    for step in range(8, 12):
        kept = kept_after(latest_of(*kept), ref(step, 9, "0-6"), (), 1)
    assert history(kept, 9, "0-6") == (ref(11, 9, "0-6"), ref(6), evaluated)


def test_what_kept_checkpoints_build_on_stays_and_one_that_has_no_file_in_common():
    """Whole: 1, 2, 5, 8. The others build on the one before."""
    refs = [
        ref(step).model_copy(update={"on": () if step in (1, 2, 5, 8) else (f"0-{step - 1}",)})
        for step in range(1, 9)
    ]
    latest, kept = None, {}
    for each in refs:
        kept[each.step] = kept_after(latest, each, (), 2)
        latest = latest_of(*kept[each.step])
    assert [[each.step for each in kept[step]] for step in (4, 5, 7, 8)] == [
        [4, 3, 2, 1],
        [5, 4, 3, 2],
        [7, 6, 5, 4, 3, 2],
        [8, 7, 6, 5],
    ]
    assert kept_after(latest_of(*kept[7]), refs[7], (), 1) == (refs[7],)
    assert kept_after(latest_of(*kept[7]), refs[7], ("0-6",), 2) == (refs[7], refs[4]), (
        "what builds on a damaged one goes"
    )


def test_a_later_timeline_is_newer_whatever_its_step():
    latest = latest_of(ref(4, 3))
    assert is_newer(ref(1, 5), latest)
    assert is_newer(ref(5, 3), latest)
    assert not is_newer(ref(4, 3), latest)
    assert not is_newer(ref(99, 0), latest)
    assert is_newer(ref(0), None)
