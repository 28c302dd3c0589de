"""Real processes are killed in the middle of a run; in synchronous mode not one bit of the result may
change."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from pathlib import Path

import pytest
import torch

from tests.end_to_end.local_cluster import (
    END_S,
    EPOCHS,
    STEPS,
    cluster_of,
    completed,
    reach_step,
    same_bits,
    spec_of,
)
from tests.end_to_end.scripts import OWN_LOOP, RECORDS
from trainer_agent.data_plane.http import HttpPserver
from trireme.client import AsyncClient
from trireme.launch.cluster import LocalCluster
from trireme.view.child_events import AS_ASKED, ENDS, read_events
from trireme.view.job_address import client_of
from trireme_shared.platform.security.authority import create_authority, issue
from trireme_shared.platform.security.tls import Tls
from trireme_shared.protocol.records import Phase

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]


async def test_more_trainers_and_pservers_give_the_same_bits(tmp_path, undisturbed):
    async with cluster_of(spec_of(tmp_path, trainers=3, pservers=3), tmp_path) as cluster:
        await has_used(tmp_path, "trainer-2", {"unix", "shared memory"})
        assert same_bits(await completed(cluster), undisturbed)
    assert ways(tmp_path, "trainer-2") == {"unix", "shared memory"}


async def test_a_killed_trainer_and_a_new_one_change_no_bit(tmp_path, undisturbed):
    environment = {"TRIREME_TRANSPORT": "unix"}
    async with cluster_of(spec_of(tmp_path), tmp_path, environment=environment) as cluster:
        await reach_step(cluster, STEPS // 5)
        cluster.kill("trainer-0")
        await cluster.add_trainer()
        await reach_step(cluster, 2 * STEPS // 5)
        cluster.kill("trainer-1")
        await has_used(tmp_path, "trainer-2", {"unix"})
        async with AsyncClient(await cluster.master_url()) as client:
            logs = [each.log async for each in client.list_logs(cluster.spec.job)]
            assert {"trainer-0", "trainer-1", "trainer-2", "pserver-0", "master-0"} <= set(logs)
            dead = await client.get_log(cluster.spec.job, "trainer-1", after=0)
            assert any("trainer" in line.text and line.time for line in dead.lines)
        assert same_bits(await completed(cluster), undisturbed)
        assert cluster.deaths == {"trainer-0": 1, "trainer-1": 1}
    assert ways(tmp_path, "trainer-2") == {"unix"}


async def test_trainers_killed_in_a_loop_of_their_scripts_own_change_no_bit(tmp_path, undisturbed):
    spec = spec_of(tmp_path)
    with Path(spec.script).open("a") as script:
        script.write(OWN_LOOP)
    async with cluster_of(spec, tmp_path) as cluster:
        await reach_step(cluster, STEPS // 5)
        cluster.kill("trainer-0")
        await reach_step(cluster, 2 * STEPS // 5)
        cluster.kill("trainer-1")
        found = await completed(cluster)
        assert cluster.deaths == {"trainer-0": 1, "trainer-1": 1}
    assert same_bits(found, undisturbed)
    assert same_bits(found, torch.load(Path(spec.script).with_name("after.pt"), weights_only=True))


async def test_a_killed_master_changes_no_bit(tmp_path, undisturbed):
    async with cluster_of(spec_of(tmp_path), tmp_path) as cluster:
        await reach_step(cluster, STEPS // 5)
        cluster.kill("master-0")
        assert same_bits(await completed(cluster), undisturbed)
        assert cluster.deaths == {"master-0": 1}


async def test_a_standby_takes_over_from_a_killed_master(tmp_path, undisturbed):
    async with cluster_of(spec_of(tmp_path), tmp_path, standbys=1) as cluster:
        await reach_step(cluster, STEPS // 5)
        before = await cluster.master_url()
        leader = "master-0" if await _leads(cluster, "master-0") else "master-1"
        cluster.kill(leader)
        await cluster.directory.wait_for(
            lambda view: view.master and view.master.url != before, 10, "a new leader"
        )
        assert same_bits(await completed(cluster), undisturbed)


async def test_a_killed_etcd_that_comes_back_changes_no_bit(tmp_path, undisturbed):
    async with cluster_of(spec_of(tmp_path), tmp_path) as cluster:
        await reach_step(cluster, STEPS // 5)
        cluster.kill("etcd")
        assert same_bits(await completed(cluster), undisturbed)
        assert cluster.deaths["etcd"] == 1


async def test_a_parameter_server_killed_and_one_frozen_beyond_its_lease_change_no_bit(tmp_path, undisturbed):
    async with cluster_of(spec_of(tmp_path, lease_ttl_s=2.0), tmp_path) as cluster:
        await reach_step(cluster, 5)
        cluster.kill("pserver-1")
        await rolled_back(cluster, 0)
        frozen = cluster.children["pserver-0"].pid
        cluster.kill("pserver-0", signal.SIGSTOP)
        async with asyncio.timeout(END_S):
            while any(member.pid == frozen for member in cluster.directory.pservers.values()):
                await asyncio.sleep(0.1)
        # takes its place again; or leaves, if the job goes back already
        cluster.kill("pserver-0", signal.SIGCONT)
        assert same_bits(await completed(cluster), undisturbed)
        assert (cluster.deaths["pserver-1"], cluster.deaths["pserver-0"] <= 1) == (1, True)


@pytest.mark.parametrize("tls", [pytest.param(False, marks=pytest.mark.soak), True])
async def test_over_tcp_a_killed_trainer_and_a_killed_parameter_server_change_no_bit(
    tmp_path, undisturbed, tls, monkeypatch
):
    """TLS: all have certificates, clients, too."""
    environment = {"TRIREME_TRANSPORT": "tcp"}
    if tls:
        create_authority(tmp_path / "tls")
        issue(tmp_path / "tls", "all", ("localhost", "127.0.0.1"), 1)
        ca, cert, key = (str(tmp_path / "tls" / name) for name in ("ca.pem", "all.pem", "all-key.pem"))
        for name, value in Tls(ca, cert, key, mutual=True).environment().items():
            monkeypatch.setenv(name, value)
    async with cluster_of(spec_of(tmp_path), tmp_path, environment=environment) as cluster:
        await reach_step(cluster, STEPS // 5)
        urls = [await cluster.master_url(), *(each.url for each in cluster.directory.pservers.values())]
        assert all(url.startswith("https://" if tls else "http://") for url in urls)
        cluster.kill("trainer-0")
        cluster.kill("pserver-1")
        await rolled_back(cluster, 0)
        assert same_bits(await completed(cluster), undisturbed)
        assert cluster.deaths == {"trainer-0": 1, "pserver-1": 1}
    assert ways(tmp_path, "trainer-1") == {"tcp"}


async def has_used(folder: Path, trainer: str, expected: set[str]) -> None:
    """Wait until these are among its ways."""
    async with asyncio.timeout(END_S):
        while not (folder / "run" / "logs" / f"{trainer}.log").exists() or not expected <= ways(
            folder, trainer
        ):
            await asyncio.sleep(0.05)


def ways(folder: Path, trainer: str) -> set[str]:
    """Over what a trainer opened streams, and whether payloads went by them or lay in shared memory."""
    lines = (folder / "run" / "logs" / f"{trainer}.log").read_text().splitlines()
    events = [json.loads(line) for line in lines if line.startswith("{")]
    over = {event["over"] for event in events if event["event"] == "stream_open"}
    return over | {"shared memory" for event in events if event["event"] == "memory_shared"}


async def test_members_that_are_asked_to_leave_hand_over_first_and_change_no_bit(tmp_path, undisturbed):
    """SIGTERM to a trainer, the leading master and a parameter server. No member waits until a lease (30 s)
    expires."""
    async with cluster_of(
        # lane 0 may move to trainer-0, which comes back, and carry the request a second time: three
        # checkpoints
        spec_of(tmp_path, lease_ttl_s=30.0, checkpoint_every_epochs=1000, keep_checkpoints=5),
        tmp_path,
        standbys=1,
    ) as cluster:
        await reach_step(cluster, STEPS // 10)
        cluster.kill("trainer-0", signal.SIGTERM)
        leader = "master-0" if await _leads(cluster, "master-0") else "master-1"
        before = await cluster.master_url()
        cluster.kill(leader, signal.SIGTERM)
        await cluster.directory.wait_for(
            lambda view: view.master and view.master.url != before, 5, "a new leader"
        )
        await reach_step(cluster, STEPS // 5)
        began = asyncio.get_running_loop().time()
        cluster.kill("pserver-1", signal.SIGTERM)
        await rolled_back(cluster, 0)
        assert asyncio.get_running_loop().time() - began < 25
        job = cluster.spec.job
        async with client_of(await cluster.master_url()) as client:
            steps = {checkpoint.step async for checkpoint in client.list_checkpoints(job)}
            went_back = [
                event for event in (await client.list_events(job)).events if event.name == "rolled_back"
            ]
        assert went_back[0].fields["step"] >= STEPS // 5, "to what was saved as it left"
        assert {0, went_back[0].fields["step"]} <= steps
        assert same_bits(await completed(cluster), undisturbed)
        assert cluster.deaths == {"trainer-0": 1, leader: 1, "pserver-1": 1}
    events = read_events(tmp_path / "run")
    assert {event["cause"] for event in events if event["what"] in ENDS} == {AS_ASKED}


async def rolled_back(cluster: LocalCluster, timeline: int) -> None:
    """Until training goes on in a later timeline."""

    def goes_on(view) -> bool:
        return view.state is not None and view.state.timeline > timeline and view.state.phase is Phase.RUNNING

    await cluster.directory.wait_for(goes_on, END_S, "a rollback")


async def test_a_frozen_trainer_is_left_behind_and_changes_no_bit(tmp_path, undisturbed):
    async with cluster_of(spec_of(tmp_path, lease_ttl_s=2.0), tmp_path) as cluster:
        await reach_step(cluster, STEPS // 5)
        cluster.kill("trainer-1", signal.SIGSTOP)
        try:
            assert same_bits(await completed(cluster), undisturbed)
        finally:
            cluster.kill("trainer-1", signal.SIGCONT)


async def test_members_that_stay_frozen_are_replaced_and_change_no_bit(tmp_path, undisturbed):
    """The only parameter server and the only trainer: nobody could take their place, and nobody wakes them
    up."""
    async with cluster_of(spec_of(tmp_path, lease_ttl_s=2.0, trainers=1, pservers=1), tmp_path) as cluster:
        await reach_step(cluster, 5)
        for name in ("pserver-0", "trainer-0"):
            cluster.kill(name, signal.SIGSTOP)
            async with asyncio.timeout(20):
                while not cluster.deaths[name]:
                    await asyncio.sleep(0.05)
        assert same_bits(await completed(cluster), undisturbed)
        assert cluster.deaths == {"pserver-0": 1, "trainer-0": 1}
    told = [event["cause"] for event in read_events(tmp_path / "run") if event["what"] == "lost_lease"]
    assert all(re.fullmatch(r"frozen or cut off for [5-9] s", cause) for cause in told), told
    assert len(told) == 2


async def test_an_asynchronous_job_applies_every_minibatch_exactly_once_though_a_trainer_is_killed(tmp_path):
    spec = spec_of(tmp_path, mode="async", global_batch_size=8, lanes=1)
    async with cluster_of(spec, tmp_path) as cluster:
        await reach_step(cluster, 50)
        cluster.kill("trainer-1")
        await completed(cluster)
        assert cluster.deaths["trainer-1"] == 1
        for member in cluster.directory.pservers.values():
            pserver = HttpPserver(member, "")
            try:
                info = await pserver.info()
            finally:
                await pserver.close()
            assert info.updates == info.blocks * EPOCHS * RECORDS // 8
            for epoch in info.ledger:
                assert (epoch.applied_lowest, epoch.applied_highest) == (RECORDS // 8, RECORDS // 8)
                assert (epoch.tasks_closed, epoch.tasks_open) == (RECORDS // 16, 0)


async def _leads(cluster: LocalCluster, name: str) -> bool:
    async with client_of(await cluster.master_url()) as client:
        return (await client.get_job(cluster.spec.job)).master.master_id.startswith(f"{name}-")
