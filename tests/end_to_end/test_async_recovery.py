"""Real processes of an asynchronous job are killed: what was trained stays trained once, or its loss is on
record."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import contextmanager

import pytest

from tests.end_to_end.local_cluster import END_S, EPOCHS, cluster_of, ended, reach_step, spec_of
from tests.end_to_end.scripts import RECORDS
from trainer_agent.data_plane.http import HttpPserver
from trireme_shared.protocol.records import Mode, Phase
from trireme_shared.protocol.records.checkpoints import CheckpointLatest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

MINIBATCHES = EPOCHS * RECORDS // 8
SLOW_S = 0.1


def async_spec(folder, **changes):
    return spec_of(
        folder,
        slow_s=SLOW_S,
        mode=Mode.ASYNC,
        global_batch_size=8,
        lanes=1,
        **{"checkpoint_every_seconds": 1.0, **changes},
    )


async def reach_checkpoint(cluster, step):
    """Wait until that checkpoint, or a later one, is the latest."""
    async with asyncio.timeout(END_S):
        while True:
            found = await cluster.etcd.get(cluster.directory.keys.latest)
            if found is not None and CheckpointLatest.model_validate_json(found.value).step >= step:
                return
            await asyncio.sleep(0.05)


async def applied(cluster):
    """Pserver -> (lowest, highest) minibatches of the whole job at its blocks, by its own books."""
    found = {}
    for member in cluster.directory.pservers.values():
        pserver = HttpPserver(member, "")
        try:
            info = await pserver.info()
        finally:
            await pserver.close()
        lowest, highest = (
            sum(getattr(e, name) for e in info.ledger) for name in ("applied_lowest", "applied_highest")
        )
        found[member.index] = lowest, highest
    return found


async def test_a_killed_parameter_server_comes_back_from_a_checkpoint_and_its_losses_are_on_record(tmp_path):
    async with cluster_of(async_spec(tmp_path), tmp_path) as cluster:
        await reach_checkpoint(cluster, 2)
        pid = cluster.children["pserver-1"].pid
        index = next(member.index for member in cluster.directory.pservers.values() if member.pid == pid)
        cluster.kill("pserver-1")
        state = await ended(cluster)
        assert state.phase is Phase.COMPLETED, state
        assert cluster.deaths == {"pserver-1": 1}
        assert state.timeline == 0, "the others went on"
        losses = state.result.losses
        assert set(losses.lost) <= {str(index)}
        assert losses.skipped == {}
        for number, (lowest, highest) in (await applied(cluster)).items():
            lost = losses.lost.get(str(number), 0)
            assert (lowest + lost, highest + lost) == (MINIBATCHES, MINIBATCHES)


@contextmanager
def frozen(pid):
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def test_a_frozen_parameter_server_is_skipped_and_what_it_missed_is_on_record(tmp_path):
    """Its lease outlives the freeze, and no connection breaks: only its silence tells."""
    once = {"checkpoint_every_seconds": None, "checkpoint_every_epochs": None}
    spec = async_spec(tmp_path, skip_after_seconds=0.5, lease_ttl_s=60.0, **once)
    async with cluster_of(spec, tmp_path) as cluster:
        await reach_checkpoint(cluster, 1)
        await reach_step(cluster, 20)
        pid = cluster.children["pserver-1"].pid
        index = next(member.index for member in cluster.directory.pservers.values() if member.pid == pid)
        with frozen(pid):
            # a stream says after 30 s that nothing moves, and again 30 s later
            async with asyncio.timeout(50.0):
                await reach_step(cluster, MINIBATCHES // 4)
        thawed = await applied(cluster)
        async with asyncio.timeout(END_S):
            while (await applied(cluster))[index][1] <= thawed[index][1]:  # it goes on when it is back
                await asyncio.sleep(0.05)
        state = await ended(cluster)
        assert state.phase is Phase.COMPLETED, state
        losses = state.result.losses
        assert losses.lost == {}
        assert 0 < losses.skipped.get(str(index), 0) < MINIBATCHES
        for number, (lowest, highest) in (await applied(cluster)).items():
            assert highest <= MINIBATCHES <= lowest + losses.skipped.get(str(number), 0)


async def test_checkpoints_go_on_while_a_trainer_is_frozen(tmp_path):
    async with cluster_of(async_spec(tmp_path, lease_ttl_s=60.0), tmp_path) as cluster:
        await reach_checkpoint(cluster, 1)
        with frozen(cluster.children["trainer-1"].pid):
            async with asyncio.timeout(40.0):  # a pause that waits is given up after 60 s
                await reach_checkpoint(cluster, cluster.directory.state.saved + 1)
        state = await ended(cluster)
        assert state.phase is Phase.COMPLETED, state
        assert (state.result.losses.lost, state.result.losses.skipped) == ({}, {})
        assert await applied(cluster) == dict.fromkeys(range(2), (MINIBATCHES, MINIBATCHES))


async def test_a_parameter_server_that_freezes_in_a_pause_does_not_stretch_it_and_nothing_is_lost(tmp_path):
    """Its lease outlives the freeze: without the limit training stands still for 60 s."""
    spec = async_spec(tmp_path, skip_after_seconds=0.5, lease_ttl_s=60.0)
    async with cluster_of(spec, tmp_path) as cluster:
        await reach_checkpoint(cluster, 1)
        seen = cluster.directory
        async with asyncio.timeout(END_S):
            while seen.state.phase is not Phase.CHECKPOINTING:
                await seen.changed(seen.revision, 1.0)
        number = seen.state.saving.step
        with frozen(cluster.children["pserver-1"].pid):
            async with asyncio.timeout(30.0):
                while seen.state.saving is not None:
                    await seen.changed(seen.revision, 1.0)
                assert "gave no sign of life" in seen.state.reason
                await reach_step(cluster, MINIBATCHES // 3)
            assert seen.state.saved == number, "no other pause begins while it is frozen"
        state = await ended(cluster)
        assert state.phase is Phase.COMPLETED, state
        losses = state.result.losses
        assert losses.lost == {}
        for index, (lowest, highest) in (await applied(cluster)).items():
            assert highest <= MINIBATCHES <= lowest + losses.skipped.get(str(index), 0)


async def test_after_everything_was_killed_an_asynchronous_job_goes_on_with_other_numbers_and_loses_nothing(
    tmp_path,
):
    async with cluster_of(async_spec(tmp_path), tmp_path) as cluster:
        await reach_step(cluster, MINIBATCHES // 6)
        await reach_checkpoint(cluster, 2)
        cluster.kill_all()
    async with cluster_of(async_spec(tmp_path, pservers=3, trainers=1), tmp_path) as cluster:
        state = await ended(cluster)
        assert state.phase is Phase.COMPLETED, state
        assert state.timeline > 0, "everybody went back to the checkpoint"
        assert (state.result.trained_records, state.result.losses.lost) == (EPOCHS * RECORDS, {})
        assert await applied(cluster) == dict.fromkeys(range(3), (MINIBATCHES, MINIBATCHES))


async def start_over(tmp_path, killed, **changes):
    """Nothing can be saved until the job has started over: a file is where the folder of checkpoints has to
    be. `killed`: these parameter servers die, one after the other."""
    never = {
        "checkpoint_every_seconds": None,
        "checkpoint_every_epochs": None,
        "checkpoint_every_steps": None,
    }
    unwritable = tmp_path / "storage" / "checkpoints"  # not even the initial parameters are saved
    unwritable.parent.mkdir()
    unwritable.touch()
    spec = async_spec(tmp_path, storage=str(unwritable.parent), **never, **changes)
    async with cluster_of(spec, tmp_path) as cluster:
        await reach_step(cluster, 20)
        keys = cluster.directory.keys
        assert await cluster.etcd.get(keys.latest) is None
        assert not (await cluster.etcd.range(keys.own_prefix, prefix=True)).kvs
        for name in killed:
            cluster.kill(name)
            async with asyncio.timeout(END_S):
                while name not in cluster.deaths:
                    await asyncio.sleep(0.01)
        async with asyncio.timeout(END_S):
            while cluster.directory.state.timeline == 0:
                assert not cluster.directory.state.phase.final, cluster.directory.state
                await asyncio.sleep(0.05)
        unwritable.unlink()
        state = await ended(cluster)
        assert state.phase is Phase.COMPLETED, state
        assert (state.result.losses.lost, state.result.losses.skipped) == ({}, {})
        assert await applied(cluster) == dict.fromkeys(range(spec.pservers), (MINIBATCHES, MINIBATCHES))
        assert all(cluster.deaths[name] >= 1 for name in killed)


@pytest.mark.soak  # for its length
async def test_a_job_with_independent_checkpoints_starts_over_if_all_parameters_are_lost_before_the_first(
    tmp_path,
):
    await start_over(tmp_path, ["pserver-0"], checkpoint_kind="independent", pservers=1)


@pytest.mark.soak  # for its length
@pytest.mark.parametrize(
    "killed", [["pserver-1"], ["pserver-0", "pserver-1"]], ids=["one", "one after the other"]
)
async def test_a_job_starts_over_if_parameter_servers_die_before_anything_was_saved(tmp_path, killed):
    await start_over(tmp_path, killed, pservers=2)
