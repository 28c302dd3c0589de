"""Trainers of a collective job are killed and stopped as real processes: not one bit of the result may
change."""

from __future__ import annotations

import os
import signal

import pytest

from tests.end_to_end.local_cluster import STEPS, cluster_of, completed, reach_step, same_bits, spec_of

pytestmark = [pytest.mark.processes, pytest.mark.soak, pytest.mark.timeout(240)]

COLLECTIVE = {"strategy": "collective", "pservers": 0}


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_trainers_that_are_killed_change_no_bit(tmp_path, undisturbed, transport):
    spec = spec_of(tmp_path, **COLLECTIVE, trainers=3)
    async with cluster_of(spec, tmp_path, environment={"TRIREME_TRANSPORT": transport}) as cluster:
        await reach_step(cluster, STEPS // 5)
        cluster.kill("trainer-0")
        await reach_step(cluster, 2 * STEPS // 5)
        cluster.kill("trainer-1")
        assert same_bits(await completed(cluster), undisturbed)
        assert cluster.deaths == {"trainer-0": 1, "trainer-1": 1}


async def test_a_trainer_that_is_silent_longer_than_its_lease_changes_no_bit(tmp_path, undisturbed):
    spec = spec_of(tmp_path, **COLLECTIVE, trainers=3, lease_ttl_s=2.0)
    async with cluster_of(spec, tmp_path) as cluster:
        await reach_step(cluster, STEPS // 5)
        pid = cluster.children["trainer-1"].pid
        os.kill(pid, signal.SIGSTOP)
        try:
            await reach_step(cluster, 2 * STEPS // 5)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert same_bits(await completed(cluster), undisturbed)
