"""Whom a parameter server takes pushes of: members of the job, in generations that etcd knows. Nobody else
moves its fence."""

from __future__ import annotations

import pytest

from tests.equipment.waiting import until
from tests.pserver_service.checkpoints import parts
from tests.pserver_service.checkpoints.cluster import PserverCluster, run_scenario, stream
from tests.pserver_service.jobs import pulled
from trireme_shared.protocol.errors import NotReady, StaleGeneration
from trireme_shared.protocol.records import MasterAddress
from trireme_shared.protocol.records.step import StepRecord
from trireme_shared.protocol.wire.messages import PullRequest, PushBlock

BEYOND = 1 << 60


def fenced(scenario, tmp_path):
    async def opened():
        cluster = PserverCluster(str(tmp_path), pservers=1)
        await cluster.open()
        await scenario(cluster, cluster.nodes[0])

    run_scenario(opened)


async def push(cluster, node, lane=0, **fields):
    gradients = parts.gradient(cluster.layout, 0, lane)
    header = parts.push_header(0, lane, **fields)
    lanes = (lane, lane + 1)
    items = [
        (PushBlock(block=n, lanes=lanes, count=3), parts.bytes_view(gradients[n]))
        for n in node.pserver.store.blocks
    ]
    return await node.pserver.push(header, stream(items))


async def everybody_pushes(cluster, node):
    """The first step, by the trainer that is a member."""
    for lane in range(parts.LANES):
        assert not (await push(cluster, node, lane, generation=cluster.state.generation)).refused
    assert (node.pserver.store.lowest, node.pserver.store.highest) == (1, 1)


def test_a_push_ahead_of_etcd_has_to_wait_and_fences_nobody(tmp_path):
    async def scenario(cluster, node):
        with pytest.raises(NotReady, match=rf"generation {BEYOND} .* ahead of 1, .* push again"):
            await push(cluster, node, generation=BEYOND)
        assert node.pserver.generation <= 1
        await everybody_pushes(cluster, node)

    fenced(scenario, tmp_path)


def test_a_push_is_taken_once_etcd_has_its_generation(tmp_path):
    async def scenario(cluster, node):
        with pytest.raises(NotReady):
            await push(cluster, node, generation=2)
        await cluster.write_state(cluster.state.model_copy(update={"generation": 2}))
        await until(lambda: node.directory.state.generation == 2, "it has read the new generation")
        await everybody_pushes(cluster, node)
        with pytest.raises(StaleGeneration, match="generation 1 is stale: pserver-0 has seen 2"):
            await push(cluster, node, generation=1)

    fenced(scenario, tmp_path)


def test_a_pull_fences_nobody(tmp_path):
    async def scenario(cluster, node):
        blocks = tuple(node.pserver.store.blocks)
        _, end = await pulled(
            node.pserver, PullRequest(job=parts.JOB, generation=BEYOND, version=0, blocks=blocks)
        )
        assert end.code == "OK"
        await everybody_pushes(cluster, node)

    fenced(scenario, tmp_path)


def test_no_frame_raises_the_term_above_the_masters(tmp_path):
    async def scenario(cluster, node):
        blocks = tuple(node.pserver.store.blocks)
        request = PullRequest(job=parts.JOB, generation=1, term=BEYOND, version=0, blocks=blocks)
        for term, expected in ((None, 0), (7, 7), (None, 7)):
            if term is not None:
                await cluster.etcd.put(
                    cluster.keys.master_address, MasterAddress(url="http://m", term=term).to_bytes()
                )
                await until(lambda: node.directory.master is not None, "it knows the master")
            await pulled(node.pserver, request)
            await push(cluster, node, term=BEYOND)
            assert (await node.pserver.info()).term == expected

    fenced(scenario, tmp_path)


def test_initial_blocks_fence_nobody_beyond_etcd(tmp_path):
    async def scenario(cluster, node):
        node.pserver.store = None
        header = parts.header_of(cluster.layout).model_copy(
            update={"generation": BEYOND, "record": StepRecord(version=0, positions=())}
        )
        await node.pserver.init(header, stream([]))
        assert node.pserver.generation == 1

    fenced(scenario, tmp_path)


@pytest.mark.parametrize("generation", [0, 1])
def test_pushes_of_who_is_no_member_are_refused(tmp_path, generation):
    async def scenario(cluster, node):
        with pytest.raises(
            StaleGeneration,
            match="'stranger' is no member in generation 1: register, and read the lanes again",
        ):
            await push(cluster, node, trainer="stranger", generation=generation)
        await everybody_pushes(cluster, node)

    fenced(scenario, tmp_path)


def test_a_member_that_left_is_refused_before_the_next_push_of_the_others(tmp_path):
    async def scenario(cluster, node):
        assert (await push(cluster, node, trainer="t", generation=1)).applied
        await cluster.write_state(cluster.state.model_copy(update={"generation": 2}), trainers=("other",))
        await until(lambda: node.directory.state.generation == 2, "it has read the new generation")
        with pytest.raises(StaleGeneration, match="'t' is no member in generation 2"):
            await push(cluster, node, lane=1, trainer="t", generation=1)
        assert (await push(cluster, node, lane=1, trainer="other", generation=2)).applied

    fenced(scenario, tmp_path)
