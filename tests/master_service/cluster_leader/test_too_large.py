"""What etcd does not take of one job or schedule ends that one alone."""

from __future__ import annotations

import asyncio

import pytest

from master_service.cluster.store import LAST_BYTES, MAX_BYTES
from tests.equipment.virtual_loop import run_virtually
from tests.equipment.waiting import until
from tests.master_service.many_jobs import Jobs, job_of
from trireme_shared.platform.runtime import clock
from trireme_shared.protocol.errors import TooLarge
from trireme_shared.protocol.records.cluster import ClusterJob, JobSchedule, Standing
from trireme_shared.protocol.records.datasets import TextLines
from trireme_shared.protocol.records.job_spec import SPEC_BYTES, check_size
from trireme_shared.protocol.times import rfc3339


def with_bytes(job: ClusterJob, size: int) -> ClusterJob:
    """The job's record has exactly this many bytes: its dataset has a long name."""
    padded = job.with_fields(spec=job.spec.with_fields(dataset=TextLines("")))
    name = "x" * (size - len(padded.to_bytes()))
    return job.with_fields(spec=job.spec.with_fields(dataset=TextLines(name)))


def test_a_spec_is_bounded_and_the_error_names_the_job_both_sizes_and_the_largest_setting() -> None:
    spec = job_of("a").spec
    check_size(spec)
    large = spec.with_fields(dataset=TextLines(*(f"s3://bucket/{number:06}.txt" for number in range(20_000))))
    with pytest.raises(
        TooLarge, match=rf"job a have \d+ bytes, at most {SPEC_BYTES} .* dataset alone"
    ) as told:
        check_size(large)
    assert "globs" in told.value.hint
    assert told.value.details["bytes"] == len(large.to_bytes())


def test_a_schedule_whose_job_does_not_fit_into_a_transaction_is_left_out_and_the_leader_stays() -> None:
    """As an earlier version took it: with its job it is twice as large."""

    async def main() -> None:
        jobs = Jobs()
        begin = clock.wall_time()
        spec = with_bytes(job_of("s"), 552 << 10).spec
        schedule = JobSchedule(name="s", cron="* * * * *", spec=spec, next_time=rfc3339(begin - 5))
        await jobs.etcd.put(jobs.keys.schedule("s"), schedule.to_bytes())
        async with jobs.leading() as leader, jobs.pool(2, 1):
            term = leader.term
            await leader.create_job(job_of("a"), None)
            await until(lambda: "do not fit" in leader.state.schedule("s").reason, "the schedule to fail")
            assert leader.state.schedule("s").next_time > schedule.next_time
            await until(lambda: leader.state.job("a").standing is Standing.COMPLETED, "the other job to end")
            assert set(leader.state.jobs) == {"a"}
            assert leader.term is term
            assert any(event.name == "schedule_failed" for event in leader.events.after(0, 100))

    run_virtually(main)


@pytest.mark.parametrize("size", [MAX_BYTES - 20, MAX_BYTES + 1000])
def test_a_job_that_grows_too_large_fails_alone(size: int) -> None:
    """Fields are added to it: its start, its reason."""

    async def main() -> None:
        jobs = Jobs()
        await jobs.etcd.put(jobs.keys.job("a"), with_bytes(job_of("a"), size).to_bytes())
        async with jobs.leading() as leader:
            term = leader.term
            await leader.create_job(job_of("b"), None)
            async with jobs.pool(2, 1):
                await until(
                    lambda: leader.state.job("a").standing is Standing.FAILED, "the large job to fail"
                )
                await until(lambda: leader.state.job("b").standing is Standing.COMPLETED, "the other to end")
            assert "too large" in leader.state.job("a").reason
            stored = await jobs.job("a")
            assert stored is not None
            assert stored.standing is Standing.FAILED
            await leader.delete_job("a")
            assert leader.term is term

    run_virtually(main)


def test_a_job_that_runs_and_grows_too_large_fails_alone_and_its_members_are_free() -> None:
    async def main() -> None:
        jobs = Jobs(tasks=1000)
        async with jobs.leading() as leader, jobs.pool(3, 1):
            term = leader.term
            await leader.create_job(job_of("a"), None)
            await until(lambda: len(jobs.taken) > 4, "some tasks")
            grown = with_bytes(leader.state.job("a"), MAX_BYTES)
            leader.state.jobs["a"] = grown  # as a version that took so much had made it
            with pytest.raises(TooLarge, match="do not fit"):
                await leader.pause_job("a")
            leader.term.jobs["a"].stop(Standing.QUEUED, "x" * 3000)
            await until(lambda: not leader.term.jobs, "the term of the job to end")
            await asyncio.sleep(60)
            assert leader.term is term

    run_virtually(main)


def test_a_record_that_can_never_be_written_again_is_unreadable() -> None:
    async def main() -> None:
        jobs = Jobs()
        await jobs.etcd.put(jobs.keys.job("a"), with_bytes(job_of("a"), LAST_BYTES).to_bytes())
        async with jobs.leading() as leader:
            assert leader.state.job("a").standing is Standing.UNREADABLE
            assert f"has {LAST_BYTES} bytes" in leader.state.job("a").reason
            await leader.delete_job("a")
            assert await jobs.job("a") is None

    run_virtually(main)
