"""A job that failed for lack of members goes on from its newest checkpoint when it is started again, with the
same bits."""

from __future__ import annotations

import asyncio

import pytest

from tests.end_to_end.local_cluster import (
    END_S,
    STEPS,
    cluster_of,
    completed,
    ended,
    reach_step,
    same_bits,
    spec_of,
)
from trireme.launch.cluster import LocalCluster
from trireme_shared.protocol.records import FailureCause, JobState, Phase

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]
STARTS = 6  # a busy machine may need longer than the limit again


async def failed_for_lack_of_a_pserver(cluster: LocalCluster) -> JobState:
    """Kill `pserver-1` whenever it is started again, until the job gives up."""
    async with asyncio.timeout(END_S):
        while cluster.directory.state is None or not cluster.directory.state.phase.final:
            cluster.kill("pserver-1")
            await asyncio.sleep(0.05)
    return await cluster.wait(END_S)


async def test_a_job_whose_parameter_server_did_not_come_back_goes_on_where_it_was(tmp_path, undisturbed):
    spec = spec_of(tmp_path, recovery_timeout_s=3.0, checkpoint_every_steps=5)
    async with cluster_of(spec, tmp_path) as cluster:
        await reach_step(cluster, STEPS // 5)
        state = await failed_for_lack_of_a_pserver(cluster)
        saved = await cluster.saved_step()
        assert (state.phase, state.cause) == (Phase.FAILED, FailureCause.MEMBERS)
        assert "pserver-1 did not come back within recovery_timeout_s 3" in state.reason
        assert saved
    for _ in range(STARTS):
        async with cluster_of(spec, tmp_path) as cluster:
            await cluster.directory.wait_for(
                lambda view: view.state and view.state.timeline > state.timeline, END_S, "it goes back"
            )
            if (await ended(cluster)).phase is Phase.COMPLETED:
                assert same_bits(await completed(cluster), undisturbed)
                return
            assert await cluster.saved_step() >= saved, "nothing that was saved is lost"
    pytest.fail(f"not completed in {STARTS} starts")


async def test_initial_parameters_whose_checkpoint_is_damaged_are_made_again_and_give_the_same_bits(
    tmp_path, undisturbed
):
    """One parameter server can load its part, the other one cannot: both have to drop what they have."""
    async with cluster_of(spec_of(tmp_path, checkpoint_every_epochs=1000), tmp_path) as cluster:
        await reach_step(cluster, STEPS // 10)
        async with asyncio.timeout(END_S):
            while await cluster.saved_step() is None:
                await asyncio.sleep(0.05)
        part = next((tmp_path / "run" / "checkpoints").glob("*/pserver-1.*"))
        part.write_bytes(part.read_bytes()[:-1] + b"!")
        cluster.kill("pserver-0")
        assert same_bits(await completed(cluster), undisturbed)
        assert cluster.deaths["pserver-0"] == 1
        assert "pserver-1" not in cluster.deaths
        async with cluster.client(END_S) as (client, job):
            events = [event.name for event in (await client.list_events(job)).events]
    assert {"checkpoint_unusable", "started_over"} <= set(events)
