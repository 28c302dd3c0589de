"""A collective job of four trainers that loses one, one that is frozen longer than its lease, two at once,
one that had just joined, and all at once: the bits of a job that nobody disturbed. `make soak
STRATEGY=collective` draws many more."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from tests.end_to_end.local_cluster import STEPS, cluster_of, completed, reach_step, same_bits, spec_of
from tests.equipment.waiting import until
from trireme_shared.protocol.records import Strategy

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

SETTINGS = {
    "strategy": Strategy.COLLECTIVE,
    "pservers": 0,
    "trainers": 4,
    "lease_ttl_s": 2.0,
    "checkpoint_every_steps": 5,
}


async def members(cluster, number: int) -> None:
    """Until so many trainers have the parameters and are counted in."""
    await until(lambda: len(cluster.directory.trainers.names) == number, f"{number} trainers")


@pytest.mark.parametrize(
    "exchange",
    [
        {},
        pytest.param({"exchange": "native", "bucket_bytes": 4096}, marks=pytest.mark.soak),
        pytest.param({"exchange": "native", "reduction": "fast"}, marks=pytest.mark.soak),
    ],
    ids=["direct", "canonical", "fast"],
)
async def test_five_faults_change_no_bit(tmp_path, undisturbed, exchange):
    """With the fast reduction they change bits, but not more."""
    async with cluster_of(spec_of(tmp_path, **SETTINGS, **exchange), tmp_path) as cluster:
        await reach_step(cluster, STEPS // 8)
        cluster.kill("trainer-0")
        await reach_step(cluster, 2 * STEPS // 8)

        await until(
            lambda: any(name.startswith("trainer-1") for name in cluster.directory.trainers.names),
            "trainer-1",
        )
        pid, listed = cluster.children["trainer-1"].pid, set(cluster.directory.trainers.names)
        os.kill(pid, signal.SIGSTOP)
        frozen = next(name for name in listed if name.startswith("trainer-1"))
        try:
            await until(
                lambda: frozen not in cluster.directory.trainers.names, "a generation without the frozen one"
            )
        finally:
            os.kill(pid, signal.SIGCONT)
        await reach_step(cluster, 3 * STEPS // 8)

        cluster.kill("trainer-2")
        cluster.kill("trainer-3")
        await reach_step(cluster, 4 * STEPS // 8)

        await members(cluster, 4)
        cluster.kill("trainer-3")
        await reach_step(cluster, 5 * STEPS // 8)

        for number in range(4):
            cluster.kill(f"trainer-{number}")
        trained = await completed(cluster)
        if "reduction" in exchange:
            for name, value in undisturbed.items():
                torch.testing.assert_close(trained[name], value, rtol=1e-3, atol=1e-4)
        else:
            assert same_bits(trained, undisturbed)
        assert cluster.directory.state.timeline > 0
        assert all(cluster.deaths[f"trainer-{number}"] for number in (0, 2, 3))
