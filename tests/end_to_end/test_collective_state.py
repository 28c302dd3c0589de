"""A job changes its strategy between runs, with members killed in both: the bits of a job that nobody
disturbed."""

from __future__ import annotations

import pytest

from tests.end_to_end.local_cluster import (
    EPOCHS,
    STEPS,
    cluster_of,
    completed,
    reach_step,
    same_bits,
    spec_of,
)
from trireme_shared.protocol.records import Strategy

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240), pytest.mark.soak]


@pytest.mark.parametrize("first", list(Strategy))
async def test_a_job_goes_on_with_the_other_strategy_to_the_same_bits(tmp_path, undisturbed, first):
    (second,) = set(Strategy) - {first}
    for strategy, epochs in ((first, EPOCHS // 2), (second, EPOCHS)):
        pservers = 0 if strategy is Strategy.COLLECTIVE else 2
        spec = spec_of(
            tmp_path, strategy=strategy, pservers=pservers, epochs=epochs, checkpoint_every_steps=5
        )
        async with cluster_of(spec, tmp_path) as cluster:
            await reach_step(cluster, STEPS * epochs // EPOCHS - 10)
            cluster.kill("trainer-0")
            found = await completed(cluster)
    assert same_bits(found, undisturbed)


async def test_all_trainers_may_die_at_once(tmp_path, undisturbed):
    spec = spec_of(tmp_path, strategy=Strategy.COLLECTIVE, pservers=0, checkpoint_every_steps=5)
    async with cluster_of(spec, tmp_path) as cluster:
        await reach_step(cluster, STEPS // 2)
        for number in range(spec.trainers):
            cluster.kill(f"trainer-{number}")
        assert same_bits(await completed(cluster), undisturbed)
        assert cluster.directory.state.timeline > 0
