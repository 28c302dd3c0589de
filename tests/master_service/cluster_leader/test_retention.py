"""A leader deletes jobs whose retention is over, and finishes deletions that another one has begun."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from tests.equipment.virtual_loop import run_virtually
from tests.equipment.waiting import until
from tests.master_service.many_jobs import Jobs, job_of
from trireme_shared.platform.runtime import clock
from trireme_shared.protocol.errors import Conflict, StorageUnreachable
from trireme_shared.protocol.records.cluster import Standing


def in_storage(name: str) -> Any:
    job = job_of(name)
    return job.model_copy(
        update={"spec": job.spec.model_copy(update={"storage": f"memory://cluster/{name}"})}
    )


def test_jobs_are_deleted_with_their_files_after_the_retention_and_those_elsewhere_keep_theirs() -> None:
    async def main() -> None:
        jobs, removed = Jobs(), []

        async def remove(spec: Any) -> None:
            removed.append(spec.job)

        async with jobs.leading(remove_files=remove, job_retention_s=0.001) as leader, jobs.pool(2, 1):
            await leader.create_job(in_storage("a"), None)
            await leader.create_job(job_of("b"), None)
            await until(lambda: not leader.state.jobs, "both jobs to end and to be deleted", 300)
            assert removed == ["a"]
            for name in "ab":
                assert not (await jobs.etcd.range(jobs.keys.keys_of(name).prefix, prefix=True)).kvs
                assert await jobs.job(name) is None

    run_virtually(main)


def test_nothing_is_deleted_by_itself_without_a_retention() -> None:
    async def main() -> None:
        jobs = Jobs()
        async with jobs.leading() as leader, jobs.pool(2, 1):
            await leader.create_job(job_of("a"), None)
            await until(lambda: leader.state.job("a").standing is Standing.COMPLETED, "the job to end")
            await asyncio.sleep(1000)
            assert list(leader.state.jobs) == ["a"]

    run_virtually(main)


def test_a_deletion_whose_files_could_not_be_deleted_is_finished_by_the_next_leader() -> None:
    async def main() -> None:
        jobs, removed = Jobs(), []

        async def fail(spec: Any) -> None:
            raise StorageUnreachable("no route")

        async def remove(spec: Any) -> None:
            removed.append(spec.job)

        async with jobs.leading(remove_files=fail) as leader:
            await leader.create_job(in_storage("a"), None)
            await leader.cancel_job("a")
            with pytest.raises(StorageUnreachable):
                await leader.delete_job("a")
            assert leader.state.job("a").wanted == "delete"
            with pytest.raises(Conflict, match="is being deleted"):
                await leader.resume_job("a")
        async with jobs.leading("m2", remove_files=remove) as leader:
            await until(lambda: not leader.state.jobs, "the deletion to be finished")
            assert removed == ["a"]

    run_virtually(main)


def test_a_deletion_is_answered_also_if_its_files_take_longer_than_the_leader_waits_to_finish_one() -> None:
    """The loop that finishes deletions which another leader has begun found this one, too, and was faster:
    its user heard that there is no such job."""

    async def main() -> None:
        jobs, removed = Jobs(), []

        async def slowly(spec: Any) -> None:
            await asyncio.sleep(60)
            removed.append(spec.job)

        async with jobs.leading(remove_files=slowly) as leader:
            await leader.create_job(in_storage("a"), None)
            await leader.cancel_job("a")
            first, second = await asyncio.gather(leader.delete_job("a"), leader.delete_job("a"))
            assert first.job == second.job == "a"
            assert not leader.state.jobs
            assert removed == ["a"]

    run_virtually(main)


def test_a_job_that_its_user_deletes_just_before_its_turn_is_told_of_by_nobody() -> None:
    """The list of those whose retention is over is older than the deletion: the job counted as one that could
    not be deleted, and its user read so."""

    async def main() -> None:
        jobs, removed = Jobs(), []

        async def remove(spec: Any) -> None:
            removed.append(spec.job)
            if len(removed) == 1:  # both are due, and this one is the first
                await leader.delete_job("b" if spec.job == "a" else "a")

        async with jobs.leading(remove_files=remove, job_retention_s=0.001) as leader:
            for name in "ab":
                await leader.create_job(in_storage(name), None)
                await leader.cancel_job(name)
            await until(lambda: not leader.state.jobs, "both jobs to be deleted", 300)
            assert sorted(removed) == ["a", "b"]
            await asyncio.sleep(30)
            assert not [event for event in leader.events.after(0, 1000) if event.name == "job_not_deleted"]

    run_virtually(main)


class LibraryError(Exception):
    """What a storage's library raises: neither an OSError nor one of ours."""


@pytest.mark.parametrize("error", [LibraryError("surprise"), OverflowError("too large"), OSError("no route")])
def test_a_storage_that_raises_anything_does_not_end_the_leader_and_its_job_is_deleted_later(
    error: Exception,
) -> None:
    """The wish to delete is in etcd: each leader in turn met the error, and ended."""

    async def main() -> None:
        jobs, tries = Jobs(), list[float]()

        async def remove(spec: Any) -> None:
            tries.append(clock.monotonic())
            if spec.job == "a" and len(tries) < 4:
                raise error

        async with jobs.leading(remove_files=remove) as leader:
            term = leader.term
            await leader.create_job(in_storage("a"), None)
            await leader.cancel_job("a")
            with pytest.raises(type(error)):
                await leader.delete_job("a")
            await until(lambda: not leader.state.jobs, "the job to be deleted after all", 1000)
            assert leader.term is term
            _, second, third = (later - before for before, later in pairwise(tries))
            assert third > 1.5 * second, "each time later"
            told = [
                event.message for event in leader.events.after(0, 1000) if event.name == "job_not_deleted"
            ]
            assert len(told) == 2
            assert f"{type(error).__name__}: {error}" in told[0]

    run_virtually(main)
