"""Shares of checkpoints of a collective job: whole ones load in both strategies to the same bits; lost ones
are asked for again."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from pserver_service.recovery import load_store
from tests.equipment.etcd.simulated import SimulatedEtcd
from tests.equipment.virtual_loop import run_virtually
from tests.equipment.waiting import until
from tests.simulation.compute import Speed, TinyCompute, Trace
from tests.trainer_agent.collective.test_replica import gradients, record
from trainer_agent.collective.replica import Replica
from trainer_agent.collective.state.checkpoints import CheckpointContext, Restorer, ShareCopies, load_replica
from trainer_agent.core.duties import checkpoint_asked
from trainer_agent.membership.lease import Membership
from trireme_shared.checkpoints import stored
from trireme_shared.platform.etcd import Etcd, Put
from trireme_shared.platform.membership.directory import Directory
from trireme_shared.protocol.errors import CheckpointUnusable
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import (
    JobSpec,
    JobState,
    Mode,
    Phase,
    SlotMap,
    Strategy,
    TrainerList,
    TrainerMember,
)
from trireme_shared.protocol.records.assignments import spread
from trireme_shared.protocol.records.checkpoints import CheckpointLatest, CheckpointRef
from trireme_shared.protocol.records.step import StepRecord

KEYS = Keys("j")
TTL_S = 5.0


class Node:
    """One trainer's replica, with its part of checkpoints."""

    def __init__(self, job: Job, name: str) -> None:
        self.name = name
        etcd = Etcd(job.simulated.transport(name))
        self.compute = TinyCompute(Mode.SYNC, Trace(), random.Random(0), Speed())
        self.replica = Replica(self.compute)
        self.directory = Directory(etcd, KEYS)
        member = TrainerMember(trainer=name, url=f"http://{name}", incarnation=name, host="h", pid=1)
        self.membership = Membership(etcd, member)
        place = self.membership, self.offload, self.compute, self.replica
        context = CheckpointContext(job.spec, etcd, self.directory, *place)
        self.copies = ShareCopies(context)
        self.evaluating = asyncio.Lock()
        self.restorer = Restorer(context, asyncio.Lock(), self.evaluating)
        self.slow = asyncio.Event()
        self.slow.set()
        self.tasks: list[asyncio.Task[Any]] = []

    async def offload(self, work: Any, *arguments: Any) -> Any:
        await self.slow.wait()
        return work(*arguments)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for part in (self.directory, self.copies.checkpointer, self.restorer):
                group.create_task(part.run())
            group.create_task(self.membership.hold())

    async def start(self) -> None:
        await self.membership.register(KEYS, TTL_S)
        self.tasks = [asyncio.ensure_future(self.run())]

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    @property
    def bits(self) -> dict[str, bytes]:
        found = {
            f"block.{b.number}": bytes(self.compute.current(b.number)) for b in self.compute.layout.blocks()
        }
        for block in self.compute.layout.blocks():
            for name, tensor in self.replica.state(block.number).items():
                found[f"block.{block.number}.{name}"] = tensor.numpy().tobytes()
        return found


class Job:
    """Trainers that step together; the test is their exchange and the master."""

    def __init__(self, storage: str, names: tuple[str, ...], **spec: Any) -> None:
        self.simulated = SimulatedEtcd()
        self.etcd = Etcd(self.simulated.transport("test"))
        given = {"checkpoint_every_steps": 2, "epochs": 99, "lanes": 1, "global_batch_size": 4, **spec}
        dataset = {"kind": "text_lines", "urls": ("-",)}
        self.spec = JobSpec(
            job="j",
            script="s.py",
            dataset=dataset,
            storage=storage,
            strategy=Strategy.COLLECTIVE,
            lease_ttl_s=TTL_S,
            **given,
        )
        self.lanes = 4  # of the lists: each of the trainers owns blocks
        self.nodes = {name: Node(self, name) for name in names}
        self.state = JobState(phase=Phase.RUNNING, generation=0)
        self.list = TrainerList()

    async def open(self) -> None:
        await self.etcd.put(KEYS.spec, self.spec.to_bytes())
        await self.group(tuple(self.nodes))
        for node in self.nodes.values():
            await node.start()
            node.replica.begin(lanes=1)
        await self.seen()

    async def group(self, names: tuple[str, ...], **state: Any) -> None:
        generation = self.state.generation + 1
        self.state = self.state.model_copy(update={"generation": generation, **state})
        self.list = TrainerList(generation=generation, lanes=self.lanes, names=names)
        change = TrainerList().change_to(self.list)
        await self.etcd.txn(
            [],
            [
                Put(KEYS.state, self.state.to_bytes()),
                Put(KEYS.trainer_list, self.list.to_bytes()),
                Put(KEYS.trainers_change, change.to_bytes()),
            ],
        )

    async def seen(self) -> None:
        for node in self.nodes.values():
            await until(lambda node=node: node.directory.trainers == self.list, "the list is seen", 20.0)

    async def kill(self, name: str) -> None:
        await self.nodes.pop(name).stop()

    async def step(self, *, asked: Any = None) -> None:
        """All make the next version, and copy it if it is due."""
        for node in self.nodes.values():
            assert node.replica.record is not None
            following = made(node.replica.record.version + 1, asked)
            node.replica.step(gradients(node.compute, following.version - 1), following)
            node.replica.swap()
        for node in self.nodes.values():
            await node.copies.at_version(self.list)

    async def latest(self) -> CheckpointLatest | None:
        found = await self.etcd.get(KEYS.latest)
        return CheckpointLatest.model_validate_json(found.value) if found else None

    async def committed(self, step: int) -> CheckpointRef:
        async def there() -> bool:
            latest = await self.latest()
            return latest is not None and latest.step == step

        for _ in range(600):
            if await there():
                latest = await self.latest()
                assert latest is not None
                return latest.kept[0]
            await asyncio.sleep(0.05)
        raise AssertionError(f"latest is {await self.latest()}, expected step {step}")

    async def close(self) -> None:
        for node in self.nodes.values():
            await node.stop()


def made(version: int, asked: Any = None) -> StepRecord:
    found = record(version)
    if asked is None or found.lane_zero is None:
        return found
    return found.model_copy(update={"lane_zero": found.lane_zero.model_copy(update={"asked": asked})})


def scenario(run: Any, storage: Any, *arguments: Any, **spec: Any) -> Any:
    async def main() -> Any:
        job = Job(str(storage), ("a", "b", "c"), **spec)
        try:
            await job.open()
            return await run(job, *arguments)
        finally:
            await job.close()

    return run_virtually(main, shuffled=False)


async def saved_at_2(job: Job) -> tuple[CheckpointRef, dict[str, bytes]]:
    await job.step()
    await job.step()
    bits = job.nodes["a"].bits
    return await job.committed(2), bits


def test_a_checkpoint_of_shares_loads_on_parameter_servers_of_any_number(tmp_path):
    ref, bits = scenario(saved_at_2, tmp_path)
    manifest = stored.read_manifest(str(tmp_path), "j", ref)
    assert {part.pserver for part in manifest.parts} == {0, 1, 2}
    assert manifest.slots.version == 1
    for pservers in (1, 2):
        slots = SlotMap(version=1, owners=spread(manifest.layout.slot_count, pservers))
        found: dict[str, bytes] = {}
        for index in range(pservers):
            store, _ = load_store(str(tmp_path), "j", manifest.layout.digest, ref, index, slots, None)
            assert store.lowest == store.highest == 2
            for number, block in store.blocks.items():
                found[f"block.{number}"] = bytes(block.current.view)
                for name, tensor in block.optimizer_state().items():
                    found[f"block.{number}.{name}"] = tensor.numpy().tobytes()
        assert found == bits


def test_a_checkpoint_loads_whole_into_a_replica_that_goes_on_to_the_same_bits(tmp_path):
    async def run(job: Job) -> tuple[Any, Any]:
        ref, bits = await saved_at_2(job)
        made_anew = Node(job, "new")
        load_replica(job.spec.storage, "j", ref, 1, made_anew.compute, made_anew.replica, 7)
        assert made_anew.bits == bits
        assert (made_anew.replica.timeline, made_anew.replica.checkpoint) == (7, ref.uuid)
        await job.step()
        made_anew.replica.step(gradients(made_anew.compute, 2), record(3))
        made_anew.replica.swap()
        return made_anew.bits, job.nodes["a"].bits

    loaded, undisturbed = scenario(run, tmp_path)
    assert loaded == undisturbed


def test_a_checkpoint_with_a_flipped_bit_is_never_in_use(tmp_path):
    async def run(job: Job) -> None:
        ref, _ = await saved_at_2(job)
        part = next((tmp_path / "checkpoints" / ref.uuid).glob("pserver-1.*"))
        content = bytearray(part.read_bytes())
        content[-1] ^= 1
        part.write_bytes(content)
        node = job.nodes["a"]
        with pytest.raises(CheckpointUnusable, match=r"has checksum .* was written"):
            load_replica(job.spec.storage, "j", ref, 1, node.compute, node.replica, 7)
        assert node.replica.record is None

    scenario(run, tmp_path)


@pytest.mark.parametrize("damage", [False, True])
def test_after_a_roll_back_each_trainer_says_that_it_holds_the_checkpoint_or_why_not(tmp_path, damage):
    async def run(job: Job) -> None:
        ref, bits = await saved_at_2(job)
        await job.step()
        if damage:
            for part in (tmp_path / "checkpoints" / ref.uuid).glob("pserver-0.*"):
                part.unlink()
        await job.group((), phase=Phase.ROLLING_BACK, timeline=2, checkpoint=ref.uuid)
        for node in job.nodes.values():
            await until(
                lambda node=node: node.membership.record.holds is not None, "it says what it holds", 30.0
            )
            holds = node.membership.record.holds
            assert (holds.timeline, holds.checkpoint, bool(holds.error)) == (2, ref.uuid, damage)
            if damage:
                assert "cannot be read" in holds.error
                assert node.replica.record is None
            else:
                assert holds.version == 2
                assert node.bits == bits

    scenario(run, tmp_path)


def test_a_checkpoint_is_not_loaded_while_a_minibatch_is_evaluated(tmp_path):
    """In a thread, with the parameters of the model: other ones would come into use within it."""

    async def run(job: Job) -> None:
        ref, _ = await saved_at_2(job)
        node = job.nodes["a"]
        async with node.evaluating:
            await job.group((), phase=Phase.ROLLING_BACK, timeline=2, checkpoint=ref.uuid)
            await until(
                lambda: job.nodes["b"].membership.record.holds is not None, "the other one has it", 30.0
            )
            assert node.replica.record is None
            assert node.membership.record.holds is None
        await until(lambda: node.membership.record.holds is not None, "it has it, too", 30.0)

    scenario(run, tmp_path)


def test_a_checkpoint_that_is_not_kept_any_more_is_no_damage(tmp_path):
    async def run(job: Job) -> None:
        await saved_at_2(job)
        await job.group((), phase=Phase.ROLLING_BACK, timeline=2, checkpoint="deleted")
        for node in job.nodes.values():
            await until(
                lambda node=node: node.membership.record.holds is not None, "it says what it holds", 30.0
            )
            holds = node.membership.record.holds
            assert (holds.timeline, holds.checkpoint, holds.superseded) == (2, "deleted", True)
            assert "'deleted' is not among those kept" in holds.error
            assert node.replica.record is None  # nobody steps what it had with what it gets from others

    scenario(run, tmp_path)


async def joined_while_written(job: Job) -> CheckpointRef:
    for node in job.nodes.values():
        node.slow.clear()
    await job.step()
    await job.step()
    await job.group(("a", "b", "c", "d"))
    await job.seen()
    await job.step()
    for node in job.nodes.values():
        node.slow.set()
    return await job.committed(2)


def test_a_trainer_that_joins_meanwhile_costs_no_checkpoint(tmp_path):
    ref = scenario(joined_while_written, tmp_path)
    assert stored.read_manifest(str(tmp_path), "j", ref).slots.version == 1


def test_a_part_that_is_begun_while_the_lease_runs_out_is_written_with_the_next_lease(tmp_path):
    async def run(job: Job) -> None:
        await job.step()
        job.simulated.cut("c")
        await job.step()
        before = job.nodes["c"].membership.lease_id
        await asyncio.sleep(3 * TTL_S)
        job.simulated.mend("c")
        await job.committed(2)
        assert job.nodes["c"].membership.lease_id != before

    scenario(run, tmp_path)


async def died_while_written(job: Job, *, again: bool) -> int | None:
    """The checkpoint of version 0 lacks a part of one that died; none is due for long."""
    job.nodes["c"].slow.clear()
    for node in job.nodes.values():
        await node.copies.at_version(job.list)
    await until(
        lambda: bool(job.nodes["a"].copies.checkpointer.committer.seen.parts), "other parts are written", 20.0
    )
    assert job.nodes["a"].copies.again(job.list) is None  # c may still write its part
    await job.kill("c")
    await job.group(("a", "b"))
    await job.seen()
    carried = None
    for step in range(8):
        request = job.nodes["a"].copies.again(job.list) if again else None
        carried = checkpoint_asked(request, job.list.generation, step, carried)
        await job.step(asked=carried)
        await asyncio.sleep(0.5)
    latest = await job.latest()
    return latest.step if latest is not None else None


@pytest.mark.parametrize("again", [True, False])
def test_a_checkpoint_that_a_death_made_incomplete_is_made_of_a_version_soon_after(tmp_path, again):
    async def run(job: Job) -> int | None:
        return await died_while_written(job, again=again)

    step = scenario(run, tmp_path, checkpoint_every_steps=1000)
    assert step == (2 if again else None)


def test_the_last_version_is_copied_anew_in_each_generation_until_it_is_saved(tmp_path):
    async def run(job: Job) -> None:
        last = StepRecord(
            version=1, positions=tuple(p.model_copy(update={"exhausted": True}) for p in record(1).positions)
        )
        for node in job.nodes.values():
            node.replica.step(gradients(node.compute, 0), last)
            node.replica.swap()
        job.nodes["c"].slow.clear()
        for node in job.nodes.values():
            await node.copies.at_version(job.list)
        await asyncio.sleep(1.0)
        await job.kill("c")
        await job.group(("a", "b"))
        await job.seen()
        for node in job.nodes.values():
            assert node.copies.ends_unsaved
            await node.copies.at_version(job.list)
        ref = await job.committed(1)
        assert stored.read_manifest(str(tmp_path), "j", ref).slots.version == 2
        latest = await job.latest()
        assert latest is not None
        assert latest.final
        await until(lambda: not job.nodes["a"].copies.ends_unsaved, "it is saved", 20.0)

    scenario(run, tmp_path, epochs=1, checkpoint_every_steps=None)
