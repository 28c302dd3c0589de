"""A cluster of real processes that is restarted with another version while it trains: the jobs of both
strategies have the bits of a job that nobody disturbed."""

from __future__ import annotations

import pytest
import torch

from tests.end_to_end.versions import Cluster, check, cluster, submit_both, trees
from tests.equipment.etcd.real import embedded_etcd

__all__ = ["cluster", "embedded_etcd", "trees"]

pytestmark = [pytest.mark.processes, pytest.mark.soak, pytest.mark.timeout(1800)]

SLOW_S = 0.1
RESTARTS = [
    ("older", "newer", "older"),
    ("newer", "older", "newer"),
    ("oldest", "newer"),
]


@pytest.mark.parametrize("versions", RESTARTS, ids="-".join)
async def test_a_cluster_is_restarted_with_another_version(
    cluster: Cluster, versions: tuple[str, ...], undisturbed: dict[str, torch.Tensor]
) -> None:
    for number, version in enumerate(versions):
        await cluster.master("master", version)
        await cluster.host("host", version)
        if not number:
            await submit_both(cluster, SLOW_S)
        await cluster.train()
        if number < len(versions) - 1:
            await cluster.stop("host", "master")
    found = await cluster.ends()
    await cluster.stop("host", "master")
    check(found, undisturbed)
