"""Events of jobs and of the cluster by REST."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from shared.records.cluster import Standing
from tests.equipment.virtual_loop import run_virtually
from tests.equipment.waiting import until
from tests.master_service.api.client import check_problem, client_of
from tests.master_service.many_jobs import Jobs, job_of


async def names_after(client: httpx.AsyncClient, path: str, after: int, **query: Any) -> tuple[list[str], int]:
    answer = await client.get(path, params={"after": after, **query})
    assert answer.status_code == 200, answer.text
    page = answer.json()
    found = [event["event_id"] for event in page["events"]]
    assert found == list(range(found[0], found[0] + len(found))) if found else page["next_after"] == after
    assert not after or not found or found[0] == after + 1
    return [event["name"] for event in page["events"]], page["next_after"]


def test_events_of_a_job_are_there_before_while_and_after_it_is_led_and_those_of_the_cluster_outlive_its_leader() -> (
    None
):
    async def main() -> None:
        jobs = Jobs()
        async with jobs.leading("m1") as leader, client_of(leader) as client:
            await leader.create_job(job_of("a"), None)
            names, cluster_cursor = await names_after(client, "/v1/cluster/events", 0)
            assert names == ["leader_elected", "job_created"]
            assert await names_after(client, "/v1/jobs/a/events", 0) == ([], 0)
            check_problem(await client.get("/v1/jobs/b/events"), 404, "NOT_FOUND")
            check_problem(await client.get("/v1/cluster/events?after=3"), 410, "CURSOR_EXPIRED")
        async with jobs.leading("m2") as leader, client_of(leader) as client:
            waiting = asyncio.ensure_future(names_after(client, "/v1/jobs/a/events", 0, wait_s=30))
            await asyncio.sleep(3)
            async with jobs.pool(2, 1):
                names, begun = await waiting
                assert names[0] == "master_elected"
                await until(lambda: leader.state.job("a").standing is Standing.COMPLETED, "the job to end")
                await until(lambda: not leader.term.jobs, "its term to end")
                rest, cursor = await names_after(client, "/v1/jobs/a/events", begun)
                assert [name for name in names + rest if name == "job_completed"] == ["job_completed"]
                assert await names_after(client, "/v1/jobs/a/events", cursor, wait_s=3) == ([], cursor)
                names, _ = await names_after(client, "/v1/cluster/events", cluster_cursor)
                assert names[0] == "leader_elected"
                assert {"job_started", "job_completed"} <= set(names)

    run_virtually(main)
