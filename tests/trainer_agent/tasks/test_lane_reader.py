"""What a lane reads, with a real master: by position, taken over anywhere, the next task ahead."""

from __future__ import annotations

import asyncio
import errno

import numpy as np
import pytest

from tests.trainer_agent.cluster import cluster
from tests.trainer_agent.scripts import RECORDS, spec_for, write_script
from trainer_agent.data import Shard
from trainer_agent.tasks.activity import Held
from trainer_agent.tasks.lane_reader import LaneReader
from trainer_agent.tasks.source import TaskFailed, TaskSource, TrainingOver
from trireme_shared.platform.storage import files
from trireme_shared.protocol.errors import DatasetError, NotLeader, PeerError, StaleGeneration
from trireme_shared.protocol.records import AcquireTask, Task
from trireme_shared.protocol.records.step import LanePosition

ME = "trainer-0-x"


async def at_once(work, *arguments):
    return work(*arguments)


@pytest.fixture
async def made(tmp_path):
    """A running job of two lanes whose trainer is only a name: nobody computes."""
    spec = spec_for(write_script(tmp_path), lanes=2, global_batch_size=8, records_per_task=10, epochs=2)
    async with cluster(spec) as made:
        await made.etcd.put(made.keys.layout, b"{}")
        await made.etcd.put(made.keys.init_done, b"test")
        await made.etcd.put(
            made.keys.trainer(ME),
            f'{{"trainer":"{ME}","url":"","incarnation":"x","host":"x","pid":1}}'.encode(),
        )
        await made.directory.wait_for(lambda view: bool(view.trainers.names), 10, "lanes")
        yield made


def reader(made, lane=0):
    source = TaskSource(made.spec, made.port, ME, at_once)
    return LaneReader(lane, source, lambda: made.directory.state.generation)


async def walk(lane_reader, position):
    portions = []
    while not position.exhausted:
        portions.append(await lane_reader.at(position))
        position = portions[-1].after
    return portions


def keys_of(portion):
    return [record["x"].tobytes() for record in portion.records or ()]


async def test_the_lanes_together_read_every_record_once(made, tmp_path):
    portions = [p for lane in (0, 1) for p in await walk(reader(made, lane), LanePosition(lane=lane))]
    everything = [row.tobytes() for row in np.load(tmp_path / "x.npy")]
    assert sorted(key for portion in portions for key in keys_of(portion)) == sorted(everything)
    assert len(everything) == RECORDS
    assert sum(portion.finishes for portion in portions) == RECORDS // 10


async def test_minibatches_end_with_their_task(made):
    portions = await walk(reader(made), LanePosition(lane=0))
    assert [len(portion.records) for portion in portions] == [4, 4, 2] * 3
    assert [portion.finishes for portion in portions] == [False, False, True] * 3
    assert [(p.after.index, p.after.offset, p.after.exhausted) for p in portions[:4]] == [
        (0, 4, False),
        (0, 8, False),
        (1, 0, False),
        (1, 4, False),
    ]
    assert portions[-1].after == LanePosition(lane=0, index=3, exhausted=True)


async def test_a_lane_is_taken_over_at_any_position(made):
    portions = await walk(reader(made), LanePosition(lane=0))
    for portion in portions[3:]:  # whoever comes later starts in the middle
        taken = await reader(made).at(portion.before)
        assert (keys_of(taken), taken.after, taken.finishes) == (
            keys_of(portion),
            portion.after,
            portion.finishes,
        )


async def test_the_same_position_again_gives_the_same_records_without_asking_the_master(made):
    lane = reader(made)
    once = await lane.at(LanePosition(lane=0))
    made.port.away = True
    again = await lane.at(LanePosition(lane=0))
    assert (keys_of(again), again.after) == (keys_of(once), once.after)


async def test_a_task_fetched_ahead_needs_no_master_when_its_turn_comes(made):
    lane = reader(made)
    async with asyncio.TaskGroup() as group:
        lane.prefetch(LanePosition(lane=0), group)
    made.port.away = True
    assert len((await lane.at(LanePosition(lane=0))).records) == 4


async def test_a_task_that_was_fetched_ahead_is_at_hand_where_it_is_due_and_nowhere_else(made):
    lane, first, second = reader(made), LanePosition(lane=0), LanePosition(lane=0, index=1)
    assert lane.at_hand(first) is None
    async with asyncio.TaskGroup() as group:
        lane.prefetch(first, group)
        assert lane.at_hand(first) is None, "it is being fetched"
    assert lane.at_hand(second) is None
    ahead = lane.held
    portion = lane.at_hand(first)
    assert portion is not None
    assert len(portion.records) == 4
    assert ahead == [Held(portion.task, 0)], "it is this trainer's already"
    assert lane.held == [Held(portion.task, 1)]
    lane.drop()
    assert lane.at_hand(first) is None


async def test_an_exhausted_lane_reads_nothing_and_stays_where_it_is(made):
    done = LanePosition(lane=1, epoch=0, index=3, exhausted=True)
    portion = await reader(made, 1).at(done)
    assert (portion.records, portion.after, portion.task) == (None, done, None)


async def test_an_epoch_beyond_the_last_is_the_end_of_training(made):
    for epoch in range(2):
        await walk(reader(made), LanePosition(lane=0, epoch=epoch))
        await walk(reader(made, 1), LanePosition(lane=1, epoch=epoch))
    with pytest.raises(TrainingOver):
        await reader(made).at(LanePosition(lane=0, epoch=2))


async def test_the_old_owner_of_a_lane_hears_that_its_generation_is_stale(made):
    source = TaskSource(made.spec, made.port, ME, at_once)
    with pytest.raises(StaleGeneration):
        await LaneReader(0, source, lambda: 0).at(LanePosition(lane=0))


async def test_records_that_cannot_be_read_fail_their_task(made, tmp_path):
    (tmp_path / "x.npy").write_bytes(b"gone")
    with pytest.raises(TaskFailed) as raised:
        await reader(made).at(LanePosition(lane=0))
    assert raised.value.task.stream == 0
    assert "x.npy" in str(raised.value.error)


async def test_a_lost_answer_is_asked_for_with_the_same_request(made):
    asked: list[AcquireTask] = []

    class Lossy:
        async def acquire_task(self, ask):
            asked.append(ask)
            answer = await made.port.acquire_task(ask)
            if len(asked) == 1:
                from trireme_shared.protocol.errors import PeerError

                raise PeerError("the answer got lost")
            return answer

    answer = await TaskSource(made.spec, Lossy(), ME, at_once).acquire(
        made.directory.state.generation, 0, 0, 0
    )
    assert answer.task.attempt == 1
    assert [ask.request for ask in asked] == [asked[0].request] * 2


class FailingReader:
    """Reads after `failures` failures of this machine."""

    def __init__(self, error, failures):
        self.error, self.failures, self.reads = error, failures, 0

    def read(self, file, first, count, offset=None, stamp=""):
        self.reads += 1
        if self.reads <= self.failures:
            with files.reading(file, "a file"):
                raise self.error
        return Shard({"x": np.zeros(count)}, count)


class WaitingMaster:
    """Hears what tasks wait for."""

    def __init__(self):
        self.heard = []

    async def report_progress(self, task_id, progress):
        self.heard.append((task_id, progress.work, progress.waits_for))
        if progress.work == 2:
            raise NotLeader("nobody leads now")


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOSPC, errno.EIO, errno.ETIMEDOUT])
async def test_what_a_machine_lacks_is_waited_for_and_is_never_a_tasks_failure(tmp_path, monkeypatch, number):
    failing, spec = FailingReader(OSError(number, "no"), 3), spec_for(write_script(tmp_path))
    task = Task(task_id="1", kind="TRAIN", attempt=1, count=2)
    monkeypatch.setattr("trainer_agent.waiting.FIRST_S", 0.001)
    monkeypatch.setattr("trainer_agent.tasks.source.open_dataset", lambda *_, **__: failing)
    source = TaskSource(spec, master := WaitingMaster(), ME, at_once)
    assert len((await source.load(task)).shard) == 2
    assert failing.reads == 4
    # it grows: the task is not late
    assert [heard[:2] for heard in master.heard] == [("1", 1), ("1", 2), ("1", 3)]
    assert "no" in master.heard[0][2]
    monkeypatch.setattr("trainer_agent.tasks.source.READ_LIMIT_S", 0.002)
    failing.failures = 1000
    with pytest.raises(PeerError, match="no"):
        await source.load(task)


# ------------------------------------------------------------ the following task, read ahead


class Reads:
    """Runs work in its caller's thread, and knows how often each task's records were read. Unless it
    `goes_on`, reads of tasks behind the first one wait."""

    def __init__(self) -> None:
        self.tasks: list[tuple[int, int]] = []
        self.begun, self.goes_on = asyncio.Event(), asyncio.Event()
        self.goes_on.set()

    async def __call__(self, work, task):
        self.tasks.append((task.epoch, task.index))
        if len(self.tasks) > 1:
            self.begun.set()
            await self.goes_on.wait()
        return work(task)


async def follow(made, positions, reads, lane=0):
    """Portions of a lane at each position, as a loop asks for them."""
    found = LaneReader(
        lane, TaskSource(made.spec, made.port, ME, reads), lambda: made.directory.state.generation
    )
    portions = []
    async with asyncio.TaskGroup() as group:
        for position in positions:
            portions.append(found.at_hand(position) or await found.at(position))
            found.read_ahead(group)
            await asyncio.sleep(0)
            if portions[-1].finishes:
                found.prefetch(portions[-1].after, group)
                await asyncio.sleep(0.01)
        found.drop()
    return portions


async def test_each_task_is_read_once_while_the_one_before_is_computed_in_the_next_epoch_too(made):
    expected = await walk(reader(made), LanePosition(lane=0))
    expected += await walk(reader(made), LanePosition(lane=0, epoch=1))
    reads = Reads()
    found = await follow(made, [portion.before for portion in expected], reads)
    assert list(map(keys_of, found)) == list(map(keys_of, expected))
    assert reads.tasks == [(epoch, index) for epoch in range(2) for index in range(3)]


async def test_the_following_task_is_read_before_this_trainer_has_it(made):
    reads = Reads()
    lane = LaneReader(0, TaskSource(made.spec, made.port, ME, reads), lambda: made.directory.state.generation)
    async with asyncio.TaskGroup() as group:
        first = await lane.at(LanePosition(lane=0))
        reads.goes_on.clear()
        lane.read_ahead(group)
        await asyncio.wait_for(reads.begun.wait(), 10)
        assert reads.tasks == [(0, 0), (0, 1)]
        assert not first.finishes
        again = await lane.at(first.after)
        assert len(again.records) == 4, "computing does not wait for what is read ahead"
        lane.read_ahead(group)
        assert reads.tasks == [(0, 0), (0, 1)], "once"
        assert [held.task.index for held in lane.held] == [0], "and nothing is to be renewed or given back"
        assert len(made.master.job.training.pending) == 1
        lane.drop()  # as when its lanes move, or training ends: nothing is waited for


async def test_records_that_cannot_be_read_ahead_are_no_failed_attempt(made):
    failed = []

    async def reads(work, task):
        if task.index == 1 and not failed:
            failed.append(task)
            raise DatasetError("x.npy is not there yet", hint="wait")
        return work(task)

    expected = await walk(reader(made), LanePosition(lane=0))
    found = await follow(made, [portion.before for portion in expected], reads)
    assert list(map(keys_of, found)) == list(map(keys_of, expected))
    assert [task.attempt for task in failed] == [0]


class Changed:
    """A master whose tasks change between when they are named and when they are given."""

    def __init__(self, master, **changes) -> None:
        self._master, self._changes = master, changes

    async def acquire_task(self, ask):
        answer = await self._master.acquire_task(ask)
        if ask.index != 1:
            return answer
        return answer.with_fields(task=answer.task.with_fields(**self._changes))


@pytest.mark.parametrize("changes", [{"alone": True}, {"first": 0}, {"offset": 5}, {"task_id": "5"}])
async def test_records_read_ahead_are_used_for_the_very_task_that_was_named(made, changes):
    reads = Reads()
    source = TaskSource(made.spec, Changed(made.port, **changes), ME, reads)
    lane = LaneReader(0, source, lambda: made.directory.state.generation)
    async with asyncio.TaskGroup() as group:
        await lane.at(LanePosition(lane=0))
        lane.read_ahead(group)
        await asyncio.wait_for(reads.begun.wait(), 10)
        await lane.at(LanePosition(lane=0, index=1))
        lane.drop()
    assert reads.tasks == [(0, 0), (0, 1), (0, 1)]
