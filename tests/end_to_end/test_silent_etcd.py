"""Real processes and an etcd that is frozen (SIGSTOP) for longer than the leases: nobody leaves, and not one
bit changes."""

from __future__ import annotations

import asyncio
import signal

import pytest

from tests.end_to_end.local_cluster import END_S, cluster_of, completed, same_bits, spec_of
from trireme.launch.cluster import LocalCluster

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

LEASE_S, SILENT_S = 2.0, 6.0


async def freeze_etcd(cluster: LocalCluster, seconds: float) -> None:
    cluster.embedded.send(signal.SIGSTOP)
    await asyncio.sleep(seconds)
    cluster.embedded.send(signal.SIGCONT)


@pytest.mark.parametrize("dispatch", ["master", "etcd"])
async def test_an_etcd_that_is_silent_for_longer_than_the_leases_costs_no_member_and_no_step(
    tmp_path, undisturbed, dispatch
):
    spec = spec_of(tmp_path, dispatch=dispatch, lease_ttl_s=LEASE_S)
    async with cluster_of(spec, tmp_path) as cluster:
        await cluster.directory.wait_for(lambda view: bool(view.trainers.names), END_S, "the job to run")
        await asyncio.sleep(1.0)
        await freeze_etcd(cluster, SILENT_S)
        assert not cluster.directory.state.phase.final, "frozen in mid-training"
        assert same_bits(await completed(cluster), undisturbed)
        assert cluster.directory.state.timeline == 0, "no roll-back"
        assert not cluster.deaths
