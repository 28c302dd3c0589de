"""Real processes, one of which is stopped and continued all the time (SIGSTOP, SIGCONT), so that it runs a
fifth of the time."""

from __future__ import annotations

import asyncio
import signal
from contextlib import asynccontextmanager, suppress

import pytest

from tests.end_to_end.local_cluster import END_S, cluster_of, completed, reach_step, same_bits, spec_of
from trireme.view.job_address import client_of
from trireme_shared.protocol.records import Mode

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

SLOW = "trainer-3"
# steps enough for the lanes to leave; and a stopped process is not later with a minibatch that mostly sleeps
FIELDS = {"lanes": 8, "evaluation_dataset": None, "epochs": 40, "slow_s": 0.004}


@asynccontextmanager
async def slowed(cluster, name):
    async def cycle():
        while True:
            cluster.kill(name, signal.SIGSTOP)
            try:
                await asyncio.sleep(0.08)
            finally:
                cluster.kill(name, signal.SIGCONT)
            await asyncio.sleep(0.02)

    cycling = asyncio.create_task(cycle())
    try:
        yield
    finally:
        cycling.cancel()
        with suppress(asyncio.CancelledError, ProcessLookupError, KeyError):
            await cycling


@pytest.mark.soak  # for its length; tests/trainer_agent/loops and the simulation have it in every run
async def test_lanes_leave_a_slow_trainer_and_no_bit_changes(tmp_path):
    (tmp_path / "calm").mkdir()
    (tmp_path / "slow").mkdir()
    calm = spec_of(tmp_path / "calm", **FIELDS, trainers=1, pservers=1, stragglers="off")
    async with cluster_of(calm, tmp_path / "calm") as cluster:
        expected = await completed(cluster)
    spec = spec_of(tmp_path / "slow", **FIELDS, trainers=4, rebalance_s=1.0)
    async with cluster_of(spec, tmp_path / "slow") as cluster:
        await reach_step(cluster, 5)
        async with slowed(cluster, SLOW), asyncio.timeout(END_S):
            while lanes_of(cluster, SLOW) != 0:
                await asyncio.sleep(0.05)
        assert same_bits(await completed(cluster), expected)
        assert not cluster.deaths, "it was slow, not dead"


def lanes_of(cluster, name):
    """None unless lanes follow the measured speed."""
    trainers = cluster.directory.trainers
    found = next((trainer for trainer in trainers.names if trainer.startswith(f"{name}-")), None)
    return len(range(*trainers.lanes_of(found))) if found and trainers.shares else None


async def test_an_asynchronous_epoch_does_not_wait_for_a_trainer_that_is_stopped(tmp_path):
    """Its task is given to another trainer; it is no failure, and each record counts once."""
    spec = spec_of(
        tmp_path,
        mode=Mode.ASYNC,
        evaluation_dataset=None,
        global_batch_size=4,
        trainers=3,
        lease_ttl_s=60.0,
        checkpoint_every_seconds=None,
        task_timeout_floor_s=600,  # else the task is put back for its silence
    )
    async with cluster_of(spec, tmp_path) as cluster:
        await reach_step(cluster, 20)
        cluster.kill("trainer-1", signal.SIGSTOP)
        try:
            async with client_of(await cluster.master_url()) as client:
                await completed(cluster)
                events = (await client.list_events(spec.job)).events
            assert not cluster.deaths
        finally:
            cluster.kill("trainer-1", signal.SIGCONT)
    given = [event.message for event in events if event.name == "task_given_twice"]
    assert given
    assert all(" is late at trainer-1-" in message for message in given), given
