"""Each safeguard of checkpoints proves itself: without it, a scenario that passes with it breaks a
promise."""

from __future__ import annotations

import asyncio
import contextlib
import string

import pytest

from pserver_service import recovery
from pserver_service.recovery import Rollback
from tests.equipment.replaced import replaced
from tests.equipment.waiting import until
from tests.pserver_service.checkpoints import kill_scenarios, parts
from tests.pserver_service.checkpoints.cluster import KEYS, PserverCluster, run_scenario
from trireme_shared.checkpoints import commit, stored, writer
from trireme_shared.checkpoints.commit import Committer
from trireme_shared.checkpoints.schedule import Schedule
from trireme_shared.platform.etcd import Compare
from trireme_shared.platform.membership.directory import OwnKey
from trireme_shared.protocol.errors import CheckpointUnusable, StaleGeneration
from trireme_shared.protocol.records import JobState, Phase
from trireme_shared.protocol.records.checkpoints import CheckpointLatest, CheckpointPart
from trireme_shared.serving.block_server import BlockServer
from trireme_shared.serving.pserver import Pserver

ALWAYS = Compare.create("/nowhere", "==", 0)


def flipped_bit(tmp_path):
    layout = parts.layout_of()
    stores = parts.fresh(layout, 1, Schedule(every_steps=2, every_epochs=None, epochs=9))
    parts.train(layout, stores, 0, 2)
    ref = parts.save(str(tmp_path), layout, parts.snapshots(stores), parts.slot_map(1))
    [part] = (tmp_path / "checkpoints" / ref.uuid).glob("pserver-*")
    content = bytearray(part.read_bytes())
    content[-5] ^= 1
    part.write_bytes(content)
    return parts.load(str(tmp_path), ref, 1)


def test_without_the_checksum_a_flipped_bit_is_loaded(tmp_path):
    with pytest.raises(Exception, match="checksum"):
        flipped_bit(tmp_path / "with")
    with replaced(stored, "is_intact", lambda *_: True):
        assert flipped_bit(tmp_path / "without")


async def roll_back_in_the_middle(storage):
    """The job begins to roll back while the last part is being written, and nobody has noticed when it is
    there."""
    cluster = PserverCluster(str(storage))
    await cluster.open()
    before = await cluster.committed(0)

    async def slow(work, *arguments):
        result = work(*arguments)
        await cluster.write_state(
            JobState(phase=Phase.ROLLING_BACK, generation=2, timeline=2, checkpoint=before.uuid)
        )
        return result

    node = cluster.nodes[1]
    node.member.checkpointer.offload = slow
    with replaced(Rollback, "is_due", lambda *_: False):
        await cluster.train(0, 2)
        await asyncio.sleep(5.0)
    return before, await cluster.latest()


def test_without_the_check_of_the_state_a_checkpoint_is_committed_behind_the_masters_back(tmp_path):
    before, after = run_scenario(roll_back_in_the_middle, tmp_path / "with")
    assert after == before

    def careless(self, view, lock):
        return [lock, Compare.mod(KEYS.latest, "==", view.latest_revision)]

    with (
        replaced(Committer, "obstacle", lambda *_: ""),
        replaced(Committer, "proofs", careless),
    ):
        before, after = run_scenario(roll_back_in_the_middle, tmp_path / "without")
    assert after.step == 2


async def part_missing(storage):
    """One parameter server cannot write; `latest` must stay what it is."""
    cluster = PserverCluster(str(storage))
    await cluster.open()
    await cluster.committed(0)

    async def full(work, *arguments):
        raise OSError(28, "No space left on device")

    cluster.nodes[1].member.checkpointer.offload = full
    await cluster.train(0, 2)
    await until(lambda: bool(cluster.nodes[1].pserver.checkpoint_error), "one part fails")
    await asyncio.sleep(5.0)
    latest = await cluster.latest()
    cluster.check_latest(latest)


def test_without_waiting_for_all_parts_latest_cannot_be_loaded(tmp_path):
    run_scenario(part_missing, tmp_path / "with")
    with (
        replaced(Committer, "is_complete", lambda self, pending: bool(self.seen.parts.get(pending.uuid))),
        replaced(stored, "writers", lambda *_: (0,)),
        pytest.raises(Exception, match="lacks part of pserver-1"),
    ):
        run_scenario(part_missing, tmp_path / "without")


def test_without_the_fence_of_the_index_a_sleeper_publishes_after_it_was_replaced(tmp_path):
    _, turns = run_scenario(kill_scenarios.undisturbed, tmp_path / "undisturbed", "ps-1")
    with (
        replaced(OwnKey, "held", property(lambda _: ALWAYS)),
        replaced(OwnKey, "in_doubt", property(lambda _: False)),
        pytest.raises(AssertionError, match="it published nothing"),
    ):
        for turn in turns[::2]:
            run_scenario(kill_scenarios.frozen_at, tmp_path / str(turn), "ps-1", turn)


@contextlib.contextmanager
def unproven(*keys, lock=True):
    """`latest` is written without comparing these keys (prefixes); `lock` False: and whoever asks for the
    lock has it."""
    proofs, acquire = Committer.proofs, commit.try_acquire
    keys = keys if lock else (*keys, KEYS.finish_lock)

    async def granted(*_):
        return 1

    def fewer(self, view, lock):
        return [proof for proof in proofs(self, view, lock) if not proof.key.startswith(keys)]

    with replaced(Committer, "proofs", fewer), replaced(commit, "try_acquire", acquire if lock else granted):
        yield


async def a_late_finisher(storage):
    """The one that commits version 2 is slow to publish it, its lease running on, while version 4 gets
    whole."""
    cluster = PserverCluster(str(storage), keep_checkpoints=9)
    await cluster.open()
    await cluster.committed(0)
    slept = []

    async def slow(work, *arguments):
        result = work(*arguments)
        if work.__name__ == "write_manifest" and arguments[1].step == 2 and not slept:
            slept.append(cluster)
            await asyncio.sleep(10.0)
        return result

    for node in cluster.nodes.values():
        node.member.checkpointer.committer.offload = slow
    await cluster.train(0, 2)
    await until(lambda: bool(slept), "one of them begins to commit")
    await cluster.train(2, 4)
    await asyncio.sleep(30.0)
    puts = [event.kv.value for event in cluster.simulated.events() if event.kv.key == KEYS.latest]
    return [CheckpointLatest.model_validate_json(value).step for value in puts]


def test_latest_does_not_get_older_as_long_as_the_lock_or_latest_itself_is_compared(tmp_path):
    assert run_scenario(a_late_finisher, tmp_path / "both") == [0, 2, 4]
    with unproven(KEYS.latest):
        assert run_scenario(a_late_finisher, tmp_path / "lock") == [0, 2, 4]
    with unproven(lock=False):
        assert run_scenario(a_late_finisher, tmp_path / "latest") == [0, 2, 4]
    with unproven(KEYS.latest, lock=False):
        steps = run_scenario(a_late_finisher, tmp_path / "neither")
    assert steps != sorted(steps), "the late one overwrites the newer one"


async def manifests_written(storage):
    """How many pservers write one of version 2."""
    cluster, written = PserverCluster(str(storage)), []
    await cluster.open()
    await cluster.committed(0)

    def write_manifest(url, manifest, write=writer.write_manifest):
        written.append(manifest.step)
        return write(url, manifest)

    with replaced(writer, "write_manifest", write_manifest):
        await cluster.train(0, 2)
        await cluster.committed(2)
        await asyncio.sleep(1.0)
    return written.count(2)


def test_without_the_finish_lock_everybody_does_the_work_of_one(tmp_path):
    assert run_scenario(manifests_written, tmp_path / "with") == 1
    with unproven(lock=False):
        assert run_scenario(manifests_written, tmp_path / "without") == 2


async def a_part_withdrawn(storage):
    """While the manifest is written, a pserver takes its part back."""
    cluster = PserverCluster(str(storage))
    await cluster.open()
    await cluster.committed(0)

    async def withdrawing(work, *arguments):
        result = work(*arguments)
        if work.__name__ == "write_manifest":
            parts_of = {
                key: CheckpointPart.model_validate_json(value)
                for key, value in (await cluster.tree()).items()
                if key.endswith("finished/1")
            }
            for key, part in parts_of.items():
                if part.step == 2:
                    await cluster.etcd.delete(KEYS.checkpoints + key)
                    (storage / "checkpoints" / key.split("/")[0] / part.file).unlink()
        return result

    for node in cluster.nodes.values():
        node.member.checkpointer.committer.offload = withdrawing
    await cluster.train(0, 2)
    await asyncio.sleep(5.0)
    latest = await cluster.latest()
    cluster.check_latest(latest)
    return latest.step


def test_without_comparing_the_parts_latest_names_one_that_was_withdrawn(tmp_path):
    assert run_scenario(a_part_withdrawn, tmp_path / "with") == 0
    uuids = [f"{KEYS.checkpoints}{digit}" for digit in string.hexdigits]
    with unproven(*uuids), pytest.raises(CheckpointUnusable, match="cannot be read"):
        run_scenario(a_part_withdrawn, tmp_path / "without")


async def back_to_an_older_one(storage):
    """The newest checkpoint is damaged, so version 4 is trained, and saved, once more."""
    cluster = PserverCluster(str(storage))
    await cluster.open()
    await cluster.train(0, 2)
    await cluster.committed(2)
    await cluster.train(2, 4)
    damaged = await cluster.committed(4)
    await cluster.roll_back(checkpoint=damaged.kept[1].uuid, damaged=(damaged.uuid,))
    await cluster.train(2, 4)
    await cluster.committed(4, limit_s=10.0)


def test_without_the_timeline_what_is_saved_after_a_roll_back_never_becomes_the_latest(tmp_path):
    run_scenario(back_to_an_older_one, tmp_path / "with")
    with (
        replaced(commit, "is_newer", lambda ref, latest: latest is None or ref.step > latest.step),
        pytest.raises(AssertionError, match="expected step 4"),
    ):
        run_scenario(back_to_an_older_one, tmp_path / "without")


async def pushed_from_before(storage):
    """A trainer that has not heard of the rollback pushes."""
    cluster = PserverCluster(str(storage), pservers=1)
    await cluster.open()
    await cluster.train(0, 2)
    await cluster.committed(2)
    old = cluster.state
    await cluster.roll_back()
    cluster.state = old
    return await cluster.push(cluster.nodes[0], 2, 0)


def test_without_the_fence_of_the_roll_back_pushes_of_before_it_are_applied_after_it(tmp_path):
    with pytest.raises(StaleGeneration):
        run_scenario(pushed_from_before, tmp_path / "with")
    drop = Pserver.drop
    with replaced(BlockServer, "drop", lambda self, _: drop(self, 0)):
        assert run_scenario(pushed_from_before, tmp_path / "without").applied > 0


async def another_model(storage):
    """The job's model is not the one of its checkpoint any more: other names, the same shapes."""
    cluster = PserverCluster(str(storage))
    await cluster.open()
    await cluster.committed(0)
    other = cluster.layout.model_copy(update={"digest": "d2"})
    await cluster.etcd.put(KEYS.layout, other.to_bytes())
    await asyncio.sleep(1.0)
    return {member.restored.error for member in await cluster.roll_back()}


def test_without_the_layout_digest_the_values_of_another_model_are_served(tmp_path):
    errors = run_scenario(another_model, tmp_path / "with")
    assert all("is of model d1, the job's model is d2" in error for error in errors)
    load = recovery.load_store

    def careless(url, job, _digest, ref, *others):
        return load(url, job, stored.read_manifest(url, job, ref).layout.digest, ref, *others)

    with replaced(recovery, "load_store", careless):
        assert run_scenario(another_model, tmp_path / "without") == {""}
