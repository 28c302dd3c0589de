"""Real processes of a collective job are frozen and killed: no bit differs from the job with parameter
servers, which has none here."""

from __future__ import annotations

import signal

import pytest

from tests.end_to_end.local_cluster import END_S, STEPS, cluster_of, completed, reach_step, same_bits, spec_of
from trireme.launch.processes import ClusterError
from trireme_shared.platform.runtime import clock
from trireme_shared.protocol.records import Phase, Strategy

pytestmark = [pytest.mark.processes, pytest.mark.soak, pytest.mark.timeout(240)]
LEASE_S = 3.0
BUSY_S = 1.0  # a busy machine


def collective(folder, **changes):
    return spec_of(folder, strategy=Strategy.COLLECTIVE, pservers=0, trainers=3, slow_s=0.06, **changes)


@pytest.mark.parametrize("dispatch", ["master", "etcd"])
async def test_a_frozen_trainer_and_too_few_of_them_change_no_bit(tmp_path, undisturbed, dispatch):
    spec = collective(tmp_path, min_members=3, dispatch=dispatch, lease_ttl_s=LEASE_S)
    async with cluster_of(spec, tmp_path) as cluster:
        view = cluster.directory
        await view.wait_for(lambda seen: len(seen.trainers.names) == 3, END_S, "all to train")
        frozen = clock.monotonic()
        cluster.kill("trainer-1", signal.SIGSTOP)
        limit_s = LEASE_S + 0.5 + BUSY_S
        await view.wait_for(
            lambda seen: seen.state.phase is Phase.WAITING, limit_s, "the frozen one to be out"
        )
        assert clock.monotonic() - frozen > LEASE_S / 2  # it renewed its lease a moment before
        assert view.trainers.names == ()
        cluster.kill("trainer-1", signal.SIGCONT)
        await view.wait_for(lambda seen: len(seen.trainers.names) == 3, END_S, "the job to go on")
        assert view.state.timeline == 0
        assert same_bits(await completed(cluster), undisturbed)
        assert cluster.deaths == {}
        assert not [name for name in cluster.children if name.startswith("pserver")]


async def test_a_run_that_starts_nobody_again_ends_once_too_few_are_left(tmp_path):
    """Its lease is long: who loses it on a busy machine is ended, and not started again either."""
    spec = collective(tmp_path, min_members=3, restart_policy="never", lease_ttl_s=30.0)
    async with cluster_of(spec, tmp_path) as cluster:
        await reach_step(cluster, STEPS // 10)
        cluster.kill("trainer-0")
        told = (
            r"trainer-0 ended \(SIGKILL\), and restart_policy is never: 2 of the job's trainers are "
            r"left, and it needs 3"
        )
        with pytest.raises(ClusterError, match=told):
            await cluster.wait(END_S)
