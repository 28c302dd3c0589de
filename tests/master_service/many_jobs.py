"""Cluster masters on a simulated etcd in virtual time, and host agents whose processes are keys and calls
only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

from master_service.cluster.leader import ClusterMaster
from master_service.core.decisions.requests import AnsweredBefore, Keyed, Once
from tests.equipment.etcd.simulated import SimulatedEtcd
from tests.equipment.waiting import until
from tests.master_service.cluster import Storage, spec_of
from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.etcd.reading import read_record
from trireme_shared.platform.runtime import clock, ids
from trireme_shared.protocol.errors import NotLeader, PeerError, TriremeError
from trireme_shared.protocol.keys import ClusterKeys, Keys
from trireme_shared.protocol.records import (
    AcquireTask,
    CompleteTask,
    JobSpec,
    Phase,
    PserverMember,
    TrainerMember,
)
from trireme_shared.protocol.records.cluster import Assignment, ClusterJob, Kind, PoolMember, Scheduling
from trireme_shared.protocol.records.job import JobState

ROOT = "trireme"


def job_of(name: str, scheduling: dict[str, Any] | None = None, **values: Any) -> ClusterJob:
    spec: JobSpec = spec_of(job=name, storage=f"memory://{name}", **values)
    return ClusterJob(job=name, spec=spec, scheduling=Scheduling(**scheduling or {}))


async def create_once(leader: ClusterMaster, job: ClusterJob) -> None:
    """As POST /v1/jobs with an Idempotency-Key, the job's name: a repetition after a lost answer is no
    conflict."""
    keyed = Keyed(job.job, job.job, "createJob", clock.wall_time())
    with suppress(AnsweredBefore):
        await leader.create_job(job, None, Once(keyed, lambda made: made))


class Jobs:
    """One etcd, any number of cluster masters and host agents. `task_s`: how long a task takes. `load_s`: how
    long a parameter server needs until it registers."""

    def __init__(self, *, tasks: int = 4, task_s: float = 0.1, load_s: float = 0.0, seed: int = 0) -> None:
        self.simulated = SimulatedEtcd()
        self.keys = ClusterKeys(ROOT)
        self.etcd = self.etcd_of("test")
        self.storage = Storage(tasks)
        self.task_s, self.load_s = task_s, load_s
        self.masters: list[ClusterMaster] = []
        self.taken: list[tuple[str, int, str]] = []  # job, epoch, task: what a trainer completed
        self.ran: list[tuple[str, str, int]] = []  # job, pre- or post-task, attempt: that ended
        self.exit_codes: dict[tuple[str, str], list[int]] = {}

    def etcd_of(self, client: str) -> Etcd:
        return Etcd(self.simulated.transport(client))

    def master(self, name: str = "m1", **values: Any) -> ClusterMaster:
        made = ClusterMaster(
            self.etcd_of(name),
            self.keys,
            name=ids.new_id(name),
            url=f"http://{name}",
            storage_url="memory://cluster",
            storage=lambda _: self.storage,
            probe=self._refuses,
            **values,
        )
        self.masters.append(made)
        return made

    async def _refuses(self, _: str) -> bool:
        return False

    @property
    def leader(self) -> ClusterMaster | None:
        """Who leads now."""
        return next((master for master in self.masters if leads(master)), None)

    async def ask(self, invoke: Callable[[ClusterMaster], Awaitable[Any]]) -> Any:
        """A request to the one that leads now. Raises NotLeader, and what it raises."""
        leader = self.leader
        if leader is None:
            raise NotLeader("nobody leads now")
        return await invoke(leader)

    @asynccontextmanager
    async def leading(self, name: str = "m1", **values: Any) -> AsyncIterator[ClusterMaster]:
        master, stopping = self.master(name, **values), asyncio.Event()
        running = asyncio.ensure_future(master.run(stopping))
        try:
            await until(lambda: running.done() or leads(master), f"{master} to lead")
            yield master
        finally:
            stopping.set()
            await running

    @asynccontextmanager
    async def pool(self, trainers: int, pservers: int) -> AsyncIterator[list[Place]]:
        places = [Place(self, "trainer", f"t{number}") for number in range(trainers)]
        places += [Place(self, "pserver", f"p{number}") for number in range(pservers)]
        running = [asyncio.ensure_future(place.run()) for place in places]
        try:
            yield places
        finally:
            for task in running:
                task.cancel()
            await asyncio.wait(running)

    async def job(self, name: str) -> ClusterJob | None:
        """As etcd has it."""
        found = await self.etcd.get(self.keys.job(name))
        return read_record(ClusterJob, found.key, found.value) if found else None


def leads(master: ClusterMaster) -> bool:
    return master.current_term is not None and master.current_term.lock.lease.alive


async def _acquire(leader: ClusterMaster, job: str, trainer: str, request: str) -> Any:
    master = leader.find(job)
    ask = AcquireTask(trainer=trainer, request=request, generation=master.job.state.generation)
    return await master.acquire_task(ask)


class Place:
    """A place of a host agent, and the process that it runs: a trainer that takes tasks, or a parameter
    server that is a key."""

    def __init__(self, jobs: Jobs, kind: Kind, name: str) -> None:
        self._jobs, self.kind, self.name = jobs, kind, name
        self.etcd = jobs.etcd_of(name)
        self.member = PoolMember(
            member=name, kind=kind, host="h", agent="a", pid=1, incarnation=ids.new_id(name)
        )
        self.history: list[tuple[str, int]] = []
        self._request = ids.new_id("r")  # asked again after a lost answer, so that the same task comes

    async def run(self) -> None:
        keys, lease = self._jobs.keys, await self.etcd.grant(3600)
        key = keys.member(self.kind, self.name)
        await self.etcd.put(key, self.member.to_bytes(), lease.id)
        child: asyncio.Task[None] | None = None
        now: tuple[str, int, str, int] | None = None
        try:
            async for wanted in self._assignments():
                start = (wanted.job, wanted.epoch, wanted.task, wanted.attempt) if wanted else None
                if start == now:
                    continue
                if child is not None:
                    child.cancel()
                    await asyncio.wait([child])
                    await asyncio.sleep(0.05)
                child, now = None, start
                self._note(start or ("", 0, "", 0))
                await self.etcd.put(key, self.member.to_bytes(), lease.id)
                if wanted is not None and wanted.task:
                    child = asyncio.ensure_future(self._run_task(wanted, key, lease.id))
                elif wanted is not None:
                    self.history.append((wanted.job, wanted.epoch))
                    serve = self._train if self.kind == "trainer" else self._serve
                    child = asyncio.ensure_future(serve(wanted.job, wanted.epoch))
        finally:
            if child is not None:
                child.cancel()

    async def _assignments(self) -> AsyncIterator[Assignment | None]:
        watched = self._jobs.keys.assignment(self.kind, self.name)
        async with aclosing(self.etcd.watch(watched)) as batches:
            async for batch in batches:
                values = [kv.value for kv in batch.kvs] if batch.reset else []
                values += [event.kv.value if event.type == "put" else b"" for event in batch.events]
                found = read_record(Assignment, watched, values[-1]) if values and values[-1] else None
                yield found if found is None or found.incarnation in ("", self.member.incarnation) else None

    def _note(self, start: tuple[str, int, str, int]) -> None:
        job, epoch, task, attempt = start
        now = {
            "running": job,
            "epoch": epoch,
            "task": task,
            "attempt": attempt,
            "ended": False,
            "exit_code": None,
        }
        self.member = self.member.model_copy(update=now)

    async def _run_task(self, work: Assignment, key: str, lease: int) -> None:
        """One attempt. Its exit code is the next one of `exit_codes`, then 0."""
        await asyncio.sleep(self._jobs.task_s)
        self._jobs.ran.append((work.job, work.task, work.attempt))
        codes = self._jobs.exit_codes.get((work.job, work.task), [])
        told = {"ended": True, "exit_code": codes.pop(0) if codes else 0, "output": f"attempt {work.attempt}"}
        self.member = self.member.model_copy(update=told)
        await self.etcd.put(key, self.member.to_bytes(), lease)

    async def _serve(self, job: str, epoch: int) -> None:
        """As a pserver: the lowest free index; parameters are there at once."""
        if self._jobs.load_s:
            await asyncio.sleep(self._jobs.load_s)
        keys, lease = Keys(job, ROOT), await self.etcd.grant(3600)
        try:
            index = 0
            while True:
                record = PserverMember(
                    index=index,
                    url=f"http://{self.name}",
                    incarnation=f"{self.name}-{epoch}",
                    host="h",
                    pid=1,
                    lease=lease.id,
                )
                if await self.etcd.get(keys.pserver(index)) is None:
                    await self.etcd.put(keys.pserver(index), record.to_bytes(), lease.id)
                    break
                index += 1
            await self.etcd.put(keys.layout, b"{}")
            await self.etcd.put(keys.init_done, b"done")
            await asyncio.Event().wait()
        finally:
            await asyncio.shield(asyncio.ensure_future(lease.revoke()))

    async def _train(self, job: str, epoch: int) -> None:
        keys, lease = Keys(job, ROOT), await self.etcd.grant(3600)
        name = f"{self.name}-{epoch}"
        record = TrainerMember(
            trainer=name, url=f"http://{name}", incarnation=name, host="h", pid=1, lease=lease.id
        )
        try:
            await self.etcd.put(keys.trainer(name), record.to_bytes(), lease.id)
            while not await self._over(keys):
                await self._work(job, name)
        finally:
            await asyncio.shield(asyncio.ensure_future(lease.revoke()))

    async def _over(self, keys: Keys) -> bool:
        found = await self.etcd.get(keys.state)
        state = read_record(JobState, found.key, found.value) if found else None
        return state is not None and state.phase in (Phase.COMPLETED, Phase.FAILED)

    async def _work(self, job: str, trainer: str) -> None:
        """One task, or a moment."""
        try:
            task = (await self._jobs.ask(lambda leader: _acquire(leader, job, trainer, self._request))).task
            if task is None:
                await asyncio.sleep(0.05)
                return
            self._request = ids.new_id("r")
            await asyncio.sleep(self._jobs.task_s)
            report = CompleteTask(trainer=trainer, attempt=task.attempt, epoch=task.epoch)
            while not await self._told(lambda leader: leader.find(job).complete_task(task.task_id, report)):
                await asyncio.sleep(0.05)
            self._jobs.taken.append((job, task.epoch, task.task_id))
        except TriremeError:
            await asyncio.sleep(0.05)

    async def _told(self, report: Callable[[ClusterMaster], Awaitable[Any]]) -> bool:
        """Whether there was an answer."""
        try:
            await self._jobs.ask(report)
        except PeerError:
            return False
        return True
