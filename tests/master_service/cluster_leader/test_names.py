"""One etcd has a cluster, runs and communicators: a name is of one kind, and nobody deletes another kind's
keys."""

from __future__ import annotations

import pytest

from tests.equipment.virtual_loop import run_virtually
from tests.equipment.waiting import until
from tests.master_service.cluster import spec_of
from tests.master_service.many_jobs import Jobs, job_of
from trireme_shared.protocol.errors import Conflict
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import JobState, Phase
from trireme_shared.protocol.records.cluster import Standing


async def begin_run(jobs: Jobs, name: str) -> Keys:
    keys = jobs.keys.keys_of(name)
    await jobs.etcd.put(keys.spec, spec_of(job=name, storage=f"/runs/{name}").to_bytes())
    await jobs.etcd.put(keys.state, JobState(phase=Phase.FAILED, reason="a run's").to_bytes())
    return keys


async def values_below(jobs: Jobs, prefix: str) -> dict[str, bytes]:
    return {kv.key: kv.value for kv in (await jobs.etcd.range(prefix, prefix=True)).kvs}


def test_a_job_gets_no_name_that_a_run_or_a_communicator_uses() -> None:
    async def main() -> None:
        jobs = Jobs()
        await begin_run(jobs, "a")
        lease = await jobs.etcd.grant(3600)
        await jobs.etcd.put(jobs.keys.keys_of("b").collective_member("x"), b"{}", lease.id)
        async with jobs.leading() as leader:
            with pytest.raises(Conflict, match="the name a is in use: it is a run"):
                await leader.create_job(job_of("a"), None)
            with pytest.raises(Conflict, match="the name b is in use: it is a communicator"):
                await leader.create_job(job_of("b"), None)
            await lease.revoke()
            await leader.create_job(job_of("b"), None)

    run_virtually(main)


@pytest.mark.parametrize("epoch", [0, 1])
def test_whoever_deletes_or_resumes_a_job_changes_nothing_of_a_run_with_its_name(epoch: int) -> None:
    """Earlier versions let a job have a run's name."""

    async def main() -> None:
        jobs = Jobs()
        keys = await begin_run(jobs, "a")
        before = await values_below(jobs, keys.prefix)
        failed = job_of("a").with_fields(standing=Standing.FAILED, reason="another spec", epoch=epoch)
        await jobs.etcd.put(jobs.keys.job("a"), failed.to_bytes())
        async with jobs.leading() as leader:
            with pytest.raises(Conflict, match="the name a is in use: it is a run"):
                await leader.resume_job("a")
            await leader.delete_job("a")
            assert await jobs.job("a") is None
            assert await values_below(jobs, keys.prefix) == before

    run_virtually(main)


def test_keys_of_a_communicator_stay_when_the_job_with_its_name_is_deleted() -> None:
    async def main() -> None:
        jobs = Jobs()
        keys = jobs.keys.keys_of("a")
        lease = await jobs.etcd.grant(3600)
        async with jobs.leading() as leader, jobs.pool(2, 1):
            await leader.create_job(job_of("a"), None)
            for key in (keys.collective_lock, keys.collective_member("x")):
                await jobs.etcd.put(key, b"{}", lease.id)
            await jobs.etcd.put(keys.collective_epoch, b"{}")
            await until(lambda: leader.state.job("a").standing is Standing.COMPLETED, "the job to end")
            await until(lambda: not leader.term.jobs, "the term of the job to end")
            await leader.delete_job("a")
            left = {keys.collective_lock, keys.collective_member("x"), keys.collective_epoch}
            assert set(await values_below(jobs, keys.prefix)) == left

    run_virtually(main)


def test_what_a_communicator_without_members_left_goes_with_the_job() -> None:
    async def main() -> None:
        jobs = Jobs()
        keys = jobs.keys.keys_of("a")
        async with jobs.leading() as leader:
            await leader.create_job(job_of("a"), None)
            await jobs.etcd.put(keys.collective_epoch, b"{}")
            await leader.cancel_job("a")
            await leader.delete_job("a")
            assert await values_below(jobs, keys.prefix) == {}

    run_virtually(main)


def test_keys_of_a_run_called_jobs_are_no_jobs_of_the_cluster() -> None:
    """Earlier versions took that name."""

    async def main() -> None:
        jobs = Jobs()
        run = Keys("jobs", jobs.keys.root)
        for key in (run.spec, run.state, run.pserver(0)):
            await jobs.etcd.put(key, b"of a run")
        async with jobs.leading() as leader:
            assert leader.state.jobs == {}

    run_virtually(main)
