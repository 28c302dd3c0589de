"""One lane's data of a step is of the same records at all blocks: what a discarded task left, and the claim
of who goes on."""

from __future__ import annotations

import pytest
import torch

from tests.pserver_service.jobs import JOB, init_header, layout_of
from trireme_shared.protocol.errors import StepTorn
from trireme_shared.protocol.records import Mode
from trireme_shared.protocol.records.step import LanePosition, LaneZero
from trireme_shared.protocol.wire.messages import PushBlock, PushHeader, Verdict
from trireme_shared.serving.core.stores import store_of

LAYOUT = layout_of(48)  # three blocks
OLD, NEW = LanePosition(lane=1, index=4), LanePosition(lane=1, index=5)
ZERO = LanePosition(lane=0, index=1)


@pytest.fixture
def store():
    made = store_of(init_header(LAYOUT, lanes=2))
    for block in LAYOUT.blocks():
        made.add_block(block.number, memoryview(torch.zeros(block.elements).numpy()).cast("B"))
    made.seal()
    return made


def header(*positions, claim=False, step=0):
    lane_zero = LaneZero(options=({"lr": 0.1},)) if any(p.lane == 0 for p in positions) else None
    return PushHeader(
        job=JOB,
        generation=1,
        mode=Mode.SYNC,
        trainer="t",
        step=step,
        positions=positions,
        lane_zero=lane_zero,
        claim=claim,
    )


def give(store, block, push, lane):
    item = PushBlock(block=block, lanes=(lane, lane + 1), count=1)
    return store.apply(push, item, memoryview(torch.ones(16).numpy()).cast("B"))


def test_a_lane_that_was_claimed_takes_no_data_of_other_records(store):
    on_its_way = store.admit(header(OLD))
    store.admit(header(NEW, claim=True))
    assert give(store, 0, on_its_way, 1) is Verdict.STALE_ATTEMPT
    assert give(store, 0, store.admit(header(OLD)), 1) is Verdict.STALE_ATTEMPT
    assert give(store, 0, store.admit(header(NEW)), 1) is Verdict.APPLIED


def test_a_push_that_was_judged_before_the_claim_is_judged_again(store):
    on_its_way = store.admit(header(ZERO, OLD))
    assert give(store, 0, on_its_way, 0) is Verdict.APPLIED
    store.admit(header(NEW, claim=True))
    assert give(store, 1, on_its_way, 0) is Verdict.APPLIED, "of the other lane nothing changed"
    assert give(store, 1, on_its_way, 1) is Verdict.STALE_ATTEMPT
    assert give(store, 0, store.admit(header(NEW)), 1) is Verdict.APPLIED
    assert store.history.record(1).positions == (ZERO, NEW), "not what the old header said of lane 1"


def test_a_lane_whose_data_is_there_cannot_be_claimed_for_other_records(store):
    assert give(store, 2, store.admit(header(OLD)), 1) is Verdict.APPLIED
    with pytest.raises(
        StepTorn, match=r"data of lane 1 in step 0 up to task 4 .* discarded since: .* up to task 5"
    ):
        store.admit(header(NEW, claim=True))
    store.admit(header(OLD, claim=True))
    assert give(store, 1, store.admit(header(NEW)), 1) is Verdict.STALE_ATTEMPT


def test_nor_when_the_step_is_done_at_some_block(store):
    for lane, position in enumerate((ZERO, OLD)):
        assert give(store, 0, store.admit(header(position)), lane) is Verdict.APPLIED
    assert store.blocks[0].version == 1
    with pytest.raises(StepTorn):
        store.admit(header(NEW, claim=True))
    assert give(store, 0, store.admit(header(NEW)), 1) is Verdict.STALE_ATTEMPT
    assert give(store, 0, store.admit(header(OLD)), 1) is Verdict.DUPLICATE


def test_a_claim_without_data_gives_way_to_a_later_one(store):
    """The next task was discarded as well."""
    store.admit(header(NEW, claim=True))
    later = LanePosition(lane=1, index=6)
    store.admit(header(later, claim=True))
    assert give(store, 0, store.admit(header(NEW)), 1) is Verdict.STALE_ATTEMPT
    assert give(store, 0, store.admit(header(later)), 1) is Verdict.APPLIED
