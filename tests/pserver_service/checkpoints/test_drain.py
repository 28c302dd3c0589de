"""A parameter server is asked to leave (SIGTERM): what it saves first, and how long it may take. The test is
master and trainer."""

from __future__ import annotations

import asyncio

from tests.equipment.waiting import until
from tests.pserver_service.checkpoints.cluster import DRAIN_S, KEYS, PserverCluster, run_scenario
from trireme_shared.protocol.records import MasterAddress
from trireme_shared.protocol.records.step import CheckpointAsked


async def opened(storage, **spec):
    """Two parameter servers at version 1, a master, one trainer; only version 0 is saved."""
    cluster = PserverCluster(str(storage), checkpoint_every_steps=None, **spec)
    await cluster.open()
    await cluster.committed(0)
    await cluster.etcd.put(KEYS.master_address, MasterAddress(url="http://m", term=1).to_bytes())
    await cluster.write_state(cluster.state.model_copy(update={"generation": 2}), trainers=("t",))
    await cluster.train(0, 1)
    return cluster


async def left(node):
    """Seconds until the process is gone."""
    loop = asyncio.get_running_loop()
    begin = loop.time()
    assert await node.task is True
    return loop.time() - begin


def asked_at(version):
    return CheckpointAsked(operation="drain", attempt=1, generation=1, version=version)


def test_it_says_so_and_leaves_once_a_checkpoint_of_its_version_is_the_latest(tmp_path):
    async def scenario():
        cluster = await opened(tmp_path)
        node = cluster.nodes[1]
        node.stopping.set()
        while (await cluster.members())[1].draining is None:
            await asyncio.sleep(0.05)
        assert (await cluster.members())[1].draining == 1
        await cluster.train(1, 3, asked=asked_at(3))
        latest = await cluster.committed(3)
        assert (latest.operation, [ref.step for ref in latest.kept]) == ("drain", [3, 0])
        assert await left(node) < 1.0
        assert list(await cluster.members()) == [0]
        cluster.check_latest(latest)

    run_scenario(scenario)


def test_without_a_checkpoint_it_leaves_when_its_time_is_over(tmp_path):
    async def scenario():
        cluster = await opened(tmp_path)
        cluster.nodes[0].stopping.set()
        assert DRAIN_S <= await left(cluster.nodes[0]) < DRAIN_S + 1

    run_scenario(scenario)


def test_where_nobody_could_ask_for_a_checkpoint_or_nobody_trains_it_leaves_at_once(tmp_path):
    async def scenario(*, master, trainers, wait_s):
        cluster = await opened(tmp_path / f"{master}-{len(trainers)}-{wait_s}")
        if not master:
            await cluster.etcd.delete(KEYS.master_address)
        await cluster.write_state(cluster.state.model_copy(update={"generation": 3}), trainers=trainers)
        node = cluster.nodes[0]
        await until(lambda: node.directory.trainers.names == trainers, "it knows")
        node.stopping.set()
        assert await left(node) < wait_s

    run_scenario(lambda: scenario(master=False, trainers=("t",), wait_s=0.5))
    run_scenario(lambda: scenario(master=True, trainers=(), wait_s=0.5))


def test_what_is_being_written_is_finished_and_published_before_it_leaves(tmp_path):
    async def scenario():
        cluster = await opened(tmp_path)
        await cluster.etcd.delete(KEYS.master_address)  # the whole job is being stopped, masters first
        await cluster.train(1, 3, asked=asked_at(3))
        for node in cluster.nodes.values():
            node.stopping.set()
        assert max([await left(node) for node in cluster.nodes.values()]) < 1.0
        latest = await cluster.committed(3)
        cluster.check_latest(latest)
        assert await cluster.members() == {}

    run_scenario(scenario)


def test_it_does_not_wait_for_the_part_of_one_that_is_gone(tmp_path):
    async def scenario():
        cluster = await opened(tmp_path)
        await cluster.etcd.delete(KEYS.master_address)
        cluster.nodes[1].process.kill()
        cluster.simulated.forget("ps-1")
        await cluster.train(1, 3, asked=asked_at(3))
        while 1 in await cluster.members():
            await asyncio.sleep(0.5)
        cluster.nodes[0].stopping.set()
        assert await left(cluster.nodes[0]) < 1.0
        assert (await cluster.latest()).step == 0

    run_scenario(scenario)
