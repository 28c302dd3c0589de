"""A cluster in virtual time: masters that die at any write to etcd, host agents whose processes are keys and
calls, and users who ask again.

`check_history` reads every revision that etcd ever had: what no leader, dead or late, may ever have written.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from master_service.cluster.leader import ClusterMaster
from tests.equipment.cluster.crash_point import CrashPoint
from tests.equipment.etcd.simulated import SimulatedEtcd
from tests.equipment.virtual_loop import Process
from tests.equipment.waiting import until
from tests.master_service.many_jobs import Jobs, leads
from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.etcd.operations import Body, Transport
from trireme_shared.protocol.errors import NotLeader, PeerError
from trireme_shared.protocol.keys import ClusterKeys
from trireme_shared.protocol.records import JobState
from trireme_shared.protocol.records.cluster import (
    Assignment,
    ClusterJob,
    PoolMember,
    Standing,
    TaskRun,
    TaskState,
)

ANSWER_S = 4.0
UNWINDING_ROUNDS = 5
# revisions: what was written so shortly before a leader's write, the leader had not heard; the agent runs one
# after the other
UNHEARD = 20
NEXT = {
    Standing.QUEUED: {Standing.QUEUED, Standing.ACTIVE, Standing.PAUSED, Standing.CANCELLED},
    Standing.ACTIVE: set(Standing),
    Standing.PAUSED: {Standing.PAUSED, Standing.QUEUED, Standing.CANCELLED},
    Standing.COMPLETED: {Standing.COMPLETED},
    Standing.CANCELLED: {Standing.CANCELLED},
    Standing.FAILED: {Standing.FAILED},
}


@dataclass(eq=False)
class Node:
    process: Process
    crash_point: CrashPoint
    late: LateWrite
    master: ClusterMaster
    running: asyncio.Task[None]
    stopping: asyncio.Event


class LateWrite:
    """Once `key` is set, the next write of the client that puts it waits in the network until it is
    delivered."""

    def __init__(self, inner: Transport) -> None:
        self.key = ""
        self._inner = inner
        self._held: tuple[str, Body, float] | None = None

    @property
    def waits(self) -> bool:
        return self._held is not None

    async def deliver(self) -> None:
        assert self._held is not None
        await self._inner.call(*self._held)

    async def call(self, method: str, body: Body, timeout_s: float) -> Body:
        if self._held is None and self.key.encode() in _puts(body):
            self._held = (method, body, timeout_s)
            await asyncio.Event().wait()
        return await self._inner.call(method, body, timeout_s)

    def stream(self, method: str, body: Body) -> AsyncGenerator[Body, None]:
        return self._inner.stream(method, body)

    async def close(self) -> None:
        await self._inner.close()


def _puts(body: Body) -> list[bytes]:
    """The keys that a transaction puts."""
    return [op["request_put"]["key"] for op in body.get("success", ()) if "request_put" in op]


class SimulatedJobs(Jobs):
    """Masters are processes of their own. `ask` calls the one that leads, as a user or a member does by
    REST."""

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        self.nodes: list[Node] = []
        self.others: list[Process] = []  # that `end` ends, too

    def start_master(self, name: str) -> Node:
        process, stopping = Process(name), asyncio.Event()
        crash_point = CrashPoint(process)
        master = self.master(name)
        late = LateWrite(self.simulated.transport(name))
        master.etcd = Etcd(crash_point.transport(late))
        running = process.spawn(master.run(stopping))
        node = Node(process, crash_point, late, master, running, stopping)
        crash_point.at_last = lambda: self.kill(node)
        self.nodes.append(node)
        return node

    def kill(self, node: Node) -> None:
        node.process.kill()
        self.simulated.disconnect(node.process.name)
        self.simulated.forget(node.process.name)

    @property
    def leading_node(self) -> Node | None:
        return next((node for node in self.nodes if not node.process.stopped and leads(node.master)), None)

    async def ask(self, invoke: Callable[[ClusterMaster], Awaitable[Any]]) -> Any:
        node = self.leading_node
        if node is None:
            raise NotLeader("nobody leads now")
        call = node.process.spawn(_answer(invoke, node.master))
        done, _ = await asyncio.wait([call], timeout=ANSWER_S)
        if not done:
            raise PeerError(f"{node.process.name} does not answer")
        answer = call.result()
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def insist(self, invoke: Callable[[ClusterMaster], Awaitable[Any]]) -> Any:
        """As a user who repeats a request until it is answered."""
        while True:
            try:
                return await self.ask(invoke)
            except PeerError:
                await asyncio.sleep(0.2)

    async def standing(self, name: str) -> Standing | None:
        found = await self.job(name)
        return found.standing if found else None

    async def records_done(self, name: str) -> int:
        """Of a COMPLETED job, as it says itself."""
        key = self.keys.keys_of(name).state
        found = await self.etcd.get(key)
        return JobState.model_validate_json(found.value).result.trained_records if found else 0

    async def until_standing(self, name: str, *wanted: Standing, limit_s: float = 300.0) -> None:
        try:
            async with asyncio.timeout(limit_s):
                while await self.standing(name) not in wanted:
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise AssertionError(
                f"{name} is {await self.standing(name)} after {limit_s} s, not {wanted}"
            ) from None

    async def until_idle(self, limit_s: float = 60.0) -> None:
        """Nothing is assigned, nothing runs."""

        def idle() -> bool:
            node = self.leading_node
            if node is None:
                return False
            state = node.master.state
            return not (
                state.assignments or node.master.term.jobs or any(m.running for m in state.members.values())
            )

        await until(idle, "all members to be idle", limit_s)

    async def end(self) -> None:
        await unwind(self.simulated, [*(node.process for node in self.nodes), *self.others])

    # ---------------------------------------------------------------- what must hold

    def check_history(self) -> list[str]:
        """Broken promises, as sentences."""
        broken: list[str] = []
        jobs: dict[str, ClusterJob] = {}
        task_runs: dict[str, TaskRun] = {}
        running: dict[str, tuple[str, int]] = {}  # job, and since which revision
        for event in self.simulated.events():
            key, put = event.kv.key, event.type == "put"
            if key.startswith(self.keys.jobs) and not self.keys.is_job(key):
                run = TaskRun.model_validate_json(event.kv.value) if put else None
                broken += _wrong_run(task_runs.get(key), run)
                _set(task_runs, key, run)
            elif key.startswith(self.keys.jobs):
                broken += _wrong_job(
                    jobs.get(key), ClusterJob.model_validate_json(event.kv.value) if put else None
                )
                _set(jobs, key, ClusterJob.model_validate_json(event.kv.value) if put else None)
            elif (place := self.keys.member_of(key)) is not None:
                kind, member, is_assignment = place
                own = self.keys.member(kind, member)
                if not is_assignment:
                    runs = PoolMember.model_validate_json(event.kv.value).running if put else ""
                    running[own] = (runs, event.kv.mod_revision)
                    continue
                now = Assignment.model_validate_json(event.kv.value) if put else None
                job, since = running.get(own, ("", 0))
                heard = job if event.kv.mod_revision - since > UNHEARD else ""
                broken += _wrong_assignment(own, now, heard, jobs, task_runs, self.keys)
        done = Counter(self.taken)
        broken += [
            f"task {task} of {job} was completed {n} times" for (job, _, task), n in done.items() if n > 1
        ]
        return broken


async def unwind(simulated: SimulatedEtcd, processes: Sequence[Process]) -> None:
    """Kill all processes, then unwind their coroutines where it can have no effect any more."""
    for process in processes:
        simulated.cut(process.name)
        process.kill()
    for process in processes:
        process.dead = False
        process.release()
    for _ in range(UNWINDING_ROUNDS):
        await asyncio.sleep(0)
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=10.0)


async def _answer(invoke: Callable[[ClusterMaster], Awaitable[Any]], master: ClusterMaster) -> Any:
    try:
        return await invoke(master)
    except Exception as error:  # raised where the caller is
        return error


def _set(known: dict[str, Any], key: str, value: Any) -> None:
    if value is None:
        known.pop(key, None)
    else:
        known[key] = value


def _wrong_job(before: ClusterJob | None, now: ClusterJob | None) -> list[str]:
    if now is None:
        return (
            [f"job {before.job} was deleted as {before.standing}"]
            if before and not before.standing.final
            else []
        )
    if before is None:
        return [] if now.standing is Standing.QUEUED else [f"job {now.job} appeared as {now.standing}"]
    if now.standing not in NEXT[before.standing]:
        return [f"job {now.job} went from {before.standing} to {now.standing}"]
    starts = before.standing is Standing.QUEUED and now.standing is Standing.ACTIVE
    if now.epoch != before.epoch + starts or now.number != before.number:
        return [f"job {now.job} went from epoch {before.epoch} to {now.epoch} as it became {now.standing}"]
    return []


def _wrong_run(before: TaskRun | None, now: TaskRun | None) -> list[str]:
    """A success is for good, and attempts are counted one by one."""
    if before is None or now is None:
        return []
    if before.state is TaskState.SUCCEEDED:
        return [f"{now.name} of {now.job} succeeded, and is {now.state} afterwards"]
    starts = now.state is TaskState.RUNNING
    if now.attempt != before.attempt + starts:
        return [
            (
                f"{now.name} of {now.job} went from attempt {before.attempt} to {now.attempt} as it "
                f"became {now.state}"
            )
        ]
    return []


def _wrong_assignment(
    place: str,
    now: Assignment | None,
    running: str,
    jobs: dict[str, ClusterJob],
    runs: dict[str, TaskRun],
    keys: ClusterKeys,
) -> list[str]:
    if now is None:
        return []
    prefix = keys.jobs
    if now.task:
        run = runs.get(keys.task_run(now.job, now.task))
        if run is None or (run.state, run.attempt, f"/{run.member}") != (
            TaskState.RUNNING,
            now.attempt,
            place[-len(run.member) - 1 :],
        ):
            return [f"{place} is given attempt {now.attempt} of {now.task} of {now.job}, which is {run}"]
        return []
    before = (
        [name for name in jobs[prefix + now.job].spec.named_tasks if name.startswith("pre-")]
        if prefix + now.job in jobs
        else []
    )
    if early := [name for name in before if not _succeeded(runs.get(keys.task_run(now.job, name)))]:
        return [f"{place} is given to {now.job} before its {early[0]} has succeeded"]
    if running not in ("", now.job):
        return [f"{place} is given to {now.job} while it runs {running}"]
    job = jobs.get(prefix + now.job)
    if job is None or job.standing is not Standing.ACTIVE or job.epoch != now.epoch:
        return [
            (
                f"{place} is given to {now.job} of epoch {now.epoch}, which is "
                f"{job.standing if job else 'deleted'}"
            )
        ]
    return []


def _succeeded(run: TaskRun | None) -> bool:
    return run is not None and run.state is TaskState.SUCCEEDED
