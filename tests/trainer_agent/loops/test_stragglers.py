"""A trainer that is late: others compute its lanes, lanes move to them, and no bit and no count shows it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tests.equipment.replaced import replaced
from tests.trainer_agent.cluster import TorchCluster, cluster, trained
from tests.trainer_agent.scripts import RECORDS, differing, spec_for, write_script
from trainer_agent.data_plane.pushes import Outboxes
from trainer_agent.tasks.reports import Reports
from trireme_shared.protocol.errors import UserCodeError
from trireme_shared.protocol.records import Phase
from trireme_shared.serving.core.store import missing_lanes

EPOCHS = 6
COMMON = {"lanes": 8, "epochs": EPOCHS, "rebalance_s": 3600}
MODEL = (
    "def model():\n    return nn.Sequential(nn.Linear(5, 24), nn.ReLU(), nn.Dropout(0.3), nn.Linear(24, 3))\n"
)
LATE, STEPS = "trainer-2-x", 10


def delay(made: TorchCluster, name: str, before: Callable[[int], Awaitable[object]]) -> None:
    """From now on `before(lane)` is awaited before each of this trainer's minibatches."""
    compute = made.computes[name]
    original = compute.gradient

    async def gradient(node, lane, *arguments):
        await before(lane)
        return await original(node, lane, *arguments)

    compute.gradient = gradient  # type: ignore[method-assign]


async def asleep(seconds: float) -> None:
    """As a thread, which ends its work when it is cancelled."""
    sleeping = asyncio.ensure_future(asyncio.sleep(seconds))
    try:
        await asyncio.shield(sleeping)
    except asyncio.CancelledError:
        await sleeping
        raise


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(50):
        while not condition():
            await asyncio.sleep(0.01)


def missing(made: TorchCluster) -> set[tuple[tuple[int, int], ...]]:
    return {missing_lanes(pserver.store) for pserver in made.pservers if pserver.store}


async def test_others_compute_the_lanes_of_a_trainer_that_hangs(tmp_path):
    script = write_script(tmp_path, model=MODEL)
    expected = await trained(spec_for(script, **COMMON, storage=str(tmp_path / "alone")))
    goes_on = asyncio.Event()
    goes_on.set()
    async with cluster(spec_for(script, **COMMON, pservers=2), 3) as made:
        delay(made, LATE, lambda _: goes_on.wait())
        await made.version(5)
        goes_on.clear()
        await made.version(5 + STEPS)
        assert made.directory.trainers.lanes_of(LATE)[0] > 0, "lane 0 would have nobody to help"
        goes_on.set()
        assert (await made.ended()).phase is Phase.COMPLETED
        assert differing(made.exported(), expected) == []
        metrics = made.master.metrics
        assert metrics.records == EPOCHS * RECORDS, "each lane counts once"
        assert made.master.job.trainers.generation == made.directory.state.generation


async def test_with_stragglers_off_everybody_waits(tmp_path):
    script = write_script(tmp_path, model=MODEL)
    goes_on = asyncio.Event()
    goes_on.set()
    async with cluster(spec_for(script, **COMMON, stragglers="off"), 3) as made:
        delay(made, LATE, lambda _: goes_on.wait())
        await made.version(5)
        goes_on.clear()
        await until(lambda: missing(made) == {(made.directory.trainers.lanes_of(LATE),)})
        held = made.pservers[0].store.lowest
        await asyncio.sleep(1.0)
        assert made.pservers[0].store.lowest == held
        assert missing(made) == {(made.directory.trainers.lanes_of(LATE),)}
        goes_on.set()
        assert (await made.ended()).phase is Phase.COMPLETED


async def test_a_trainer_that_comes_second_with_its_lanes_changes_nothing(tmp_path):
    """It computes what another one has pushed already, while lane 0 keeps the step open."""
    script = write_script(tmp_path, model=MODEL)
    expected = await trained(spec_for(script, **COMMON, storage=str(tmp_path / "alone")))
    goes_on, first = asyncio.Event(), asyncio.Event()
    goes_on.set()
    first.set()
    counted: list[int] = []
    count = Reports.count

    def counting(self, share):
        counted.append(share.records)
        return count(self, share)

    with replaced(Reports, "count", counting):
        async with cluster(spec_for(script, **COMMON), 3) as made:
            await made.version(5)
            owner = made.directory.trainers.names[0]

            async def zero(lane):
                if lane == 0:
                    await first.wait()

            delay(made, owner, zero)
            delay(made, LATE if owner != LATE else "trainer-0-x", lambda _: goes_on.wait())
            goes_on.clear()
            first.clear()
            mine = made.directory.trainers.lanes_of(owner)
            # all but lane 0, and its owner's others behind it, are there: those of the late one too
            await until(lambda: all(lane[1] <= mine[1] for found in missing(made) for lane in found))
            before = made.pservers[0].counters.blocks_duplicate
            goes_on.set()
            await until(lambda: made.pservers[0].counters.blocks_duplicate > before)
            first.set()
            assert (await made.ended()).phase is Phase.COMPLETED
            assert differing(made.exported(), expected) == []
            assert made.master.metrics.records == EPOCHS * RECORDS
            assert sum(counted) == EPOCHS * RECORDS, "each record is one trainer's"


async def test_without_the_credit_a_lane_that_two_trainers_computed_counts_twice(tmp_path):
    """The ablation of LaneWork.count: whoever is acknowledged counts the lane as its own."""

    def all_lanes(self):
        return tuple(range(8))

    with (
        replaced(Outboxes, "first", property(all_lanes)),
        pytest.raises(ExceptionGroup) as found,
    ):
        await test_a_trainer_that_comes_second_with_its_lanes_changes_nothing(tmp_path)
    assert found.group_contains(AssertionError)


async def test_an_error_at_a_helper_is_no_failure_of_the_task(tmp_path):
    script = write_script(tmp_path, model=MODEL)
    goes_on = asyncio.Event()
    goes_on.set()
    tried = []
    async with cluster(spec_for(script, **COMMON), 3) as made:
        for name in ("trainer-0-x", "trainer-1-x"):

            async def only_own(lane, name=name):
                if lane not in range(*made.directory.trainers.lanes_of(name)):
                    tried.append(lane)
                    raise UserCodeError("out of memory")

            delay(made, name, only_own)
        delay(made, LATE, lambda _: goes_on.wait())
        await made.version(5)
        goes_on.clear()
        await until(lambda: len(tried) > 3)
        goes_on.set()
        state = await made.ended()
        assert state.phase is Phase.COMPLETED
        assert state.result.discarded_tasks == 0
        assert made.master.job.budget.counts.total == 0


async def test_lanes_move_to_faster_trainers_and_back(tmp_path):
    """There are fewer tasks than lanes, so all lanes of the late trainer are without records. It keeps every
    step open all the same."""
    script = write_script(tmp_path, model=MODEL)
    expected = await trained(spec_for(script, **COMMON, storage=str(tmp_path / "alone")))
    usual_s, late_s = 0.04, 0.12
    async with cluster(spec_for(script, **COMMON | {"rebalance_s": 0.5}), 3) as made:

        async def usually(_):
            await asleep(usual_s)

        async def late(_):
            await asleep(late_s)

        for name in ("trainer-0-x", "trainer-1-x"):
            delay(made, name, usually)
        delay(made, LATE, late)

        def late_lanes():
            return len(range(*made.directory.trainers.lanes_of(LATE)))

        await until(lambda: made.directory.trainers.shares and late_lanes() < 2)
        late_s = usual_s
        await until(lambda: late_lanes() >= 2)
        usual_s = late_s = 0.0
        assert (await made.ended()).phase is Phase.COMPLETED
        assert differing(made.exported(), expected) == []
        moved = [event for event in made.master.events.after(0, 1000) if event.name == "lanes_moved"]
        assert len(moved) >= 2
        # a lane that was pushed in one generation and acknowledged in the next may be left out of the sums
        assert 0 < made.master.metrics.records <= EPOCHS * RECORDS
