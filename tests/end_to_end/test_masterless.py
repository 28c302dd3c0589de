"""Real processes without any master: the trainer that sweeps is killed, and every minibatch counts once all
the same."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, STDOUT

import pytest

from tests.end_to_end.command import command_in
from tests.end_to_end.local_cluster import END_S, EPOCHS, cluster_of, completed, same_bits, spec_of
from tests.end_to_end.scripts import RECORDS, write_script
from trainer_agent.data_plane.http import HttpPserver
from trireme.launch.cluster import LocalCluster
from trireme.view.job_address import open_job
from trireme_shared.protocol.records import MasterLock
from trireme_shared.protocol.rest import JobView

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]


async def sweeper_of(cluster: LocalCluster) -> str:
    """The child that holds the sweep lock."""
    lock = await cluster.etcd.get(cluster.directory.keys.sweep_lock)
    return MasterLock.model_validate_json(lock.value).master.rpartition("-")[0] if lock else ""


async def reach_step(cluster: LocalCluster, step: int) -> JobView:
    """The job as the address in run.json shows it, once it has done that many steps."""
    async with asyncio.timeout(END_S), open_job(cluster.url, timeout_s=END_S) as (client, name):
        while ((job := await client.get_job(name)).progress.step or 0) < step:
            assert job.phase in {"WAITING", "RUNNING", "CHECKPOINTING", "ROLLING_BACK"}, job
            await asyncio.sleep(0.05)
        return job


async def kill_the_sweeper(cluster: LocalCluster) -> None:
    """And wait for another one."""
    dead = await sweeper_of(cluster)
    cluster.kill(dead)
    async with asyncio.timeout(10):
        while await sweeper_of(cluster) in {"", dead}:
            await asyncio.sleep(0.02)
    assert cluster.deaths == {dead: 1}


async def no_master_was_there(cluster: LocalCluster) -> None:
    assert not [name for name in cluster.children if name.startswith("master")]
    assert not (await cluster.etcd.range(cluster.directory.keys.prefix + "master/", prefix=True)).kvs


async def a_checkpoint_on_demand_and_back_to_it(cluster: LocalCluster) -> None:
    """As `trireme checkpoint create` and `restore` ask for it."""
    async with asyncio.timeout(END_S), open_job(cluster.url, timeout_s=END_S) as (client, name):
        asked = await client.create_checkpoint(name, key="once", cause="a test")
        made = await client.get_operation(name, asked.operation_id, wait_s=END_S)
        assert made.state == "DONE", made
        assert made.checkpoint_id in [each.checkpoint_id async for each in client.list_checkpoints(name)]
        asked = await client.restore_checkpoint(name, made.checkpoint_id, key="back")
        back = await client.get_operation(name, asked.operation_id, wait_s=END_S)
        assert (back.state, back.step) == ("DONE", made.step), back


async def a_trainer_that_wants_a_master_is_refused(cluster: LocalCluster) -> None:
    environment = {**os.environ, "TRIREME_JOB": cluster.spec.job, "TRIREME_ETCD": cluster.embedded.url}
    argv = [sys.executable, "-m", "trainer_agent"]
    child = await asyncio.create_subprocess_exec(*argv, env=environment, stdout=PIPE, stderr=STDOUT)
    said, _ = await child.communicate()
    assert child.returncode == 1
    assert b"has dispatch: etcd" in said
    assert b"start them with `python -m trireme.masterless`" in said


async def test_an_asynchronous_job_applies_every_minibatch_once_though_its_sweeper_is_killed(tmp_path):
    spec = spec_of(tmp_path, dispatch="etcd", mode="async", global_batch_size=8, lanes=1)
    async with cluster_of(spec, tmp_path) as cluster:
        job = await reach_step(cluster, 50)
        assert job.master.master_id.startswith(await sweeper_of(cluster))
        await kill_the_sweeper(cluster)
        await completed(cluster)
        await no_master_was_there(cluster)
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
        await a_trainer_that_wants_a_master_is_refused(cluster)


async def test_without_a_master_killed_sweepers_and_pservers_change_no_bit(tmp_path, undisturbed):
    async with cluster_of(spec_of(tmp_path, slow_s=0.1, dispatch="etcd"), tmp_path) as cluster:
        await reach_step(cluster, 5)
        await kill_the_sweeper(cluster)
        await a_checkpoint_on_demand_and_back_to_it(cluster)
        timeline = cluster.directory.state.timeline
        cluster.kill("pserver-1")
        await cluster.directory.wait_for(lambda view: view.state.timeline > timeline, END_S, "the rollback")
        assert same_bits(await completed(cluster), undisturbed)
        await no_master_was_there(cluster)


async def test_the_only_trainer_of_a_masterless_job_stays_frozen_and_is_replaced(tmp_path, undisturbed):
    spec = spec_of(tmp_path, dispatch="etcd", lease_ttl_s=2.0, trainers=1, pservers=1)
    async with cluster_of(spec, tmp_path) as cluster:
        await reach_step(cluster, 5)
        cluster.kill("trainer-0", signal.SIGSTOP)
        assert same_bits(await completed(cluster), undisturbed)
        assert cluster.deaths == {"trainer-0": 1}


def test_the_commands_know_what_a_masterless_job_has_and_what_it_lacks(tmp_path):
    script = write_script(tmp_path)
    with command_in(tmp_path) as command:
        refused = command.run("run", script, "--dispatch", "etcd", "--standbys", "1")
        assert refused.code == 2
        assert "with dispatch etcd there is no master" in refused.err
        done = command.run(
            "run", script, "--dispatch", "etcd", "--trainers", "1", "--epochs", "12"
        )  # some seconds of it
        assert (done.code, "COMPLETED" in done.out) == (0, True), done.err
        assert "no master, queue in etcd+unix:///" in done.err
        assert "training loss" in done.out
