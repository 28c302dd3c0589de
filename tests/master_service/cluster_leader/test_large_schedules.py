"""Many jobs start at once: more changes than fit into one transaction. Nothing is told twice, nothing is too
large."""

from __future__ import annotations

import asyncio
from collections import Counter

import master_service.cluster.term as cluster_term
from tests.equipment.replaced import replaced
from tests.equipment.virtual_loop import run_virtually
from tests.equipment.waiting import until
from tests.master_service.many_jobs import Jobs, job_of
from trireme_shared.protocol.records.cluster import Standing
from trireme_shared.protocol.records.datasets import Npy

JOBS = 100


async def started_at_once(jobs: Jobs, **values: object) -> list[tuple[str, str]]:
    """Jobs were created while there was no pool. A new leader finds them and the pool. Its events: name and
    job."""
    async with jobs.leading("m1") as leader:
        for number in range(JOBS):
            await leader.create_job(job_of(f"j{number}", **values), None)
    async with jobs.pool(2 * JOBS, JOBS):
        await asyncio.sleep(1.0)  # they register
        async with jobs.leading("m2") as leader:
            await until(
                lambda: all(job.standing is Standing.ACTIVE for job in leader.state.jobs.values()),
                "all jobs to start",
            )
            await until(lambda: len(leader.state.assignments) == 3 * JOBS, "all members to be assigned")
            return [(event.name, str(event.fields.get("job"))) for event in leader.events.after(0, 10_000)]


def test_each_event_of_a_schedule_that_takes_several_transactions_is_told_once() -> None:
    async def main() -> None:
        plans = 0
        original = cluster_term.schedule

        def counted(*arguments):
            nonlocal plans
            planned = original(*arguments)
            plans += len(planned.changes) > cluster_term.MAX_CHANGES
            return planned

        with replaced(cluster_term, "schedule", counted):
            told = Counter(await started_at_once(Jobs(tasks=1000)))
        assert {event: count for event, count in told.items() if event[0] == "job_started"} == {
            ("job_started", f"j{number}"): 1 for number in range(JOBS)
        }
        assert plans == 1, "it is made once, and written in several transactions"

    run_virtually(main)


def test_jobs_with_large_specs_start_at_once_too() -> None:
    """Their records do not fit into one transaction, although their number does."""

    async def main() -> None:
        files = [f"s3://bucket/{'folder' * 20}/{number}.npy" for number in range(200)]
        await started_at_once(Jobs(tasks=1000), dataset=Npy(*files))

    run_virtually(main)
