"""Embedding tables in collective jobs with real processes: no bit depends on the strategy, or on who is
killed."""

from __future__ import annotations

import asyncio
import signal

import pytest

from tests.end_to_end.local_cluster import RECORDS, cluster_of, reach_step
from tests.end_to_end.test_tables import Trained, assert_same, trained, with_tables
from trireme.launch.cluster import LocalCluster
from trireme_shared.protocol.records import Strategy

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300), pytest.mark.soak]
COLLECTIVE = {"strategy": Strategy.COLLECTIVE, "pservers": 0}
EPOCHS = 6


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """1 trainer, 1 parameter server."""
    folder = tmp_path_factory.mktemp("one")

    async def main() -> Trained:
        async with cluster_of(with_tables(folder, trainers=1, pservers=1, slow_s=0.0), folder) as cluster:
            return await trained(cluster)

    return asyncio.run(main())


async def listed(cluster: LocalCluster, count: int) -> None:
    """So many trainers are members."""
    await cluster.directory.wait_for(lambda view: len(view.trainers.names) == count, 60.0, f"{count} members")


@pytest.mark.parametrize("trainers", [1, 2, 3])
async def test_any_number_of_trainers_gives_the_bits_of_parameter_servers(tmp_path, undisturbed, trainers):
    spec = with_tables(tmp_path, **COLLECTIVE, trainers=trainers, slow_s=0.0)
    async with cluster_of(spec, tmp_path) as cluster:
        assert_same(await trained(cluster), undisturbed)


async def test_members_that_are_killed_come_back_and_cost_no_bit(tmp_path, undisturbed):
    spec = with_tables(tmp_path, **COLLECTIVE, trainers=3, slow_s=0.1)
    async with cluster_of(spec, tmp_path, standbys=1) as cluster:
        for step, victims in ((4, ["trainer-0"]), (12, ["trainer-1", "trainer-2"]), (20, ["trainer-0"])):
            await reach_step(cluster, step)
            await listed(cluster, 3)
            for victim in victims:
                cluster.kill(victim, signal.SIGKILL)
        found = await trained(cluster)
        assert sum(cluster.deaths.values()) >= 4
    assert_same(found, undisturbed)


async def test_all_members_may_die_at_once(tmp_path, undisturbed):
    spec = with_tables(tmp_path, **COLLECTIVE, trainers=2)
    async with cluster_of(spec, tmp_path) as cluster:
        await reach_step(cluster, 14)
        for number in range(2):
            cluster.kill(f"trainer-{number}", signal.SIGKILL)
        assert_same(await trained(cluster, gone_back=True), undisturbed)


@pytest.mark.parametrize("first", list(Strategy))
async def test_a_job_goes_on_with_the_other_strategy(tmp_path, undisturbed, first):
    (second,) = set(Strategy) - {first}
    for strategy, epochs in ((first, EPOCHS // 2), (second, EPOCHS)):
        pservers = 0 if strategy is Strategy.COLLECTIVE else 2
        spec = with_tables(tmp_path, strategy=strategy, pservers=pservers, epochs=epochs)
        async with cluster_of(spec, tmp_path) as cluster:
            if epochs == EPOCHS:
                found = await trained(cluster, gone_back=True)
            else:
                await cluster.wait(60.0)
    assert spec.epochs * RECORDS // 32 == 36
    assert_same(found, undisturbed)
