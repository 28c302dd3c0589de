"""Who follows a job's events by the cursor misses none and sees none twice, though the master dies at any
write."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import pairwise
from typing import Any

from master_service.api.routes.events import JobEvents
from master_service.core.changes import Event
from master_service.leadership.master import Master
from master_service.store import schema
from master_service.store.writer import GroupCommit, MasterWriter
from tests.equipment.cluster.crash_point import CrashPoint
from tests.equipment.replaced import replaced
from tests.equipment.virtual_loop import Process, run_virtually
from tests.equipment.waiting import until
from tests.master_service.cluster import MasterCluster, done, spec_of
from tests.simulation.many_jobs import unwind
from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.runtime import ids
from trireme_shared.protocol.errors import NotReady, StaleAttempt, TriremeError
from trireme_shared.protocol.events import EventChunk, EventRecord
from trireme_shared.protocol.records import AcquireTask, FailTask, JobState, Task, TaskAnswer, UserFailure

ANSWER_S = 2.0
NO = UserFailure(error_type="ValueError", message="no")
OTHER = UserFailure(error_type="KeyError", message="other")


class Node:
    """A master in a process of its own."""

    def __init__(self, cluster: MasterCluster, name: str) -> None:
        self.process = Process(name)
        self.crash_point = CrashPoint(self.process)
        self.master: Master = cluster.make_master(name, ids.new_id(name), f"http://{name}")
        self.master.etcd = Etcd(self.crash_point.transport(cluster.simulated.transport(name)))
        self.stopping = asyncio.Event()
        self.running = self.process.spawn(self.master.run(self.stopping))

    @property
    def leads(self) -> bool:
        return not self.process.dead and self.master.current_term is not None

    async def call(self, ask: Callable[[Master], Awaitable[Any]]) -> Any:
        """A request to this process: its answer, its TriremeError, or None: it does not answer."""

        async def answer() -> Any:
            try:
                return await ask(self.master)
            except TriremeError as error:
                return error

        calling = self.process.spawn(answer())
        answered, _ = await asyncio.wait([calling], timeout=ANSWER_S)
        return calling.result() if answered else None


class Follower:
    """Asks whoever leads for what comes after its cursor."""

    def __init__(self, nodes: list[Node]) -> None:
        self._nodes = nodes
        self.seen: list[EventRecord] = []
        self.refused: list[str] = []

    @property
    def cursor(self) -> int:
        return self.seen[-1].event_id if self.seen else 0

    async def run(self) -> None:
        while True:
            for node in self._nodes:
                if node.leads:
                    await self._ask(node)
            await asyncio.sleep(0.01)

    async def _ask(self, node: Node) -> None:
        page = await node.call(lambda master: JobEvents(master, None).page(self.cursor, 3, 1.0))
        if isinstance(page, TriremeError):
            self.refused += [page.message] * (not page.retryable)
        elif page is not None:
            self.seen += page.events

    def ask_now(self, master: Master) -> None:
        """What a master answers without waiting for anything, the moment before it dies."""
        asking = JobEvents(master, None).page(self.cursor, 1000, 0.0)
        try:
            asking.send(None).cancel()  # it waits for etcd
        except StopIteration as answered:
            self.seen += answered.value.events
        finally:
            asking.close()


class Scenario:
    def __init__(self) -> None:
        self.cluster = MasterCluster(spec_of())
        self.nodes = [Node(self.cluster, "m1")]
        self.follower = Follower(self.nodes)

    async def insist(self, ask: Callable[[Master], Awaitable[Any]]) -> Any:
        """Ask whoever leads, until there is an answer."""
        while True:
            for node in self.nodes:
                if node.leads and not isinstance(answer := await node.call(ask), TriremeError | None):
                    return answer
            await asyncio.sleep(0.05)

    async def use(self) -> None:
        """Members come and go, a task fails, a trainer reports a failure of its script."""
        cluster = self.cluster
        await cluster.initialise("t1")
        await self.insist(lambda master: _runs(master, "t1"))
        first = await self._take("t1", "r1")
        await self.insist(lambda master: _unless_stale(master.complete_task(first.task_id, done(first))))
        second = await self._take("t1", "r2")
        failed = FailTask(trainer="t1", attempt=second.attempt, epoch=0, failure=NO)
        await self.insist(lambda master: _unless_stale(master.fail_task(second.task_id, failed)))
        await cluster.add_trainer("t2")
        await self.insist(lambda master: _runs(master, "t1", "t2"))
        await self.insist(lambda master: _unless_stale(master.report_failure("t1", OTHER)))
        await self._take("t2", "r3")
        await cluster.lose("t2")
        await self.insist(lambda master: _runs(master, "t1"))
        third = await self._take("t1", "r4")
        await self.insist(lambda master: _unless_stale(master.complete_task(third.task_id, done(third))))

    async def _take(self, trainer: str, request: str) -> Task:
        async def take(master: Master) -> TaskAnswer:
            generation = master.job.state.generation
            return await master.acquire_task(
                AcquireTask(trainer=trainer, request=request, generation=generation)
            )

        answer = await self.insist(take)
        assert answer.task is not None, answer
        task: Task = answer.task
        return task

    def broken(self) -> list[str]:
        """Promises that the follower, or the history of etcd, shows to be broken."""
        written, states = [], []
        for event in self.cluster.simulated.events():
            if event.type == "put" and event.kv.key.startswith(self.cluster.keys.events):
                chunk = EventChunk.model_validate_json(event.kv.value)
                written += [(event.kv.mod_revision, told) for told in chunk.events]
            elif event.type == "put" and event.kv.key == self.cluster.keys.state:
                states.append((event.kv.mod_revision, JobState.model_validate_json(event.kv.value)))
        broken = list(self.follower.refused)
        if self.follower.seen != [told for _, told in written]:
            broken.append(
                f"seen {_lines(self.follower.seen)}, written {_lines([told for _, told in written])}"
            )
        broken += [
            f"event {after.event_id} follows {before.event_id}"
            for before, after in pairwise(self.follower.seen)
            if after.event_id != before.event_id + 1
        ]
        told_at = {revision: told.fields.get("generation") for revision, told in written}
        for (_, before), (revision, after) in pairwise(states):
            if after.generation != before.generation and told_at.get(revision) != after.generation:
                broken.append(f"generation {after.generation} came without its event")
        return broken


def _lines(events: list[EventRecord]) -> list[str]:
    return [f"{event.event_id} {event.message}" for event in events]


async def _runs(master: Master, *trainers: str) -> bool:
    """Raises NotReady while others are members."""
    if set(master.job.trainers.names) != set(trainers):
        raise NotReady(f"the trainers are {master.job.trainers.names}, not {trainers}")
    return True


async def _unless_stale(report: Awaitable[Any]) -> bool:
    """A report that landed before its master died is stale when it is repeated."""
    with suppress(StaleAttempt):
        await report
    return True


def run(last: int | None) -> tuple[list[str], int]:
    """The first master dies instead of its write number `last`. Broken promises, and how many writes it
    made."""

    async def main() -> tuple[list[str], int]:
        scenario = Scenario()
        first = scenario.nodes[0]
        await until(lambda: first.leads, "the first master to lead")
        scenario.nodes.append(Node(scenario.cluster, "m2"))
        begin = len(first.crash_point.done)

        def die() -> None:
            scenario.follower.ask_now(first.master)
            first.process.kill()
            scenario.cluster.simulated.disconnect("m1")
            scenario.cluster.simulated.forget("m1")
            scenario.cluster.dead.add("http://m1")

        if last is not None:
            first.crash_point.last, first.crash_point.at_last = begin + last, die
        following = asyncio.ensure_future(scenario.follower.run())
        await scenario.use()
        writes = len(first.crash_point.done) - begin
        await asyncio.sleep(8)
        following.cancel()
        broken = scenario.broken()
        await unwind(scenario.cluster.simulated, [node.process for node in scenario.nodes])
        return broken, writes

    return run_virtually(main)  # type: ignore[no-any-return]


def test_a_follower_sees_every_event_once_though_the_master_dies_before_any_write() -> None:
    broken, writes = run(None)
    assert not broken
    assert writes > 10, "the scenario writes"
    found = {last: told for last in range(writes) if (told := run(last)[0])}
    assert not found


# ------------------------------------------------------------------ without a safeguard


def first_broken(writes: int) -> list[str]:
    return next((broken for last in range(writes) if (broken := run(last)[0])), [])


def test_answers_that_do_not_wait_for_etcd_tell_events_that_never_happened() -> None:
    async def at_once(self: MasterWriter) -> None:
        pass

    with replaced(MasterWriter, "settled", at_once):
        assert first_broken(30)


def test_events_that_are_written_after_their_change_get_lost() -> None:
    tell_all: Any = GroupCommit.tell_all
    late: list[Event] = []

    def apart(self: GroupCommit, job: Any, told: list[tuple[str, Event]], now: float) -> Any:
        ready = [entry for entry in told if any(entry[1] is event for event in late)]
        new = [event for _, event in told if not any(event is known for known in late)]
        late.extend(new)
        if new:
            self.tell(new)
        return tell_all(self, job, ready, now)

    with replaced(GroupCommit, "tell_all", apart):
        assert any("without its event" in each for each in first_broken(30))


def test_a_master_that_does_not_read_the_log_has_lost_what_follows_a_cursor() -> None:
    with replaced(schema, "chunk_of", lambda *_: None):
        assert any("are not kept" in each for each in first_broken(30))
