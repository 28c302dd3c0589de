"""Host agents as real processes on a real etcd, and what their places say."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import psutil

from tests.end_to_end.local_cluster import slowable_loss
from tests.end_to_end.scripts import write_script
from tests.equipment.forked import MARK, ForkedProcess, clean_environment, warm_server
from trireme_shared.platform.etcd import Etcd
from trireme_shared.protocol.keys import ClusterKeys, Keys
from trireme_shared.protocol.records import JobSpec, JobState
from trireme_shared.protocol.records.cluster import Assignment, PoolMember, Source
from trireme_shared.protocol.records.datasets import Npy

KEYS = ClusterKeys()
LIMIT_S = 60.0
SLOW_S = 0.05


class Host:
    """A host agent's process, in a folder of its own."""

    def __init__(
        self, folder: Path, etcd: Etcd, url: str, mark: str, name: str = "h", **settings: object
    ) -> None:
        self.folder, self.etcd, self.name = folder, etcd, name
        self.process: ForkedProcess | None = None
        given = {
            "etcd": url,
            "name": name,
            "data_dir": folder,
            "trainers": 2,
            "pservers": 1,
            "drain_seconds": 5,
        }
        self.environment = clean_environment() | {MARK: mark}
        self.environment |= {
            f"TRIREME_{key.upper()}": str(value) for key, value in (given | settings).items()
        }

    async def start(self) -> None:
        with (self.folder.parent / f"{self.name}.log").open("ab") as log:
            place = self.folder.parent
            self.process = warm_server().start(
                "trireme.host", (), place, self.environment, log.fileno(), log.fileno()
            )

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def log(self) -> str:
        return (self.folder.parent / f"{self.name}.log").read_text()

    async def end(self, limit_s: float = LIMIT_S) -> int:
        assert self.process is not None
        return await asyncio.to_thread(self.process.wait, limit_s)

    async def member(self, kind: str, number: int = 0) -> PoolMember | None:
        found = await self.etcd.get(KEYS.member(kind, f"{self.name}-{kind}-{number}"))
        return PoolMember.model_validate_json(found.value) if found is not None else None

    async def when(self, kind: str, number: int, condition, what: str) -> PoolMember:
        """Its member key, as soon as the condition holds for it."""
        member = None
        try:
            async with asyncio.timeout(LIMIT_S):
                while True:
                    member = await self.member(kind, number)
                    if member is not None and condition(member):
                        return member
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"waited {LIMIT_S} s for {what}: {member!r}\n{self.log()}") from None

    async def registered(self, number: int = 0) -> PoolMember:
        return await self.when("trainer", number, lambda _: True, "the places to be registered")

    async def assign(self, kind: str, number: int, job: str, epoch: int) -> None:
        member = await self.when(kind, number, lambda _: True, "the place to be registered")
        assignment = Assignment(job=job, epoch=epoch, incarnation=member.incarnation)
        await self.etcd.put(KEYS.assignment(kind, member.member), assignment.to_bytes())

    async def assign_all(self, job: str, epoch: int) -> None:
        for kind, number in (("pserver", 0), ("trainer", 0), ("trainer", 1)):
            await self.assign(kind, number, job, epoch)

    async def unassign(self, kind: str, number: int) -> None:
        await self.etcd.delete(KEYS.assignment(kind, f"{self.name}-{kind}-{number}"))

    def children(self, ending: str = "") -> list[psutil.Process]:
        """The member processes of this agent whose title says that name (`[h-trainer-0]`)."""
        found = []
        with suppress(psutil.Error):
            for child in psutil.Process(self.pid).children():
                with suppress(psutil.Error):
                    line = " ".join(child.cmdline()).strip()
                    if line.endswith(f"{ending}]") and child.status() != psutil.STATUS_ZOMBIE:
                        found.append(child)
        return found

    async def child(self, kind: str, number: int, other_than: int = 0) -> psutil.Process:
        return await until_found(
            lambda: [each for each in self.children(f"{kind}-{number}") if each.pid != other_than],
            f"a process of {kind}-{number}",
            self.log,
        )


async def until_found(find, what: str, told=lambda: ""):
    """The first of what `find()` gives."""
    try:
        async with asyncio.timeout(LIMIT_S):
            while not (found := find()):
                await asyncio.sleep(0.02)
            return found[0]
    except TimeoutError:
        raise AssertionError(f"waited {LIMIT_S} s for {what}\n{told()}") from None


def family(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@contextmanager
def marked() -> Iterator[str]:
    """A mark in the environment of all processes of a test: nobody may be left who has it."""
    mark = uuid.uuid4().hex
    try:
        yield mark
    finally:
        for process in family(mark):
            with suppress(psutil.Error):
                process.kill()


def slow_file(folder: Path, job: str) -> Path:
    """Without it the job is not slow any more."""
    return folder / f"data-{job}" / "slow"


def job_in(folder: Path, name: str, **changes) -> tuple[JobSpec, Source]:
    """A job whose script lies nowhere but in etcd, and the data beside where it was written."""
    data = folder / f"data-{name}"
    data.mkdir()
    slow = slow_file(folder, name)
    slow.touch()
    script = write_script(data, loss=slowable_loss(slow, SLOW_S))
    source = Source(file_name="script.py", text=script.read_text())
    script.unlink()
    settings = {
        "job": name,
        "script": source.script,
        "dataset": Npy(str(data / "x.npy"), str(data / "y.npy"), aligned=True),
        "storage": str(folder / f"storage-{name}"),
        "epochs": 2,
        "global_batch_size": 32,
        "lanes": 4,
        "seed": 3,
        "records_per_task": 16,
        "block_bytes": 256,
        "trainers": 2,
        "pservers": 1,
        "lease_ttl_s": 3.0,
    }
    return JobSpec.model_validate({**settings, **changes}), source


@asynccontextmanager
async def led(
    spec: JobSpec, source: Source, etcd: Etcd, url: str, mark: str, folder: Path
) -> AsyncIterator[None]:
    """A master process of its own for the job."""
    await etcd.put(KEYS.source(source.digest), source.to_bytes())
    path = folder / f"{spec.job}.json"
    path.write_bytes(spec.to_bytes())
    settings = {"TRIREME_JOB": spec.job, "TRIREME_ETCD": url, "TRIREME_SPEC": str(path), MARK: mark}
    with (folder / f"master-{spec.job}.log").open("wb") as log:
        environment = clean_environment() | settings
        master = warm_server().start("master_service", (), folder, environment, log.fileno(), log.fileno())
    try:
        yield
    finally:
        master.kill()
        master.wait(LIMIT_S)


async def state_of(etcd: Etcd, job: str) -> JobState | None:
    found = await etcd.get(Keys(job).state)
    return JobState.model_validate_json(found.value) if found is not None else None


async def final_state(etcd: Etcd, job: str) -> JobState:
    async with asyncio.timeout(LIMIT_S):
        while True:
            state = await state_of(etcd, job)
            if state is not None and state.phase.final:
                return state
            await asyncio.sleep(0.05)


async def training(etcd: Etcd, job: str) -> None:
    async with asyncio.timeout(LIMIT_S):
        while (state := await state_of(etcd, job)) is None or state.phase != "RUNNING":
            await asyncio.sleep(0.05)
