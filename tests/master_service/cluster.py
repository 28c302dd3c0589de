"""Masters on a simulated etcd in virtual time, and the pieces they are made of."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from master_service.core.queue.file_table import FileTable, TableFile, TaskSizes
from master_service.leadership.master import Master
from master_service.storage.series_files import SeriesFiles
from tests.equipment.cluster.cluster import Cluster
from tests.equipment.queue_violations import violations
from tests.equipment.virtual_loop import VirtualLoop
from tests.equipment.waiting import until
from trireme_shared.platform.etcd import KeyValue
from trireme_shared.platform.runtime import ids
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import (
    AcquireTask,
    CompleteTask,
    JobSpec,
    JobState,
    Mode,
    PserverMember,
    Restored,
    Stage,
    Task,
    TrainerMember,
)
from trireme_shared.protocol.records.checkpoints import CheckpointRef, Manifest
from trireme_shared.protocol.records.datasets import Dataset, TextLines

KEYS = Keys("j")


def spec_of(**values: Any) -> JobSpec:
    defaults: dict[str, Any] = {
        "job": "j",
        "script": "train.py",
        "dataset": TextLines("train.txt"),
        "mode": Mode.ASYNC,
        "lanes": 4,
        "global_batch_size": 8,
        "records_per_task": 10,
        "pservers": 1,
        "storage": "memory://j",
        "max_discarded_fraction": 1.0,
    }
    chosen = defaults | values
    if chosen["mode"] == Mode.ASYNC:  # members that are mere keys do not answer a pause
        chosen = {"checkpoint_kind": "independent", **chosen}
    return JobSpec(**chosen)


def table_of(tasks: int, task_records: int = 10, digest: str = "digest") -> FileTable:
    return FileTable((TableFile("train.txt", tasks * task_records),), task_records, digest)


class Storage:
    """A job's storage in memory: `tasks` tasks in every dataset, `manifests` by uuid (an exception is
    raised)."""

    def __init__(self, tasks: int = 10, error: Exception | None = None) -> None:
        self.tasks, self.error = tasks, error
        self.manifests: dict[str, Manifest | Exception] = {}
        self.series: SeriesFiles | None = None

    async def count(self, source: Dataset, sizes: TaskSizes) -> FileTable:
        if self.error:
            raise self.error
        return table_of(self.tasks, sizes.fixed or 16 * sizes.minibatch, f"digest of {source.urls[0]}")

    async def load_table(self, digest: str) -> FileTable:
        return table_of(self.tasks, 10, digest)

    async def script_folder(self) -> Path:
        return Path("/nowhere")

    async def read_manifest(self, ref: CheckpointRef) -> Manifest:
        await asyncio.sleep(0.01)
        found = self.manifests[ref.uuid]
        if isinstance(found, Exception):
            raise found
        return found

    async def verify(self, ref: CheckpointRef) -> None:
        await self.read_manifest(ref)


class MasterCluster(Cluster):
    """Any number of masters; members are keys in etcd only. `dead`: urls that refuse connections."""

    def __init__(self, spec: JobSpec, storage: Storage | None = None) -> None:
        super().__init__(spec)
        self.storage = storage or Storage()
        self.dead: set[str] = set()
        self.leases: dict[str, int] = {}
        self.ttl_s: float | None = None  # of masters
        self._requests = 0

    def master_options(self) -> dict[str, Any]:
        """In real time a busy machine may hold the process up for seconds: no lease ends then."""
        ttl_s = 3.0 if isinstance(asyncio.get_running_loop(), VirtualLoop) else 30.0
        return {"storage": lambda _: self.storage, "probe": self._refuses, "ttl_s": self.ttl_s or ttl_s}

    async def _refuses(self, url: str) -> bool:
        return url in self.dead

    def master(self, name: str = "m1", kind: type[Master] = Master) -> Master:
        master: Master = self.make_master(name, ids.new_id(name), f"http://{name}", kind)
        return master

    async def add_trainer(self, trainer: str) -> None:
        lease = (await self.etcd.grant(3600)).id
        self.leases[trainer] = lease
        member = TrainerMember(
            trainer=trainer, url=f"http://{trainer}", incarnation=trainer, host="h", pid=1, lease=lease
        )
        await self.etcd.put(KEYS.trainer(trainer), member.to_bytes(), lease)

    async def add_pserver(self, index: int, restored: Restored | None = None) -> None:
        lease = (await self.etcd.grant(3600)).id
        self.leases[f"pserver-{index}"] = lease
        url = f"http://pserver-{index}"
        member = PserverMember(
            index=index, url=url, incarnation=f"ps-{lease}", host="h", pid=1, lease=lease, restored=restored
        )
        await self.etcd.put(KEYS.pserver(index), member.to_bytes(), lease)

    async def restore(self, index: int, state: JobState, error: str = "") -> None:
        """The pserver says that it has the checkpoint's parameters, or why not."""
        key = KEYS.pserver(index)
        found = await self.etcd.get(key)
        assert found is not None
        said = Restored(timeline=state.timeline, checkpoint=state.checkpoint, error=error)
        member = self.pserver_in(found).model_copy(update={"restored": said})
        await self.etcd.put(key, member.to_bytes(), found.lease)

    async def say(self, trainer: str, **says: Any) -> None:
        """Collective: the trainer says what it has (`holds`), or another field of its record."""
        found = await self.etcd.get(KEYS.trainer(trainer))
        assert found is not None
        member = TrainerMember.model_validate_json(found.value).model_copy(update=says)
        await self.etcd.put(KEYS.trainer(trainer), member.to_bytes(), found.lease)

    @staticmethod
    def pserver_in(found: KeyValue) -> PserverMember:
        return PserverMember.model_validate_json(found.value)

    async def lose(self, member: str) -> None:
        await self.etcd.revoke(self.leases.pop(member))

    async def initialise(self, *trainers: str) -> None:
        """Everything a job needs to run."""
        for index in range(self.spec.pservers):
            await self.add_pserver(index)
        for trainer in trainers:
            await self.add_trainer(trainer)
        await self.etcd.put(KEYS.layout, b"{}")
        await self.etcd.put(KEYS.init_done, b"done")

    def ask(self, master: Master, trainer: str = "t1", **values: Any) -> AcquireTask:
        self._requests += 1
        defaults = {"request": f"r{self._requests}", "generation": master.job.state.generation}
        return AcquireTask(trainer=trainer, **(defaults | values))


def done(task: Task, trainer: str = "t1", **values: Any) -> CompleteTask:
    return CompleteTask(trainer=trainer, attempt=task.attempt, epoch=task.epoch, **values)


@asynccontextmanager
async def leading(master: Master) -> AsyncIterator[Master]:
    """The master runs, and leads once the block is entered; it is stopped at the end."""
    stopping = asyncio.Event()
    running = asyncio.ensure_future(master.run(stopping))
    try:
        await until(lambda: running.done() or master.current_term is not None, f"{master} to lead")
        yield master
    finally:
        stopping.set()
        await running


@asynccontextmanager
async def running(cluster: MasterCluster, *trainers: str) -> AsyncIterator[Master]:
    """A master of a job that is RUNNING with these trainers."""
    async with leading(cluster.master()) as master:
        await cluster.initialise(*trainers)
        await until(lambda: set(master.job.trainers.names) == set(trainers), "the job to run")
        yield master
        term = master.current_term  # `master.job` would refuse once a busy machine let the lease run out
        for queue in term.job.queues.values() if term else ():
            assert list(violations(queue)) == []


async def take(cluster: MasterCluster, master: Master, trainer: str = "t1", **values: object) -> Task:
    answer = await master.acquire_task(cluster.ask(master, trainer, **values))
    assert answer.task is not None, answer
    return answer.task


async def finish_training(cluster: MasterCluster, master: Master, trainer: str = "t1") -> set[str]:
    finished: list[str] = []
    while master.job.state.stage is Stage.TRAIN:
        task = await take(cluster, master, trainer)
        await master.complete_task(task.task_id, done(task, trainer))
        finished.append(f"{task.epoch}/{task.task_id}")
    assert len(set(finished)) == len(finished)
    return set(finished)
