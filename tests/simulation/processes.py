"""What runs in each process: the product's compositions with the simulation's ports in place of HTTP, files and torch."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from master_service.core.queue.file_table import FileTable
from master_service.leadership.master import Master
from master_service.masterless.dispatcher import Dispatcher
from pserver_service.__main__ import INDEX_LOST
from pserver_service.core.blocks import Verdict
from pserver_service.core.store import Store
from pserver_service.data_plane.calls import Pushing
from pserver_service.member import Member
from pserver_service.membership.context import Surroundings
from pserver_service.membership.index import Registration
from pserver_service.pserver import Pserver
from shared.blocks.buffers import Buffer
from shared.checkpoints import stored
from shared.etcd import Etcd
from shared.membership.directory import Directory
from shared.records import Dispatch, JobSpec, PserverMember, TrainerMember
from shared.records.checkpoints import CheckpointRef, Manifest
from shared.records.datasets import Custom, Dataset
from shared.runtime import ids
from shared.wire.messages import PushBlock, PushHeader
from tests.equipment.cluster.network_ports import SimulatedMaster, SimulatedPserver
from tests.simulation.checkpoint_checker import STORAGE
from tests.simulation.compute import BLOCK_BYTES, Speed, TinyCompute
from tests.simulation.dataset import files_of
from tests.simulation.plans import Plan
from trainer_agent.agent import Agent
from trireme.view.spectator import Spectator

if TYPE_CHECKING:
    from tests.simulation.cluster import Seat, World

MASTER_TTL_S = 3.0
LEASE_TTL_S = 5.0
DRAIN_S = 10.0
MAX_FAILURES = 1000  # slowness must not discard records here: every record is trained
TASK_FLOOR_S, TASK_CEILING_S = 4.0, 8.0
TRAINING = Custom("training", reader="tests.simulation.dataset:reader")
EVALUATION = Custom("evaluation", reader="tests.simulation.dataset:reader")


def spec_of(plan: Plan) -> JobSpec:
    job = plan.job
    return JobSpec(
        job="simulated",
        script="simulated.py",
        dataset=TRAINING,
        evaluation_dataset=EVALUATION if plan.evaluate else None,
        mode=job.mode,
        dispatch=plan.dispatch,
        epochs=job.epochs,
        global_batch_size=job.minibatch * job.lanes,
        lanes=job.lanes,
        seed=job.seed,
        trainers=plan.trainers,
        pservers=plan.pservers,
        records_per_task=job.task_records,
        block_bytes=BLOCK_BYTES,
        slot_count=128,
        push_every=job.push_every,
        gradient_dtype=job.travels_as,
        parameter_dtype=job.travels_as,
        pull_every=plan.pull_every,
        storage=STORAGE,
        lease_ttl_s=LEASE_TTL_S,
        task_timeout_floor_s=TASK_FLOOR_S,
        task_timeout_ceiling_s=TASK_CEILING_S,
        max_task_failures=MAX_FAILURES,
        checkpoint_every_steps=plan.checkpoint_every,
        keep_checkpoints=plan.keep_checkpoints,
        checkpoint_every_seconds=plan.checkpoint_every_s,
        skip_after_seconds=plan.skip_after_s,
        checkpoint_kind="independent" if plan.independent else "coordinated",
    )


class MemoryManifests:
    """master_service.datasets.manifests.Manifests, without a thread."""

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec

    async def read(self, ref: CheckpointRef) -> Manifest:
        await asyncio.sleep(0.005)
        return stored.read_manifest(self._spec.storage, self._spec.job, ref)

    async def verify(self, ref: CheckpointRef) -> None:
        manifest = await self.read(ref)
        stored.verify_parts(self._spec.storage, ref, manifest)


class MemoryTables:
    """master_service.datasets.stored_tables.Tables: counted at once."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    async def count(self, source: Dataset, task_records: int) -> FileTable:
        await asyncio.sleep(0.05)
        files = files_of(source.urls[0], self._plan.job)
        table = FileTable(files, task_records)
        digest = hashlib.sha256(repr(table.to_map()).encode()).hexdigest()
        return FileTable(files, task_records, digest)

    async def load(self, digest: str) -> FileTable:
        for source in (TRAINING, EVALUATION):
            table = await self.count(source, self._plan.job.task_records)
            if table.digest == digest:
                return table
        raise AssertionError(f"no table {digest}")


async def at_once(work: Callable[..., Any], *arguments: Any) -> Any:
    """trainer_agent.model.compute.Offload without a thread."""
    await asyncio.sleep(0.002)
    return work(*arguments)


class WitnessedPushing(Pushing):
    """Tells if a block takes a push of a generation older than one the pserver has seen."""

    def __init__(self, pserver: WitnessedPserver, store: Store, header: PushHeader) -> None:
        super().__init__(pserver, store, header)
        self._witnessed, self._generation = pserver, header.generation

    def _taken(self, item: PushBlock, view: memoryview, memory: Buffer | None) -> Verdict:
        witness = self._witnessed
        witness.seen = max(witness.seen, witness.generation)
        verdict = super()._taken(item, view, memory)
        if verdict is Verdict.APPLIED and self._generation < witness.seen and len(witness.failures) < MAX_FAILURES:
            witness.failures.append(
                f"{witness.incarnation} applied a push of generation {self._generation} after {witness.seen}"
            )
        return verdict


class WitnessedPserver(Pserver):
    """`seen`: the highest generation it has seen."""

    def __init__(self, job: str, incarnation: str, failures: list[str]) -> None:
        super().__init__(job, incarnation)
        self.seen, self.failures = 0, failures

    def _pushing(self, store: Store, header: PushHeader) -> Pushing:
        return WitnessedPushing(self, store, header)


async def master(world: World, seat: Seat) -> int:
    service = Master(
        world.etcd_of(seat.process),
        world.keys,
        name=ids.new_id(seat.name),
        url=seat.url,
        spec=world.spec,
        ttl_s=MASTER_TTL_S,
        tables=lambda _: MemoryTables(world.plan),
        manifests=MemoryManifests,
        probe=world.network.refuses,
    )
    seat.service = service
    world.network.listen(seat.url, seat.process, service)
    await service.run(seat.stopping)
    return 0


async def pserver(world: World, seat: Seat) -> int:
    """As pserver_service/__main__.py, without HTTP."""
    etcd = world.etcd_of(seat.process)
    service = WitnessedPserver(world.keys.job, ids.new_id(seat.name), world.failures)
    seat.service = service
    world.network.listen(seat.url, seat.process, service)
    directory = Directory(etcd, world.keys)
    member = PserverMember(index=-1, url=seat.url, incarnation=service.incarnation, host="simulated", pid=1)
    registration = Registration(etcd, world.keys, directory, member)
    life = Member(Surroundings(etcd, world.keys, directory, service, registration, at_once))

    return 0 if await life.serve(seat.stopping, 300.0, DRAIN_S) else INDEX_LOST


def spectator(world: World, etcd: Etcd) -> Spectator:
    """What a launcher, or a command, sees of a masterless job, and asks of it."""
    return Spectator(etcd, world.keys, tables=lambda _: MemoryTables(world.plan), manifests=MemoryManifests)


async def trainer(world: World, seat: Seat) -> int:
    """As trainer_agent/__main__.py and trireme/masterless.py, without the user's module, torch and HTTP."""
    etcd = world.etcd_of(seat.process)
    name = ids.new_id(seat.name)
    directory = Directory(etcd, world.keys)
    world.network.listen(seat.url, seat.process, None)
    left = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        following = group.create_task(directory.run())
        if world.plan.dispatch is Dispatch.ETCD:
            seat.dispatcher = _dispatcher(world, seat, name)
            group.create_task(seat.dispatcher.run(left))
        await directory.wait_for(lambda view: view.spec is not None, 600.0, "the job's spec")
        assert directory.spec is not None
        agent = Agent(
            directory.spec,
            TrainerMember(trainer=name, url=seat.url, incarnation=name, host="simulated", pid=1),
            etcd=etcd,
            directory=directory,
            compute=TinyCompute(world.plan.job.mode, world.notes, world.rng, _speed(world), world.plan.job.travels_as),
            master=seat.dispatcher or SimulatedMaster(world.network, directory),
            connect=lambda member: SimulatedPserver(world.network, member, world.check_versions),
            offload=at_once,
            stopping=seat.stopping,
        )
        seat.service = agent
        code = await agent.run()
        left.set()
        following.cancel()
    return code


def _dispatcher(world: World, seat: Seat, name: str) -> Dispatcher:
    return Dispatcher(
        world.etcd_of(seat.process),
        world.keys,
        name=name,
        url=seat.url,
        spec=world.spec,
        ttl_s=MASTER_TTL_S,
        tables=lambda _: MemoryTables(world.plan),
        manifests=MemoryManifests,
        probe=world.network.refuses,
    )


def _speed(world: World) -> Speed:
    """Some trainers are slower than others."""
    speed, factor = world.plan.speed, world.rng.choice([1.0, 1.0, 3.0])
    return replace(speed, low_s=speed.low_s * factor, high_s=speed.high_s * factor)
