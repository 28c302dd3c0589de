"""A cluster whose masters and hosts of real processes are of two versions, and whose jobs have members of
both: they have the bits of a job that nobody disturbed, and a leader again within a lease."""

from __future__ import annotations

import pytest
import torch

from tests.end_to_end.cluster_command import script_in
from tests.end_to_end.versions import (
    CREATED,
    STRATEGIES,
    Cluster,
    Members,
    check,
    cluster,
    submit_both,
    trees,
)
from tests.equipment.etcd.real import embedded_etcd

__all__ = ["cluster", "embedded_etcd", "trees"]

pytestmark = [pytest.mark.processes, pytest.mark.soak, pytest.mark.timeout(1800)]

CONFLICT = 409
USAGE = 2  # exit code
SLOW_S = 2.0  # a job trains until everything is done to it, also on a busy machine


def are_mixed(members: Members) -> bool:
    return set(members.trainers) == {"older", "newer"}


BOTH = [("older", "newer"), ("newer", "older")]


@pytest.mark.parametrize("versions", BOTH, ids="-".join)
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
    await cluster.change_places("host-1", "drain")
    await cluster.until_members(lambda members: {*members.trainers, *members.pservers} == {second})
    await cluster.stop("host-1")
    await cluster.train()

    await cluster.host("host-1", first)
    await cluster.change_places("host-1", "undrain")
    await cluster.until_members(are_mixed)
    for command in ("members", "tasks"):
        told = await cluster.command(first, command, "servers")
        assert told.code == 0, told
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


@pytest.mark.parametrize("versions", BOTH, ids="-".join)
async def test_what_a_leader_of_one_version_begins_the_other_one_finishes(
    cluster: Cluster, versions: tuple[str, str], undisturbed: dict[str, torch.Tensor]
) -> None:
    first, second = versions
    await cluster.master("master-1", first)
    await cluster.host("host", first)
    await submit_both(cluster, SLOW_S)
    await cluster.train()
    await cluster.master("master-2", second)
    for name in STRATEGIES:
        await cluster.ask("POST", f"/v1/jobs/{name}/pause")
    await cluster.hand_over("master-1", "master-2")
    for name in STRATEGIES:
        await cluster.until(name, lambda job: bool(job["standing"] == "PAUSED"))
        again = await cluster.submit_again(name)
        if second == "newer":
            assert again.status_code == CREATED, again.text
            assert again.json()["standing"] == "PAUSED"
        else:  # it does not find the other's answer (docs/upgrades.md)
            assert again.status_code == CONFLICT, again.text
        await cluster.ask("POST", f"/v1/jobs/{name}/resume")
    await cluster.train()

    await cluster.master("master-1", first)
    await cluster.hand_over("master-2", "master-1")
    await cluster.train()
    if first == "newer":
        for name in STRATEGIES:
            found = (await cluster.ask("GET", f"/v1/jobs/{name}/operations"))["operations"]
            assert "PAUSE" in [each["kind"] for each in found]
            assert "RUNNING" not in [each["state"] for each in found], found
    found = await cluster.ends()
    await cluster.stop("host", "master-1")
    check(found, undisturbed)


@pytest.mark.parametrize("versions", BOTH, ids="-".join)
async def test_a_command_of_another_version_than_the_leader_says_what_it_cannot_read(
    cluster: Cluster, versions: tuple[str, str]
) -> None:
    """As docs/upgrades.md tells: between these two versions jobs have another form in REST."""
    leads, asks = versions
    await cluster.master("master", leads)
    await cluster.ask("GET", "/v1/jobs")
    script = script_in(cluster.folder)
    sent = await cluster.command(asks, "submit", script, "--name", "one")
    assert sent.code == USAGE
    assert "answered 201 with no" in sent.err
    assert (await cluster.job("one"))["standing"] == "QUEUED"
    for command in ("jobs", "status one"):
        told = await cluster.command(asks, *command.split())
        assert told.code == USAGE
        assert "of a version like this client's" in told.err
    assert (await cluster.command(asks, "pool")).code == 0
    assert "WAITS_FOR_MEMBERS" in (await cluster.command(asks, "explain", "one")).out
    paused = await cluster.command(asks, "pause", "one")
    standing = (await cluster.job("one"))["standing"]
    assert paused.code == USAGE
    if asks == "older":
        assert ("answered 202 with no" in paused.err, standing) == (True, "PAUSED")
    else:
        assert ("query.wait_s: is not known" in paused.err, standing) == (True, "QUEUED")
    await cluster.stop("master")
