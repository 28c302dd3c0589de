"""Real parameter servers, a real etcd and a real disk; the test is master and trainer.

Some die at random moments while they checkpoint every step; one sleeps (SIGSTOP) until another has its place,
and wakes.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from pathlib import Path

import pytest

from tests.equipment.etcd.real import embedded_etcd
from tests.pserver_service.checkpoints import parts
from tests.pserver_service.checkpoints.cluster import stream
from trainer_agent.data_plane.stream import StreamPserver
from trireme.launch.processes import PYTHON_MODULE, ForkServer, Process, inherited_environment
from trireme_shared.checkpoints import stored
from trireme_shared.platform.etcd import Etcd, Put, connect
from trireme_shared.platform.runtime.service import LEASE_LOST
from trireme_shared.platform.storage.files import TEMPORARY
from trireme_shared.protocol.errors import CheckpointUnusable, NotReady, PeerError
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import JobSpec, JobState, Phase, PserverMember
from trireme_shared.protocol.records.checkpoints import CheckpointLatest
from trireme_shared.protocol.wire.messages import InitBlock, PushAnswer, PushBlock, PushHeader

__all__ = ["embedded_etcd"]
pytestmark = pytest.mark.processes

KEYS = Keys(parts.JOB)
TTL_S = 2.0
TOKEN = "boat"
LAYOUT = parts.layout_of(elements=600)
WAIT_S = 40.0


class Job:
    """Two places, and processes that take them."""

    def __init__(self, etcd: Etcd, url: str, storage: Path, forks: ForkServer) -> None:
        self.etcd, self.url, self.storage, self.forks = etcd, url, str(storage / "job"), forks
        self.logs = storage / "logs"
        self.logs.mkdir()
        self.state = JobState(phase=Phase.RUNNING, generation=1)
        self.processes: list[Process] = []

    async def start(self, count: int) -> None:
        environment = inherited_environment()
        environment |= {"TRIREME_JOB": parts.JOB, "TRIREME_ETCD": self.url, "TRIREME_TOKEN": TOKEN}
        for _ in range(count):
            with (self.logs / str(len(self.processes))).open("wb") as log:
                command = (*PYTHON_MODULE, "pserver_service")
                self.processes.append(await self.forks.start(command, environment, log, log))

    def log_of(self, process: Process) -> bytes:
        return (self.logs / str(self.processes.index(process))).read_bytes()

    def process_of(self, member: PserverMember) -> Process:
        return next(process for process in self.processes if process.pid == member.pid)

    async def members(self) -> dict[int, PserverMember]:
        found = await self.etcd.range(KEYS.pservers, prefix=True)
        members = [PserverMember.model_validate_json(kv.value) for kv in found.kvs]
        return {member.index: member for member in members}

    async def open(self) -> None:
        spec = JobSpec(
            job=parts.JOB,
            script="s.py",
            dataset={"kind": "text_lines", "urls": ("-",)},
            lanes=parts.LANES,
            global_batch_size=4,
            pservers=2,
            storage=self.storage,
            lease_ttl_s=TTL_S,
            checkpoint_every_steps=1,
            epochs=99,
        )
        await self.etcd.put(KEYS.spec, spec.to_bytes())
        await self.etcd.put(KEYS.pservers_desired, b"2")
        await self.write(self.state)
        members, values = await self.whole(), parts.initial(LAYOUT)
        for index, member in members.items():
            numbers = parts.blocks_of(LAYOUT, index, parts.slot_map(2))
            async with StreamPserver(member, TOKEN) as pserver:
                items = [(InitBlock(block=n), parts.bytes_view(values[n])) for n in numbers]
                await pserver.init(parts.header_of(LAYOUT, index), stream(items))
        await self.etcd.put(KEYS.layout, LAYOUT.to_bytes())
        await self.latest_is(lambda latest: latest.step == 0)

    async def write(self, state: JobState) -> None:
        self.state = state
        slots, listed = parts.slot_map(2), parts.listed(KEYS, state.generation, (parts.TRAINER,))
        await self.etcd.txn(
            [], [Put(KEYS.state, state.to_bytes()), Put(KEYS.slots, slots.to_bytes()), *listed]
        )

    async def whole(self, without: frozenset[str] = frozenset()) -> dict[int, PserverMember]:
        """Who has the two places, nobody of `without`."""
        async with asyncio.timeout(WAIT_S):
            while True:
                members = await self.members()
                if len(members) == 2 and not without & {member.incarnation for member in members.values()}:
                    return members
                await asyncio.sleep(0.05)

    async def latest(self) -> CheckpointLatest | None:
        found = await self.etcd.get(KEYS.latest)
        return CheckpointLatest.model_validate_json(found.value) if found else None

    async def latest_is(self, wanted) -> CheckpointLatest:
        async with asyncio.timeout(WAIT_S):
            while (latest := await self.latest()) is None or not wanted(latest):
                await asyncio.sleep(0.02)
        return latest

    async def tree(self) -> list[tuple[str, bytes]]:
        return [(kv.key, kv.value) for kv in (await self.etcd.range(KEYS.prefix, prefix=True)).kvs]

    async def no_locks(self) -> None:
        """Whoever committed is done with it."""
        async with asyncio.timeout(WAIT_S):
            while await self.etcd.get(KEYS.finish_lock) is not None:
                await asyncio.sleep(0.02)

    def verify(self, latest: CheckpointLatest) -> None:
        """All that is kept loads, whole and of one step."""
        for ref in latest.kept:
            manifest = stored.read_manifest(self.storage, parts.JOB, ref)
            stored.verify_parts(self.storage, ref, manifest)
            assert manifest.record.version == ref.step

    async def verified(self) -> CheckpointLatest:
        """All that is kept now loads; whoever lives may commit a newer checkpoint meanwhile, and delete what
        that replaces."""
        while True:
            latest = await self.latest()
            try:
                self.verify(latest)
            except CheckpointUnusable:
                if await self.latest() == latest:
                    raise
            else:
                return latest

    def kept(self, latest: CheckpointLatest) -> set[str]:
        """The folders that nothing may appear in."""
        return {stored.folder(self.storage, ref.uuid) for ref in latest.kept}

    async def roll_back(self) -> int:
        """Everybody loads the latest; its step."""
        latest = await self.latest()
        assert latest is not None
        generation = self.state.generation + 1
        goal = {"generation": generation, "timeline": generation, "checkpoint": latest.uuid}
        await self.write(self.state.model_copy(update={"phase": Phase.ROLLING_BACK, **goal}))
        async with asyncio.timeout(WAIT_S):
            while True:
                said = [member.restored for member in (await self.members()).values()]
                if len(said) == 2 and all(
                    r and (r.timeline, r.checkpoint) == (generation, latest.uuid) for r in said
                ):
                    break
                await asyncio.sleep(0.05)
        assert not any(restored.superseded or restored.error for restored in said)
        await self.write(self.state.model_copy(update={"phase": Phase.RUNNING, "generation": generation + 1}))
        return latest.step

    async def push(self, member: PserverMember, step: int, generation: int) -> int:
        """A step's gradients; how many blocks took them. Raises PeerError."""
        applied = 0
        async with StreamPserver(member, TOKEN, stall_s=5.0) as pserver:
            for lane in range(parts.LANES):
                gradients = parts.gradient(LAYOUT, step, lane)
                numbers = parts.blocks_of(LAYOUT, member.index, parts.slot_map(2))
                items = [
                    (PushBlock(block=n, lanes=(lane, lane + 1), count=1), parts.bytes_view(gradients[n]))
                    for n in numbers
                ]
                header = parts.push_header(step, lane, generation=generation)
                applied += (await self._answer(pserver, header, items)).applied
        return applied

    async def _answer(self, pserver: StreamPserver, header: PushHeader, items: list) -> PushAnswer:
        """Again while the parameter server has not read the generation from etcd yet."""
        async with asyncio.timeout(WAIT_S):
            while True:
                try:
                    return await pserver.push(header, stream(items))
                except NotReady as error:
                    if "ahead of" not in error.message:
                        raise
                await asyncio.sleep(0.02)

    async def train(self, first: int) -> None:
        """Until somebody is gone."""
        with contextlib.suppress(PeerError):
            members = await self.members()
            for step in range(first, first + 1000):
                for member in members.values():
                    await self.push(member, step, self.state.generation)

    async def close(self) -> None:
        for process in self.processes:
            if process.returncode is None:
                process.send_signal(signal.SIGKILL)
            await process.wait()


@contextlib.asynccontextmanager
async def job_at(url: str, folder: Path):
    etcd = connect([url])
    with ForkServer() as forks:
        job = Job(etcd, url, folder, forks)
        try:
            await job.start(2)
            await job.open()
            yield job
        finally:
            await job.close()
            await etcd.close()


async def killed_while_checkpointing(job: Job, victims: tuple[int, ...], after_s: float) -> int:
    """The step the job goes on from, with others in the places of the `victims`."""
    before = await job.latest()
    training = asyncio.ensure_future(job.train(before.step))
    await job.latest_is(lambda latest: (latest.timeline, latest.step) > (before.timeline, before.step))
    await asyncio.sleep(after_s)
    members = await job.members()
    for index in victims:
        job.process_of(members[index]).send_signal(signal.SIGKILL)
        # as the master does when the launcher sees its child exit
        await job.etcd.revoke(members[index].lease)
    await training
    await job.start(len(victims))
    latest = await job.verified()
    assert (latest.timeline, latest.step) >= (before.timeline, before.step)
    await job.whole(frozenset(members[index].incarnation for index in victims))
    return await job.roll_back()


def published(storage: Path) -> dict[Path, int]:
    """Files under their own names, and when they were written last."""
    return {
        path: path.stat().st_mtime_ns for path in storage.rglob("*.*") if not path.name.endswith(TEMPORARY)
    }


async def stopped_until_replaced(job: Job) -> None:
    """It wakes, leaves, and has changed nothing."""
    storage = Path(job.storage)
    training = asyncio.ensure_future(job.train((await job.latest()).step))
    await asyncio.sleep(0.2)
    before = await job.members()
    sleeper = job.process_of(before[0])
    sleeper.send_signal(signal.SIGSTOP)
    await job.start(1)
    members = await job.whole(frozenset([before[0].incarnation]))
    training.cancel()
    await asyncio.wait([training])
    step, generation = await job.roll_back(), job.state.generation
    for member in members.values():
        assert await job.push(member, step, generation) > 0
    newest = await job.latest_is(
        lambda latest: (latest.timeline, latest.step) == (job.state.timeline, step + 1)
    )
    await job.no_locks()
    tree, files = await job.tree(), published(storage)

    sleeper.send_signal(signal.SIGCONT)
    async with asyncio.timeout(WAIT_S):
        await sleeper.wait()
    log = job.log_of(sleeper)
    assert sleeper.returncode == LEASE_LOST, log
    assert b"key_lost" in log
    with pytest.raises(PeerError):
        await job.push(before[0], step + 1, generation)
    assert await job.tree() == tree
    found = published(storage)
    assert files.items() <= found.items()
    # what it was just publishing when it was stopped may appear: a part of a checkpoint that will never be,
    # or a manifest
    others = [path for path in found.keys() - files.keys() if not path.name.startswith("manifest-")]
    assert not job.kept(newest) & {str(path.parent) for path in others}
    named = {ref.manifest for ref in newest.kept}
    assert not named & {path.name for path in found.keys() - files.keys()}
    job.verify(newest)


@pytest.mark.timeout(180)
async def test_whatever_moment_a_pserver_is_killed_or_stopped_at_latest_loads_and_never_gets_older(
    embedded_etcd, tmp_path
):
    seed = random.randrange(10**6)
    print("seed", seed)  # noqa: T201  shown when it fails
    rng = random.Random(seed)
    async with job_at(embedded_etcd.url, tmp_path) as job:
        deaths = [(rng.randrange(2),), (0, 1)]
        steps = [await killed_while_checkpointing(job, victims, rng.uniform(0.0, 0.3)) for victims in deaths]
        assert 0 < steps[0] < steps[1]
        await stopped_until_replaced(job)
