"""Each safeguard of checkpoints proves itself: without it, a scenario that passes with it breaks a promise."""

from __future__ import annotations

import asyncio

import pytest

from pserver_service.commit import Committer
from pserver_service.core.snapshot import Schedule
from pserver_service.registration import Registration
from pserver_service.rollback import Rollback
from shared import checkpoints
from shared.etcd import Compare
from shared.records import JobState, Phase
from tests.checkpoints import parts, test_kills
from tests.checkpoints.cluster import KEYS, Cluster, play, until
from tests.simulation.ablations import replaced

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
    with pytest.raises(Exception, match="MD5"):
        flipped_bit(tmp_path / "with")
    with replaced(checkpoints, "is_intact", lambda *_: True):
        assert flipped_bit(tmp_path / "without")


async def roll_back_in_the_middle(storage):
    """The job begins to roll back while the last part is being written, and nobody has noticed when it is there."""
    cluster = Cluster(str(storage))
    await cluster.open()
    before = await cluster.committed(0)

    async def slow(work, *arguments):
        result = work(*arguments)
        await cluster.write_state(JobState(phase=Phase.ROLLING_BACK, generation=2, timeline=2, checkpoint=before.uuid))
        return result

    node = cluster.nodes[1]
    node.member.checkpointer._offload = slow
    with replaced(Rollback, "_is_due", lambda *_: False):
        await cluster.train(0, 2)
        await asyncio.sleep(5.0)
    return before, await cluster.latest()


def test_without_the_check_of_the_state_a_checkpoint_is_committed_behind_the_masters_back(tmp_path):
    before, after = play(roll_back_in_the_middle, tmp_path / "with")
    assert after == before

    def careless(self, view, lock):
        return [lock, Compare.mod(KEYS.latest, "==", view.latest_revision)]

    with (
        replaced(Committer, "_obstacle", lambda *_: ""),
        replaced(Committer, "_proofs", careless),
    ):
        before, after = play(roll_back_in_the_middle, tmp_path / "without")
    assert after.step == 2


async def part_missing(storage):
    """One parameter server cannot write; `latest` must stay what it is."""
    cluster = Cluster(str(storage))
    await cluster.open()
    await cluster.committed(0)

    async def full(work, *arguments):
        raise OSError(28, "No space left on device")

    cluster.nodes[1].member.checkpointer._offload = full
    await cluster.train(0, 2)
    await until(lambda: bool(cluster.nodes[1].pserver.checkpoint_error), "one part fails")
    await asyncio.sleep(5.0)
    latest = await cluster.latest()
    cluster.check_latest(latest)


def test_without_waiting_for_all_parts_latest_cannot_be_loaded(tmp_path):
    play(part_missing, tmp_path / "with")
    with (
        replaced(Committer, "_is_whole", lambda self, written: bool(self._seen.parts.get(written.uuid))),
        replaced(checkpoints, "writers", lambda *_: (0,)),
        pytest.raises(Exception, match="lacks part of pserver 1"),
    ):
        play(part_missing, tmp_path / "without")


def test_without_the_fence_of_the_index_a_sleeper_publishes_after_it_was_replaced(tmp_path):
    first, last = play(test_kills.count_turns, tmp_path / "counted", "ps-1")
    found = []
    with replaced(Registration, "held", property(lambda _: ALWAYS)):
        for turn in range(first, last, 6):
            try:
                play(test_kills.frozen_at, tmp_path / str(turn), "ps-1", turn)
            except AssertionError as error:
                found.append(str(error))
    assert any("it published nothing" in error for error in found)
