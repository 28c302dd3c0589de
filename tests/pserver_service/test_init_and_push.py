"""One pserver without a network: init, push, fences, refusals."""

import asyncio

import pytest
import torch

from tests.equipment.etcd.simulated import SimulatedEtcd
from tests.pserver_service.jobs import (
    JOB,
    LAYOUT,
    ONES,
    PLAIN,
    async_header,
    check_invariants,
    init_header,
    initialised,
    item,
    layout_of,
    payload_of,
    pserver,
    pull_request,
    pulled,
    push_header,
    stream,
    values_of,
    whole_step,
)
from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.membership.directory import Directory
from trireme_shared.protocol.errors import (
    BadFrame,
    InvalidArgument,
    LayoutMismatch,
    NotReady,
    StaleGeneration,
    TooLarge,
    WrongOwner,
)
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.lanes import combine
from trireme_shared.protocol.records import JobState, Mode, SlotMap
from trireme_shared.protocol.records.layout import Layout, Segment
from trireme_shared.protocol.wire.messages import HandoffHeader, InitBlock, LedgerQuery, PushBlock, Refusal
from trireme_shared.serving.pserver import Pserver

__all__ = ["pserver"]


# ---------------------------------------------------------------- init


async def test_before_init_everything_is_not_ready():
    pserver = Pserver(JOB, "ps-1", index=0)
    assert not (await pserver.info()).ready
    with pytest.raises(NotReady, match=r"pserver-0 \(ps-1\) has no parameters yet"):
        await pserver.push(*whole_step(0))
    with pytest.raises(NotReady):
        await pserver.ledger(LedgerQuery(epoch=0, task_id="1"))
    assert (await pulled(pserver, pull_request(0, [0], wait_s=5)))[1].code == "NOT_READY"


async def test_before_the_claim_blocks_of_others_are_to_be_sent_again():
    header = HandoffHeader(job=JOB, generation=1, migration="m", group=2, source=0, timeline=0)
    with pytest.raises(NotReady, match="no index is claimed here yet: send group 2 again"):
        await Pserver(JOB, "ps-1").take_handoff(header, stream())


async def test_a_synchronous_job_has_no_ledger(pserver):
    with pytest.raises(InvalidArgument, match="a synchronous job has no ledger"):
        await pserver.ledger(LedgerQuery(epoch=0, task_id="1"))


async def test_init_again_with_the_same_layout_changes_nothing(pserver):
    await pserver.push(*whole_step(0))
    before = pserver.store
    await pserver.init(init_header(LAYOUT, generation=1), stream((InitBlock(block=0), payload_of(ONES))))
    assert pserver.store is before
    assert (await pserver.info()).lowest == 1


def seeing(pserver: Pserver, timeline: int, version: int) -> None:
    """A view of the job with this timeline and slot map."""
    pserver.directory = pserver.directory or Directory(Etcd(SimulatedEtcd().transport("ps-1")), Keys(JOB))
    pserver.directory.state = JobState(generation=timeline, timeline=timeline)
    pserver.directory.slots = SlotMap(version=version, owners=(0,))


async def test_initial_values_are_of_the_timeline_and_the_slot_map_that_it_sees():
    """Both views may be late: blocks of another map would be taken for those of the map that comes later."""
    pserver = Pserver(JOB, "ps-1", index=0)
    seeing(pserver, 3, 1)

    async def init(timeline: int, slots: int) -> None:
        header = init_header(LAYOUT, generation=timeline, timeline=timeline, slots=slots)
        await pserver.init(header, stream((InitBlock(block=0), payload_of(ONES))))

    with pytest.raises(NotReady, match="has slot map 1, not 2 yet"):
        await init(3, 2)
    with pytest.raises(NotReady, match="sees timeline 3, not 7 yet"):
        await init(7, 1)
    seeing(pserver, 3, 2)
    with pytest.raises(WrongOwner, match="slot map 1 is old"):
        await init(3, 1)
    assert pserver.store is None
    await init(3, 2)
    first = pserver.store
    seeing(pserver, 7, 2)
    with pytest.raises(StaleGeneration, match="the job is in 7"):
        await init(3, 2)
    await init(7, 2)
    assert pserver.timeline == 7
    assert pserver.store is not first, "values of another timeline are not the job's any more"


async def test_init_with_another_model_is_refused_and_names_both(pserver):
    other = layout_of(40, optimizer=PLAIN, digest="def")
    with pytest.raises(LayoutMismatch, match=r"model def .* does not fit the loaded abc"):
        await pserver.init(init_header(other), stream())
    with pytest.raises(LayoutMismatch, match="async"):
        await pserver.init(init_header(LAYOUT, Mode.ASYNC), stream())


async def test_an_init_that_breaks_off_leaves_nothing():
    async def broken():
        yield InitBlock(block=0), payload_of(ONES)
        raise BadFrame("broke off")

    pserver = Pserver(JOB, "ps-1", index=0)
    with pytest.raises(BadFrame):
        await pserver.init(init_header(LAYOUT), broken())
    assert not (await pserver.info()).ready
    await pserver.init(init_header(LAYOUT), stream((InitBlock(block=0), payload_of(ONES))))
    assert (await pserver.info()).blocks == 1


async def test_two_inits_at_once_are_one():
    pserver, values = Pserver(JOB, "ps-1", index=0), values_of(LAYOUT)
    items = [(InitBlock(block=number), payload_of(value)) for number, value in values.items()]
    await asyncio.gather(*(pserver.init(init_header(LAYOUT), stream(*items)) for _ in range(2)))
    found, end = await pulled(pserver, pull_request(0, range(3)))
    assert end.code == "OK"
    assert all(torch.equal(found[number], values[number]) for number in values)


@pytest.mark.parametrize(
    ("block", "payload", "message"),
    [
        (3, bytes(64), "initial block 3 of 64 bytes: the layout has no such block"),
        (-1, bytes(64), "no such block"),
        (2, bytes(64), "initial block 2 of 64 bytes: the layout has 32 bytes"),
        (0, bytes(60), "the layout has 64 bytes"),
    ],
)
async def test_initial_blocks_that_do_not_fit_are_refused(block, payload, message):
    pserver = Pserver(JOB, "ps-1", index=0)
    with pytest.raises(BadFrame, match=message):
        await pserver.init(init_header(LAYOUT), stream((InitBlock(block=block), payload)))
    assert pserver.store is None


@pytest.mark.parametrize(
    ("block", "state", "payload"),
    [(1, "momentum_buffer", bytes(64)), (0, "exp_avg", bytes(64)), (0, "momentum_buffer", bytes(4))],
    ids=["no such block", "no such state", "another size"],
)
async def test_a_state_that_is_not_of_its_optimizer_is_refused(block, state, payload):
    pserver, layout = Pserver(JOB, "ps-1", index=0), layout_of(40)
    items = (InitBlock(block=0), payload_of(ONES)), (InitBlock(block=block, state=state), payload)
    with pytest.raises(BadFrame, match=f"state '{state}' of block {block}, {len(payload)} bytes"):
        await pserver.init(init_header(layout), stream(*items))
    assert pserver.store is None


@pytest.mark.parametrize(
    ("layout", "error", "message"),
    [
        (
            layout_of(Segment(kind="param", dtype="complex64", elements=4, group=0)),
            InvalidArgument,
            "'complex64'",
        ),
        (
            layout_of(Segment(kind="secret", dtype="float32", elements=4, group=0)),
            InvalidArgument,
            "kind 'secret'",
        ),
        (
            layout_of(Segment(kind="param", dtype="int64", elements=4, group=0)),
            InvalidArgument,
            "integers have no gradients",
        ),
        (layout_of(0), InvalidArgument, "at least 1"),
        (layout_of(4, block_bytes=0), InvalidArgument, "block_bytes is 0"),
        (layout_of(4, block_bytes=1 << 40), InvalidArgument, "block_bytes"),
        (layout_of(1 << 60), TooLarge, "at most 1048576; use larger blocks"),
    ],
)
async def test_layouts_that_make_no_sense_are_refused_before_anything_is_allocated(
    layout: Layout, error, message
):
    pserver = Pserver(JOB, "ps-1", index=0)
    with pytest.raises(error, match=message):
        await pserver.init(init_header(layout), stream())


async def test_messages_of_another_job_index_or_protocol_are_refused(pserver):
    with pytest.raises(LayoutMismatch, match="job 'other' at a pserver of job 'ctr'"):
        await pserver.push(*whole_step(0, job="other"))
    with pytest.raises(LayoutMismatch, match="job 'other'"):
        await pulled(pserver, pull_request(0, [0], job="other"))
    with pytest.raises(BadFrame, match="protocol 9: this pserver speaks 1"):
        await pserver.push(*whole_step(0, protocol=9))
    with pytest.raises(WrongOwner, match="initial blocks for pserver-1 came to pserver-0"):
        await pserver.init(init_header(LAYOUT, pserver=1), stream())
    with pytest.raises(LayoutMismatch, match="push in async mode"):
        await pserver.push(*whole_step(0, mode=Mode.ASYNC))


# ---------------------------------------------------------------- push


async def test_a_push_of_an_older_generation_is_refused(pserver):
    await pserver.push(*whole_step(0, generation=3))
    with pytest.raises(
        StaleGeneration, match="generation 2 is stale: pserver-0 has seen 3; read the lanes again"
    ):
        await pserver.push(*whole_step(1, generation=2))
    assert (await pserver.info()).highest == 1


async def test_a_pull_does_not_raise_the_generation(pserver):
    await pulled(pserver, pull_request(0, [0], generation=5))
    assert not (await pserver.push(*whole_step(0, generation=4))).refused


async def test_a_generation_that_grows_during_a_push_fences_its_remaining_blocks(pserver):
    async def slow():
        yield item(0, ONES)
        await pserver.push(push_header(0, generation=2), stream())
        yield item(1, ONES)

    answer = await pserver.push(push_header(0), slow())
    assert (answer.applied, answer.generation) == (1, 2)
    assert answer.refused == (Refusal(block=1, lanes=(0, 4), code="STALE_GENERATION", version=0),)


async def test_each_block_of_a_push_gets_its_own_answer(pserver):
    await pserver.push(*whole_step(0, 0))
    wrong = [
        (PushBlock(block=1, lanes=(0, 3), count=4), payload_of(ONES)),  # not a node of the tree
        (PushBlock(block=1, lanes=(0, 8), count=4), payload_of(ONES)),  # lanes that the job does not have
        (PushBlock(block=1, lanes=(2, 1), count=4), payload_of(ONES)),
        (PushBlock(block=1, lanes=(0, 4), count=-1), payload_of(ONES)),
        (PushBlock(block=1, lanes=(0, 4), count=4), b"abc"),
        (PushBlock(block=1, lanes=(0, 4), count=4), b""),
        (PushBlock(block=99, lanes=(0, 4), count=4), payload_of(ONES)),
    ]
    answer = await pserver.push(push_header(0), stream(item(0, ONES), *wrong, item(2, torch.ones(8))))
    assert (answer.applied, answer.duplicate) == (1, 1)
    assert [refusal.code for refusal in answer.refused] == ["LAYOUT_MISMATCH"] * 7
    answer = await pserver.push(*whole_step(1, 1))
    assert answer.refused == (Refusal(block=1, lanes=(0, 4), code="TOO_EARLY", version=0),)


async def test_a_block_of_another_pserver_is_refused():
    pserver = Pserver(JOB, "ps-1", index=0)
    await pserver.init(init_header(LAYOUT), stream((InitBlock(block=1), payload_of(ONES))))
    answer = await pserver.push(*whole_step(0, 0, 1))
    assert (answer.applied, [refusal.code for refusal in answer.refused]) == (1, ["WRONG_OWNER"])
    with pytest.raises(WrongOwner, match="block 2 is not at pserver-0"):
        await pulled(pserver, pull_request(0, [1, 2]))


async def test_lanes_whose_readers_position_is_missing_are_refused(pserver):
    answer = await pserver.push(
        push_header(0, lanes=(0, 1)), stream(item(0, ONES, (0, 4)), item(1, ONES, (0, 2)))
    )
    assert (answer.applied, [refusal.code for refusal in answer.refused]) == (1, ["LAYOUT_MISMATCH"])


async def test_lane_zero_must_bring_the_options(pserver):
    with pytest.raises(BadFrame, match="lane 0 without lane_zero"):
        await pserver.push(*whole_step(0, lane_zero=None))


async def test_a_push_that_breaks_off_keeps_the_blocks_that_were_whole(pserver):
    async def broken():
        yield item(0, ONES)
        raise BadFrame("broke off")

    with pytest.raises(BadFrame):
        await pserver.push(push_header(0), broken())
    answer = await pserver.push(*whole_step(0))
    assert (answer.applied, answer.duplicate) == (2, 1)


async def test_options_arrive_with_lane_zero_and_serve_whichever_push_completes_the_step():
    pserver, values = await initialised(LAYOUT)
    late = push_header(0, lanes=(2, 3))
    await pserver.push(push_header(0, lanes=(0, 1), options=({"lr": 0.25},)), stream(item(0, ONES, (0, 2))))
    await pserver.push(late, stream(item(0, ONES, (2, 4)), item(1, ONES, (2, 4))))
    await pserver.push(push_header(0, lanes=(0, 1), options=({"lr": 0.25},)), stream(item(1, ONES, (0, 2))))
    for number in (0, 1):
        assert torch.equal(pserver.store.blocks[number].current.tensor, values[number] - 0.25)


async def test_a_step_without_any_sample_makes_a_version_without_an_update(pserver):
    await pserver.push(*whole_step(0))
    before, _ = await pulled(pserver, pull_request(1, range(3)))
    for step in (1, 2):
        empty = stream(*((PushBlock(block=number, lanes=(0, 4), count=0), b"") for number in range(3)))
        assert (await pserver.push(push_header(step), empty)).applied == 3
    info = await pserver.info()
    assert (info.lowest, info.updates) == (3, 3)
    after, _ = await pulled(pserver, pull_request(3, range(3)))
    assert all(torch.equal(before[number], after[number]) for number in before)
    await pserver.push(*whole_step(3))
    last, _ = await pulled(pserver, pull_request(4, range(3)))
    assert all(torch.equal(last[number], after[number] - 1) for number in after)


async def test_buffers_are_means_over_lanes_and_integers_those_of_lane_zero():
    segments = [Segment(kind="buffer", dtype=dtype, elements=8) for dtype in ("float32", "int64")]
    pserver, _ = await initialised(layout_of(*segments))
    floats = [torch.randn(8) for _ in range(4)]
    whole = [torch.arange(8) + lane for lane in range(4)]
    for lane in (2, 0, 3, 1):
        items = [
            item(0, floats[lane], (lane, lane + 1), 4 + lane),
            item(1, whole[lane], (lane, lane + 1), 4 + lane),
        ]
        await pserver.push(push_header(0, lanes=[lane]), stream(*items))
    left = combine(floats[0].clone(), 4, floats[1].clone(), 5)
    mean, _ = combine(*left, *combine(floats[2].clone(), 6, floats[3].clone(), 7))
    assert torch.equal(pserver.store.blocks[0].current.tensor, mean)
    assert torch.equal(pserver.store.blocks[1].current.tensor, whole[0])
    check_invariants(pserver)


async def test_a_buffer_without_payload_is_unchanged_and_counts_with_its_value():
    pserver, values = await initialised(layout_of(Segment(kind="buffer", dtype="float32", elements=8)))
    other = torch.randn(8)
    for lane in range(4):
        given = (
            (PushBlock(block=0, lanes=(lane, lane + 1), count=4), b"") if lane else item(0, other, (0, 1), 2)
        )
        answer = await pserver.push(push_header(0, lanes=[lane]), stream(given))
        assert answer.applied == 1
    left, _ = combine(other.clone(), 2, values[0].clone(), 4)
    expected, _ = combine(left, 6, values[0].clone(), 8)
    assert torch.equal(pserver.store.blocks[0].current.tensor, expected)
    unchanged = (PushBlock(block=0, lanes=(0, 4), count=7), b"")
    assert (await pserver.push(push_header(1), stream(unchanged))).applied == 1
    assert torch.equal(pserver.store.blocks[0].current.tensor, expected)
    check_invariants(pserver)


async def test_a_parameter_without_payload_is_refused(pserver):
    answer = await pserver.push(push_header(0), stream((PushBlock(block=0, lanes=(0, 4), count=3), b"")))
    assert [(refusal.code, refusal.block) for refusal in answer.refused] == [("LAYOUT_MISMATCH", 0)]


async def test_integer_buffers_of_asynchronous_jobs_are_added_to():
    segments = [Segment(kind="buffer", dtype=dtype, elements=4) for dtype in ("float32", "int64")]
    pserver, values = await initialised(layout_of(*segments), mode=Mode.ASYNC)
    floats = torch.randn(4)
    for start in range(3):
        items = [item(0, floats, (0, 1)), item(1, torch.full((4,), 2), (0, 1))]
        assert (await pserver.push(async_header(0, start, start + 1, 3), stream(*items))).applied == 2
    nothing = [(PushBlock(block=number, count=5), b"") for number in range(2)]
    assert (await pserver.push(async_header(1, 0, 1, 1), stream(*nothing))).applied == 2
    assert torch.equal(pserver.store.blocks[0].current.tensor, floats)
    assert torch.equal(pserver.store.blocks[1].current.tensor, values[1] + 6)


async def test_read_only_payloads_are_left_as_they_are(pserver):
    gradient = payload_of(torch.full((16,), 3.0))
    await pserver.push(
        push_header(0, lanes=(2, 3)), stream((PushBlock(block=0, lanes=(2, 4), count=3), gradient))
    )
    await pserver.push(
        push_header(0, lanes=(0, 1)), stream((PushBlock(block=0, lanes=(0, 2), count=5), gradient))
    )
    assert gradient == payload_of(torch.full((16,), 3.0))
