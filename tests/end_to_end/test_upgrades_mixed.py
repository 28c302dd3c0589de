"""A cluster whose masters and hosts of real processes are of two versions, and whose jobs have members of
both: they have the bits of a job that nobody disturbed, and nobody is without a leader for longer than a lease.
"""

from __future__ import annotations

import pytest
import torch

from tests.end_to_end.versions import Cluster, Members, check, cluster, submit_both, trees
from tests.equipment.etcd.real import embedded_etcd

__all__ = ["cluster", "embedded_etcd", "trees"]

pytestmark = [pytest.mark.processes, pytest.mark.soak, pytest.mark.timeout(1800)]

SLOW_S = 1.0  # a job trains until everything is done to it


def are_mixed(members: Members) -> bool:
    return set(members.trainers) == {"older", "newer"}


@pytest.mark.parametrize("versions", [("older", "newer"), ("newer", "older")], ids="-".join)
async def test_masters_and_hosts_are_replaced_one_after_the_other_and_back(
    cluster: Cluster, versions: tuple[str, str], undisturbed: dict[str, torch.Tensor]
) -> None:
    """Each version leads members of each version, and a parameter server of each has trainers of both."""
    first, second = versions
    await cluster.master("master-1", first)
    await cluster.host("host-1", first)
    await submit_both(cluster, SLOW_S, most_trainers=2)
    await cluster.train()

    await cluster.master("master-2", second)
    await cluster.host("host-2", second)
    await cluster.until_members(are_mixed)
    await cluster.train()
    await cluster.hand_over("master-1", "master-2")
    await cluster.train()
    await cluster.until_members(are_mixed)

    await cluster.master("master-1", first)
    await through_the_standby(cluster, "master-1")
    await cluster.stop("host-1")
    await cluster.until_members(lambda members: {*members.trainers, *members.pservers} == {second})
    await cluster.train()

    await cluster.host("host-1", first)
    await cluster.until_members(are_mixed)
    await through_the_standby(cluster, "master-1")
    await cluster.hand_over("master-2", "master-1")
    await cluster.train()
    await cluster.until_members(are_mixed)

    await cluster.stop("host-2")
    await cluster.until_members(lambda members: {*members.trainers, *members.pservers} == {first})
    await cluster.train()
    found = await cluster.ends()
    await cluster.stop("host-1", "master-1")
    check(found, undisturbed)


async def through_the_standby(cluster: Cluster, standby: str) -> None:
    """A page that was opened there shows what the leader says."""
    assert await cluster.leader() != standby
    for path in ("/v1/jobs", "/v1/jobs/servers", "/v1/pool", "/v1/jobs/exchange/members"):
        there, here = await cluster.ask("GET", path, at=standby), await cluster.ask("GET", path)
        assert there.keys() == here.keys(), path
