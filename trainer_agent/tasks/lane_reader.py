"""The records of each lane: its tasks one after the other, minibatches by position, the next task ahead.

    LanePosition ──at──► Portion(records, where the lane stands after them)
         | another index: acquire the task from the master, read its records in the executor
         +─ skip ─► next index       exhausted ─► no records       end ─► TrainingOver

    a task is computed              ─► read_ahead: its other minibatches, if they come one by one (Parts), and
                                       the following task, which the master named; nobody holds that one
                                       yet, so it need not be renewed or given back
    its last minibatch is computed  ─► prefetch: that task is acquired, and its records are there

A lane can be taken over at any position: a task that is not loaded is acquired and read again, in the same
order of records.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from trainer_agent.model.compute import Records
from trainer_agent.tasks.activity import Held
from trainer_agent.tasks.source import LoadedTask, TaskFailed, TaskSource, TrainingOver, outcome_of
from trainer_agent.waiting import SingleErrorGroup
from trireme_shared.protocol.errors import TriremeError
from trireme_shared.protocol.lanes import Interval
from trireme_shared.protocol.records import Task
from trireme_shared.protocol.records.step import LanePosition, StepRecord


@dataclass(frozen=True, slots=True)
class Portion:
    """A lane's share of one step. `finishes`: these are the last records of `task`. `skipped`: a discarded
    task was passed, and some blocks may have got data of it in this very step."""

    before: LanePosition
    after: LanePosition
    records: Records | None = None
    task: Task | None = None
    finishes: bool = False
    skipped: bool = False


@dataclass(frozen=True, slots=True)
class _ReadAhead:
    """`task`: as the master named it; it is not acquired. `opened`: its minibatches come one by one. Else
    `records`: None if they could not be read."""

    task: Task
    opened: LoadedTask | None
    records: asyncio.Task[LoadedTask | None] | None = None

    def has_records_of(self, task: Task) -> bool:
        """Whether `task`, which was acquired, is that one. Nothing else of it may differ."""
        given = self.task.with_fields(attempt=task.attempt, timeline=task.timeline)
        return given == task


class LaneReader:
    """One lane. Not concurrent with itself: `at`, `read_ahead` and `prefetch` are called by one loop.

    It has the records of two tasks in memory at most: those of the present one, and of the following one."""

    def __init__(self, lane: int, source: TaskSource, generation: Callable[[], int]) -> None:
        self._lane, self._source, self._generation = lane, source, generation
        self._loaded: LoadedTask | None = None
        self._next: asyncio.Task[LoadedTask | None] | None = None
        self._read_ahead: _ReadAhead | None = None
        self._reading: asyncio.Task[None] | None = None  # minibatches of the present task and of that one
        self._done = 0
        self._next_portion: Portion | None = None

    @property
    def held(self) -> list[Held]:
        """The task being read, with how many of its minibatches were handed out, and the one that was fetched
        ahead."""
        found = [Held(self._loaded.task, self._done)] if self._loaded else []
        if (ahead := self._fetched_ahead) is not None:
            found.append(Held(ahead.task, 0))
        return found

    def reads(self, task: Task) -> bool:
        return self._loaded is not None and self._loaded.task.task_id == task.task_id

    @property
    def _fetched_ahead(self) -> LoadedTask | None:
        if self._next is None or not self._next.done() or self._next.cancelled():
            return None
        return self._next.result()

    def at_hand(self, position: LanePosition) -> Portion | None:
        """As `at`, if the task is loaded or was fetched ahead: then nobody has to be asked. Else None."""
        if position.exhausted:
            return None
        loaded = is_due(self._loaded, position) or self._prefetched(position)
        if loaded is None or not loaded.has(number_at(position, self._source)):
            return None
        return self._portion(position, position, loaded)

    def next(self, position: LanePosition) -> Portion | None:
        """What `at_hand` will give (the same object), if it is of the task that is being read."""
        loaded = None if position.exhausted else is_due(self._loaded, position)
        if loaded is None or not loaded.has(number_at(position, self._source)):
            return None
        self._next_portion = portion_of(self._source, position, position, loaded)
        return self._next_portion

    async def at(self, position: LanePosition) -> Portion:
        """The lane's records at `position`. Raises TrainingOver, TaskFailed, StaleGeneration,
        DeadlineExceeded."""
        before = position
        while not position.exhausted:
            loaded = is_due(self._loaded, position)
            if loaded is None:
                found = await self._fetch(position)
                if isinstance(found, LanePosition):
                    position = found
                    continue
                loaded = self._loaded = found
            await self._source.ready(loaded, number_at(position, self._source))
            return self._portion(before, position, loaded)
        self._loaded = None
        return Portion(before, position, skipped=position.index != before.index)

    def read_ahead(self, group: asyncio.TaskGroup) -> None:
        """The present task is computed: read meanwhile what is left of it, and the following one."""
        loaded = self._loaded
        if loaded is None or (self._reading is not None and not self._reading.done()):
            return
        following = loaded.following if self._next is None else None
        if following is not None and (self._read_ahead is None or self._read_ahead.task != following):
            self._drop_read_ahead()
            opened = self._source.opened(following)
            whole = group.create_task(self._source.read_ahead(following)) if opened is None else None
            self._read_ahead = _ReadAhead(following, opened, whole)
        ahead = self._read_ahead.opened if self._read_ahead is not None else None
        if loaded.comes_after(self._done) or (ahead is not None and ahead.comes_after(0)):
            self._reading = group.create_task(self._read_on(loaded, ahead))

    async def _read_on(self, loaded: LoadedTask, ahead: LoadedTask | None) -> None:
        await self._source.read_on(loaded, self._done)
        if ahead is not None:
            await self._source.read_on(ahead)

    def prefetch(self, position: LanePosition, group: asyncio.TaskGroup) -> None:
        """The lane's next step starts a new task: acquire it meanwhile, and have its records."""
        if self._next is None and not position.exhausted:
            self._next = group.create_task(self._ahead(position))

    def drop(self) -> None:
        """Forget the task: the attempt is over, or the lane has another owner."""
        self._loaded = None
        if self._next is not None:
            self._next.cancel()
            self._next = None
        self._drop_read_ahead()

    def _drop_read_ahead(self) -> None:
        for reading in (self._reading, self._read_ahead.records if self._read_ahead is not None else None):
            if reading is not None:
                reading.cancel()
        self._read_ahead = self._reading = None

    def _prefetched(self, position: LanePosition) -> LoadedTask | None:
        """The task at `position`, if it was fetched ahead and is there by now; it becomes the loaded one."""
        ahead = is_due(self._fetched_ahead, position)
        if ahead is not None:
            self._loaded, self._next = ahead, None
        return ahead

    async def _fetch(self, position: LanePosition) -> LoadedTask | LanePosition:
        """The task at `position`; or the position to go on from, if there is none."""
        if self._next is not None:
            ahead = is_due(await outcome_of(self._next), position)
            self._next = None
            if ahead is not None:
                return ahead
        return await self._acquire(position)

    async def _acquire(self, position: LanePosition) -> LoadedTask | LanePosition:
        answer = await self._source.acquire(self._generation(), self._lane, position.epoch, position.index)
        match answer.answer:
            case "task":
                assert answer.task is not None
                return replace(await self._records_of(answer.task), following=answer.following)
            case "skip":
                return _after_task(position, answer.stream_length)
            case "end":
                raise TrainingOver
            case _:
                return position.with_fields(offset=0, exhausted=True)

    async def _records_of(self, task: Task) -> LoadedTask:
        """Those that were read ahead, if they are those of `task`. One that is to be read alone is read
        again."""
        ahead = self._read_ahead
        if ahead is not None and ahead.has_records_of(task):
            loaded = ahead.opened if ahead.records is None else await outcome_of(ahead.records)
            self._read_ahead = None
            if loaded is not None:
                return replace(loaded, task=task)
        self._drop_read_ahead()
        return self._source.opened(task) or await self._source.load(task)

    async def _ahead(self, position: LanePosition) -> LoadedTask | None:
        """None if anything fails: then `at` asks again, and gets the error."""
        try:
            found = await self._acquire(position)
        except (TriremeError, TaskFailed, TrainingOver):
            return None
        return found if isinstance(found, LoadedTask) else None

    def _portion(self, before: LanePosition, position: LanePosition, loaded: LoadedTask) -> Portion:
        self._done = position.offset // self._source.spec.minibatch_size + 1
        known, self._next_portion = self._next_portion, None
        if known is not None and known.task is loaded.task and known.before == position == before:
            return known
        return portion_of(self._source, before, position, loaded)


def portion_of(
    source: TaskSource, before: LanePosition, position: LanePosition, loaded: LoadedTask
) -> Portion:
    """The records of the lane whose reader stands at `position` of a task."""
    records = source.minibatch(loaded, number_at(position, source))
    offset = position.offset + len(records)
    finishes = offset >= len(loaded.shard)
    after = (
        _after_task(position, loaded.task.stream_length) if finishes else position.with_fields(offset=offset)
    )
    return Portion(before, after, records, loaded.task, finishes, position.index != before.index)


def number_at(position: LanePosition, source: TaskSource) -> int:
    """The minibatch of its task at which the lane stands."""
    return position.offset // source.spec.minibatch_size


def _after_task(position: LanePosition, stream_length: int) -> LanePosition:
    """Where the lane stands behind the task at `position`."""
    index = position.index + 1
    return position.with_fields(index=index, offset=0, exhausted=index >= stream_length)


def is_due(loaded: LoadedTask | None, position: LanePosition) -> LoadedTask | None:
    """`loaded`, if it is the task at `position`."""
    there = loaded is not None and (loaded.task.epoch, loaded.task.index) == (position.epoch, position.index)
    return loaded if there else None


class LaneReaders:
    """The readers of this trainer's lanes, made when first used. `generation` is asked for at each
    acquire."""

    def __init__(self, source: TaskSource, generation: Callable[[], int]) -> None:
        self._source, self._generation = source, generation
        self._readers: dict[int, LaneReader] = {}

    def __getitem__(self, lane: int) -> LaneReader:
        if lane not in self._readers:
            self._readers[lane] = LaneReader(lane, self._source, self._generation)
        return self._readers[lane]

    def read_ahead(self, lanes: Sequence[int], group: asyncio.TaskGroup) -> None:
        """See LaneReader.read_ahead; lanes that this trainer does not read are left out."""
        for lane in lanes:
            if lane in self._readers:
                self._readers[lane].read_ahead(group)

    def next(self, lane: int, position: LanePosition) -> Portion | None:
        """See LaneReader.next."""
        return self._readers[lane].next(position) if lane in self._readers else None

    def held(self) -> list[Held]:
        """See LaneReader.held."""
        return [held for reader in self._readers.values() for held in reader.held]

    async def read(self, lanes: Sequence[int], positions: Sequence[LanePosition]) -> dict[int, Portion]:
        """Each lane's records at its position. Raises as LaneReader.at.

        Mostly all are loaded: then this returns without a turn of the event loop, and computing begins before
        the pull is sent.
        """
        at_hand = {lane: self[lane].at_hand(positions[lane]) for lane in lanes}
        portions = {lane: portion for lane, portion in at_hand.items() if portion is not None}
        if len(portions) == len(lanes):
            return portions
        async with SingleErrorGroup() as group:
            reading = {
                lane: group.create_task(self[lane].at(positions[lane]))
                for lane in lanes
                if lane not in portions
            }
        return {lane: portions.get(lane) or reading[lane].result() for lane in lanes}

    def keep(self, lanes: Interval) -> None:
        """Lanes outside [first, last) have other owners now."""
        for lane in [lane for lane in self._readers if not lanes[0] <= lane < lanes[1]]:
            self._readers.pop(lane).drop()

    def drop(self, task: Task) -> None:
        """Forget `task`, whichever lane reads it: its attempt is over."""
        for reader in self._readers.values():
            if reader.reads(task):
                reader.drop()

    async def announce_end(self, lane: int, epoch: int) -> None:
        """Acquiring from the epoch after the last one, for one of the trainer's lanes of now, tells the
        master that everything is committed. Raises TrainingOver, StaleGeneration."""
        await self._source.acquire(self._generation(), lane, epoch)
        raise TrainingOver

    async def announce_stop(self, lane: int, epochs: int, version: StepRecord) -> None:
        """The same for training that ends early, at this version. Raises TrainingOver, StaleGeneration."""
        await self._source.acquire(
            self._generation(), lane, epochs, version.version, stopped=version.positions
        )
        raise TrainingOver
