"""A trainer knows when its own share of a version is made, whatever order blocks come in and however often
the generation changes."""

from __future__ import annotations

import gc
import random
from pathlib import Path

import pytest
import torch

from tests.equipment.replaced import replaced
from tests.pserver_service.jobs import JOB, layout_of, push_header
from trainer_agent.collective import mean_blocks
from trainer_agent.collective.mean_blocks import MOST_KEPT, MeanStore, released
from trainer_agent.collective.server import ShareServer
from trireme_shared.blocks.buffers import Buffer, BufferPool, bytes_of
from trireme_shared.protocol.records import SlotMap
from trireme_shared.protocol.records.layout import Segment
from trireme_shared.protocol.records.step import LanePosition, NodeResult, StepRecord
from trireme_shared.protocol.wire.messages import MOST_STATED, PushBlock, Verdict
from trireme_shared.serving.ports import ServerPorts
from trireme_shared.serving.transport.shared_memory import RegionAllocator

LANES = 2
LAYOUT = layout_of(
    80, Segment(kind="buffer", dtype="float32", elements=16, group=-1)
)  # five blocks of 16, and a buffer
BLOCKS = {block.number: block.elements for block in LAYOUT.blocks()}
SLOTS = SlotMap(version=1, owners=(0,))


def record(version: int) -> StepRecord:
    return StepRecord(version=version, positions=tuple(LanePosition(lane=lane) for lane in range(LANES)))


def begun(own: set[int], pool: BufferPool | None = None) -> MeanStore:
    made = MeanStore(
        JOB, LAYOUT, LANES, record(0), lambda number: bytes_of(torch.zeros(BLOCKS[number])), pool
    )
    made.regroup(SLOTS, own)
    return made


def push(store: MeanStore, block: int, lane: int, step: int) -> Verdict:
    header = push_header(step, lanes=range(LANES))
    item = PushBlock(block=block, lanes=(lane, lane + 1), count=1, result=NodeResult())
    return store.apply(store.admit(header), item, bytes_of(torch.ones(BLOCKS[block])))


def is_made(store: MeanStore, version: int) -> bool:
    """By looking at every block."""
    return all(store.blocks[number].version >= version for number in store.own)


def agrees(store: MeanStore) -> bool:
    return all(store.own_share_has(store.has + more) == is_made(store, store.has + more) for more in range(3))


def from_others(store: MeanStore, numbers: set[int]) -> dict[int, Buffer | None]:
    """A step without data: no gradient, and buffers as they were."""
    blocks = {number: store.blocks[number] for number in numbers}
    return {number: block.current.retain() if block.is_buffer else None for number, block in blocks.items()}


def without_data(store: MeanStore, block: int) -> None:
    item = PushBlock(block=block, lanes=(0, LANES), count=0, result=NodeResult())
    assert (
        store.apply(store.admit(push_header(store.has, lanes=range(LANES))), item, memoryview(b""))
        is Verdict.APPLIED
    )


def test_a_gradient_without_payload_is_refused_from_lanes_that_do_not_leave_its_parameters_alone():
    store = begun(set(BLOCKS))
    item = PushBlock(block=0, lanes=(0, 1), count=1, result=NodeResult())
    admitted = store.admit(push_header(0, lanes=range(LANES)))
    assert store.apply(admitted, item, memoryview(b"")) is Verdict.LAYOUT_MISMATCH
    assert push(store, 0, 0, 0) is Verdict.APPLIED


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_step_without_data_keeps_buffers_that_were_not_known_when_the_store_began(ahead):
    """A trainer that joins follows the others' versions before it has the values of any."""
    store, buffer = begun({max(BLOCKS)}), max(BLOCKS)
    for _ in range(ahead):  # the others make it while this trainer gets the values of the version before
        without_data(store, buffer)
        store.complete(1, from_others(store, BLOCKS.keys() - {buffer}), record(1))
    store.know_buffers(0, lambda number: bytes_of(torch.full((BLOCKS[number],), 3.0)))
    without_data(store, buffer)
    made = store.blocks[buffer].pull(store.has + 1)
    assert isinstance(made, Buffer)
    assert made.tensor.tolist() == [3.0] * BLOCKS[buffer]


def test_buffers_that_a_step_has_brought_are_those():
    store, buffer = begun(set()), max(BLOCKS)
    brought = store.pool.take("float32", BLOCKS[buffer])
    brought.tensor.fill_(5.0)
    store.complete(1, {**from_others(store, BLOCKS.keys()), buffer: brought}, record(1))
    store.know_buffers(1, lambda number: bytes_of(torch.full((BLOCKS[number],), 7.0)))
    assert brought.tensor.tolist() == [5.0] * BLOCKS[buffer]
    made = store.blocks[buffer].kept[1]
    assert made is brought


def test_memory_of_the_first_values_that_a_later_version_has_got_stays_that_version_s():
    """It goes back to the pool with the first version. Values of a version before the newest one become known
    then."""
    store, buffer = begun(set()), max(BLOCKS)
    first = store.blocks[buffer].current
    with replaced(mean_blocks, "KEPT_BYTES", 0):
        for version in range(1, 7):
            brought = store.pool.take("float32", BLOCKS[buffer])
            while first.references == 0:
                brought = store.pool.take("float32", BLOCKS[buffer])
            brought.tensor.fill_(float(version))
            store.complete(
                version, {**from_others(store, BLOCKS.keys() - {buffer}), buffer: brought}, record(version)
            )
            if brought is first:
                break
            store.in_use = version
            store.forget()
    assert brought is first
    store.know_buffers(
        version - 1, lambda number: bytes_of(torch.full((BLOCKS[number],), float(version - 1)))
    )
    assert brought.tensor.tolist() == [float(version)] * BLOCKS[buffer]


@pytest.mark.parametrize("seed", range(5))
def test_it_says_so_after_the_last_block_and_not_before(seed):
    chance = random.Random(seed)
    store, versions = begun(set(chance.sample(sorted(BLOCKS), 4))), 0
    for _ in range(40):
        # each of them comes twice
        pushes = [(block, lane) for block in store.own for lane in range(LANES)] * 2
        chance.shuffle(pushes)
        for block, lane in pushes[: chance.choice([len(pushes), 5])]:
            assert push(store, block, lane, store.has) in (Verdict.APPLIED, Verdict.DUPLICATE)
            assert agrees(store)
        if is_made(store, store.has + 1) and chance.random() < 0.8:
            # a trainer that has the version already begins the next step
            if store.own and chance.random() < 0.3:
                ahead = chance.choice(sorted(store.own))
                assert [push(store, ahead, lane, store.has + 1) for lane in range(LANES)] == [
                    Verdict.APPLIED
                ] * LANES
                assert agrees(store)
            store.complete(
                store.has + 1, from_others(store, BLOCKS.keys() - store.own), record(store.has + 1)
            )
            versions += 1
        elif chance.random() < 0.2:  # another trainer has made it, and gives everything
            store.regroup(SLOTS, store.own)
            store.complete(store.has + 1, from_others(store, set(BLOCKS)), record(store.has + 1))
        if chance.random() < 0.3:
            store.regroup(SLOTS, set(chance.sample(sorted(BLOCKS), chance.randrange(len(BLOCKS) + 1))))
        assert agrees(store)
    assert versions > 5


def made_alone(store: MeanStore, versions: int) -> None:
    """All lanes are pushed to all blocks, which are its own."""
    for _ in range(versions):
        for block in BLOCKS:
            assert [push(store, block, lane, store.has) for lane in range(LANES)] == [Verdict.APPLIED] * LANES
        store.complete(store.has + 1, {}, record(store.has + 1))
        store.in_use = store.has
        store.forget()


def test_of_a_small_model_it_can_give_many_versions_and_says_of_each_what_it_is_made_of():
    """Also of the one before the first that it can give: whoever has that asks for the next one."""
    store = begun(set(BLOCKS))
    made_alone(store, 5)
    assert store.first_kept == 1
    assert [version for version, _ in store.made_of()] == [0, 1, 2, 3, 4, 5]
    for version in range(1, 6):
        released(store.retained(version))
    made_alone(store, 200)
    assert store.first_kept == 205 - 1 - MOST_KEPT
    assert [version for version, _ in store.made_of()] == list(range(store.first_kept - 1, 206))
    released(store.retained(store.first_kept))


def test_of_a_large_model_it_keeps_the_versions_alone_that_are_needed():
    with replaced(mean_blocks, "KEPT_BYTES", 0):
        store = begun(set(BLOCKS))
        made_alone(store, 9)
    assert store.first_kept == 8
    assert [version for version, _ in store.made_of()] == [7, 8, 9]
    assert all(sorted(block.kept) == [8, 9] for block in store.blocks.values())


def test_what_it_has_not_stepped_yet_it_keeps():
    with replaced(mean_blocks, "KEPT_BYTES", 0):
        store = begun(set())
        for _ in range(9):
            store.complete(store.has + 1, from_others(store, set(BLOCKS)), record(store.has + 1))
        assert store.first_kept == 1
        store.in_use = 5
        store.forget()
        assert store.first_kept == 6


def test_however_many_versions_it_has_not_stepped_yet_it_says_of_each_that_it_gives_what_it_is_made_of():
    """A spare that got many of them at once, in several generations."""
    store, server = begun(set()), ShareServer(JOB, "t")
    for _ in range(MOST_STATED + 50):
        store.complete(store.has + 1, from_others(store, set(BLOCKS)), record(store.has + 1))
    said = server.stated(store)
    assert said.kept is not None
    assert [version for version, _ in said.made_of] == list(range(said.kept - 1, store.has + 1))
    for version in range(1, store.has + 1):
        assert store.history.record(version) is not None
        released(store.retained(version))


def test_a_new_generation_makes_only_those_versions_again_that_it_does_not_have():
    store = begun(set(BLOCKS))
    made_alone(store, 4)
    push(store, 0, 0, 4)
    push(store, 0, 1, 4)
    store.regroup(SLOTS, set(BLOCKS))
    assert (store.first_kept, store.has) == (1, 4)
    made_alone(store, 1)
    assert (store.first_kept, store.has) == (1, 5)


def test_what_is_dropped_leaves_no_shared_memory_behind():
    """Each time that a trainer gets its parameters anew, as after a roll-back. The interpreter's collector
    may look much later."""
    gc.collect()
    gc.disable()
    try:
        before, server = regions(), ShareServer(JOB, "t", ServerPorts(RegionAllocator))
        for _ in range(3):
            made = begun(set(BLOCKS), server.new_pool())
            server.serve(made, 0)
            for block in BLOCKS:
                push(made, block, 0, 0)
            assert regions() == before + 1
            made.let_go()
            server.drop(0)
            del made
        assert regions() == before
    finally:
        gc.enable()


def regions() -> int:
    """That this process has mapped."""
    return Path("/proc/self/maps").read_text().count("/memfd:trireme")
