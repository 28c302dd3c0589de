"""The leader of a cluster: jobs start, end, pause and go on; another leader goes on where this one was."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from master_service.cluster import leader as leader_module
from master_service.cluster.leader import ClusterMaster
from master_service.core.decisions import cluster_jobs
from tests.equipment.replaced import replaced
from tests.equipment.virtual_loop import run_virtually
from tests.equipment.waiting import until
from tests.master_service.many_jobs import Jobs, job_of
from trireme_shared.platform.runtime import clock
from trireme_shared.protocol.errors import Conflict, DatasetError, NotFound, NotLeader
from trireme_shared.protocol.records import JobSpec
from trireme_shared.protocol.records.cluster import JobSchedule, Source, Standing
from trireme_shared.protocol.times import instant


async def paused(leader: ClusterMaster) -> None:
    """Pause job a; its members are free then."""
    await leader.pause_job("a")
    await until(lambda: leader.state.job("a").standing is Standing.PAUSED, "the pause")
    await until(lambda: not leader.state.assignments, "the members to be free")


def test_a_job_starts_when_the_pool_has_its_members_and_ends_and_its_keys_go_with_it() -> None:
    async def main() -> None:
        jobs = Jobs()
        async with jobs.leading() as leader:
            created = await leader.create_job(job_of("a"), None)
            assert created.standing is Standing.QUEUED
            async with jobs.pool(2, 1):
                await until(lambda: leader.state.job("a").standing is Standing.ACTIVE, "the job to start")
                with pytest.raises(Conflict, match="a"):
                    await leader.delete_job("a")
                await until(lambda: leader.state.job("a").standing is Standing.COMPLETED, "the job to end")
                assert Counter(jobs.taken) == Counter(
                    {("a", 0, str(task)): 1 for task in range(4)} | exported("a")
                )
                await until(lambda: not leader.state.assignments, "the members to be free")
                await until(lambda: not leader.term.jobs, "the term of the job to end")
                assert await jobs.etcd.get(jobs.keys.keys_of("a").master_lock) is None
                await leader.delete_job("a")
                left = (await jobs.etcd.range(jobs.keys.keys_of("a").prefix, prefix=True)).kvs
                assert list(left) == []
                with pytest.raises(NotFound):
                    leader.find("a")

    run_virtually(main)


def exported(job: str) -> dict[tuple[str, int, str], int]:
    return {(job, 0, "export-0"): 1}


def test_two_jobs_run_at_once_with_members_of_their_own() -> None:
    async def main() -> None:
        jobs = Jobs(tasks=20)
        async with jobs.leading() as leader, jobs.pool(4, 2) as places:
            for name in ("a", "b"):
                await leader.create_job(job_of(name), None)
            await until(lambda: set(leader.term.jobs) == {"a", "b"}, "both jobs to be led")
            with pytest.raises(Conflict, match="2 jobs"):
                leader.find(None)
            for name in ("a", "b"):
                await until(
                    lambda name=name: leader.state.job(name).standing is Standing.COMPLETED, f"{name} to end"
                )
            done = Counter(job for job, _, task in jobs.taken if task.isdigit())
            assert done == {"a": 20, "b": 20}
            assert len(set(jobs.taken)) == len(jobs.taken)
            assert {job for place in places for job, _ in place.history} == {"a", "b"}

    run_virtually(main)


def test_a_paused_job_leaves_its_members_and_a_cancelled_one_ends() -> None:
    async def main() -> None:
        jobs = Jobs(tasks=40)
        async with jobs.leading() as leader, jobs.pool(2, 1):
            await leader.create_job(job_of("a"), None)
            await until(lambda: len(jobs.taken) > 4, "some tasks")
            await paused(leader)
            with pytest.raises(Conflict, match="PAUSED"):
                leader.find("a")
            await leader.create_job(job_of("b"), None)
            await until(lambda: "b" in leader.term.jobs, "the second job to be led")
            await leader.cancel_job("b")
            await until(lambda: leader.state.job("b").standing is Standing.CANCELLED, "the end of the second")
            await until(lambda: not leader.state.assignments, "the members to be free")

    run_virtually(main)


def test_the_next_leader_goes_on_with_every_job_and_the_one_before_answers_no_more() -> None:
    async def main() -> None:
        jobs = Jobs(tasks=40)
        async with jobs.pool(3, 2), jobs.leading("m2") as _:
            pass
        async with jobs.pool(3, 2):
            async with jobs.leading("m1") as first:
                for name in ("a", "b"):
                    await first.create_job(job_of(name), None)
                await until(lambda: len(jobs.taken) > 6, "some tasks")
            with pytest.raises(NotLeader):
                first.find("a")
            async with jobs.leading("m3") as second:
                assert set(second.state.jobs) == {"a", "b"}
                for name in ("a", "b"):
                    await until(
                        lambda name=name: second.state.job(name).standing is Standing.COMPLETED,
                        f"{name} to end",
                        300,
                    )
                done = Counter((job, task) for job, _, task in jobs.taken if task.isdigit())
                assert len(done) == 80
                assert [job.epoch for job in second.state.jobs.values()] == [1, 1]

    run_virtually(main)


def test_a_script_is_stored_once_and_goes_with_its_last_job() -> None:
    async def main() -> None:
        jobs, source = Jobs(), Source(file_name="train.py", text="print('hello')")
        async with jobs.leading() as leader:
            for name in ("a", "b"):
                job = job_of(name, script=source.script).model_copy(update={"source_digest": source.digest})
                await leader.create_job(job, source)
            assert await leader.source_of("b") == source
            for name in ("a", "b"):
                await leader.cancel_job(name)
                assert await jobs.etcd.get(jobs.keys.source(source.digest)) is not None
                await leader.delete_job(name)
            assert await jobs.etcd.get(jobs.keys.source(source.digest)) is None

    run_virtually(main)


def test_two_masters_never_lead_at_once_though_the_first_believes_it_does() -> None:
    """The lease of the first runs out unseen (etcd is cut off); what it decides then is refused."""

    async def main() -> None:
        jobs = Jobs()
        async with jobs.leading("m1") as first:
            term = first.term
            jobs.simulated.cut("m1")
            async with jobs.leading("m2") as second:
                with pytest.raises(NotLeader):
                    await first.create_job(job_of("a"), None)
                await second.create_job(job_of("a"), None)
                assert term.state.jobs == {}

    run_virtually(main)


def test_what_a_schedule_missed_while_no_leader_lived_runs_once() -> None:
    async def main() -> None:
        jobs = Jobs()
        missed = JobSchedule(
            name="n", cron="0 9 * * *", spec=job_of("n").spec, next_time="2025-01-15T09:00:00Z"
        )
        await jobs.etcd.put(jobs.keys.schedule("n"), missed.to_bytes())
        for name in ("m1", "m2"):
            async with jobs.leading(name) as leader:
                await until(lambda leader=leader: leader.state.jobs, "the job of the schedule")
                await asyncio.sleep(12)
                (job,) = leader.state.jobs
                assert leader.state.schedules["n"].last_job == job
                assert instant(leader.state.schedules["n"].next_time) > clock.wall_time()
        found = await jobs.job(job)
        assert found is not None
        assert found.spec.storage == f"memory://n/{job}"

    run_virtually(main)


def test_a_completed_job_that_another_waits_for_keeps_its_files() -> None:
    async def main() -> None:
        jobs, removed = Jobs(), []

        async def remove(spec) -> None:
            removed.append(spec.job)

        async with jobs.leading(remove_files=remove) as leader:
            spec = job_of("a").spec.model_copy(update={"storage": "memory://cluster/a"})
            await leader.create_job(job_of("a").model_copy(update={"spec": spec}), None)
            async with jobs.pool(1, 1):
                await until(lambda: leader.state.job("a").standing is Standing.COMPLETED, "the job to end")
                await until(lambda: not leader.term.jobs, "its term to end")
            # more than there are
            await leader.create_job(job_of("b", {"after": ("a",), "min_trainers": 2}), None)
            with pytest.raises(Conflict, match="job b comes after job a"):
                await leader.delete_job("a")
            assert removed == []
            await leader.cancel_job("b")
            await leader.delete_job("a")
            assert removed == ["a"]

    run_virtually(main)


def test_a_resize_to_the_first_number_of_trainers_takes_what_the_pool_gave_beyond_it() -> None:
    async def main() -> None:
        jobs = Jobs(tasks=1000)
        async with jobs.leading() as leader, jobs.pool(4, 1):
            await leader.create_job(job_of("a", trainers=2), None)
            await until(lambda: "a" in leader.term.jobs, "the job to be led")
            master = leader.term.jobs["a"].master
            await until(
                lambda: master.current_term and len(master.job.trainers.names) == 4,
                "all trainers of the pool",
            )
            asked = await master.term.operations.create_resize("", "", 2, None)
            await until(
                lambda: len(leader.state.assigned_to("a", "trainer")) == 2, "two trainers to leave", 3
            )
            done = await master.term.operations.wait(asked.operation_id, 30)
            assert (done.running, done.error_code) == (False, "")
            assert len(master.job.trainers.names) == 2, "it is done when they have left"
            asked = await master.term.operations.create_resize("", "", 3, None)
            await until(lambda: len(leader.state.assigned_to("a", "trainer")) == 3, "one trainer more", 3)
            assert not (await master.term.operations.wait(asked.operation_id, 30)).running

    run_virtually(main)


def test_a_resize_of_the_parameter_servers_alone_leaves_the_trainers_that_the_pool_gave() -> None:
    async def main() -> None:
        jobs = Jobs(tasks=1000)
        async with jobs.leading() as leader, jobs.pool(4, 2):
            await leader.create_job(job_of("a", trainers=2, checkpoint_kind="coordinated"), None)
            await until(lambda: "a" in leader.term.jobs, "the job to be led")
            master = leader.term.jobs["a"].master
            await until(
                lambda: master.current_term and len(master.job.trainers.names) == 4,
                "all trainers of the pool",
            )
            await master.term.operations.create_resize("", "", None, 2)
            await until(
                lambda: len(leader.state.assigned_to("a", "pserver")) == 2, "another parameter server"
            )
            await asyncio.sleep(10)
            assert len(leader.state.assigned_to("a", "trainer")) == 4

    run_virtually(main)


def test_a_job_with_independent_checkpoints_that_is_paused_before_its_first_one_starts_anew() -> None:
    async def main() -> None:
        jobs = Jobs(tasks=10)
        async with jobs.leading() as leader, jobs.pool(2, 1):
            await leader.create_job(job_of("a"), None)
            await until(lambda: len(jobs.taken) > 2, "some tasks")
            await paused(leader)
            await leader.resume_job("a")

            def starts_anew() -> bool:
                led = leader.term.jobs.get("a")
                return led is not None and any(
                    "training starts over" in each.message for each in led.master.events.after(0, 1000)
                )

            await until(starts_anew, "the job to start anew")
            assert leader.state.job("a").standing is Standing.ACTIVE

    run_virtually(main)


def test_what_the_users_code_has_printed_last_is_in_the_failure_of_its_job() -> None:
    async def main() -> None:
        jobs = Jobs()
        jobs.storage.error = DatasetError("mine:reader ended its process", output="counting a\nenough")
        async with jobs.leading() as leader, jobs.pool(2, 1):
            await leader.create_job(job_of("a"), None)
            await until(lambda: leader.state.job("a").standing is Standing.FAILED, "it to fail")
            failure = (await leader.state_of("a")).failure
        assert failure is not None
        assert (failure.error_type, failure.message, failure.traceback, failure.task) == (
            "DatasetError",
            "mine:reader ended its process",
            "counting a\nenough",
            "counting the dataset's records",
        )

    run_virtually(main)


def test_a_job_whose_leading_meets_a_bug_is_led_anew() -> None:
    async def main() -> None:
        jobs = Jobs()
        jobs.storage.error = RuntimeError("a bug of a storage driver")
        async with jobs.leading() as leader, jobs.pool(2, 1):
            await leader.create_job(job_of("a"), None)
            await until(lambda: leader.term.jobs, "the job to be led")
            first = leader.term.jobs["a"]
            await until(lambda: leader.term.jobs.get("a", first) is not first, "another attempt")
            jobs.storage.error = None
            await until(lambda: leader.state.job("a").standing is Standing.COMPLETED, "the job to end")

    run_virtually(main)


def test_a_request_that_its_caller_gives_up_in_mid_transaction_leaves_the_term_as_it_is() -> None:
    """REST gives a call up after 8 s. The writer was cancelled between its write and the answer, so the next
    write was refused, and the term of all jobs was over."""

    async def main() -> None:
        jobs = Jobs()
        async with jobs.leading() as leader:
            term = leader.term

            async def create(name: str) -> None:
                stamp = clock.timestamp()
                await term.writer.decide(
                    lambda state, _: cluster_jobs.create(state, job_of(name), None, stamp)
                )

            for turns in range(12):
                asking = asyncio.ensure_future(create(f"given-up-{turns}"))
                for _ in range(turns):
                    await asyncio.sleep(0)
                asking.cancel()
                await asyncio.wait([asking])
            jobs.simulated.freeze()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await create("unanswered")
            next_one = asyncio.ensure_future(create("b"))  # while that write is under way
            await asyncio.sleep(0.01)
            jobs.simulated.thaw()
            await next_one
            assert leader.term is term
            assert {"unanswered", "b"} <= set(leader.state.jobs)
            assert await jobs.job("unanswered") is not None
            for name in leader.state.jobs:
                assert await jobs.job(name) is not None

    run_virtually(main)


def test_a_job_that_cannot_be_led_is_failed_alone_with_the_error() -> None:
    async def main() -> None:
        jobs = Jobs()

        def storage(spec: JobSpec) -> Any:
            if spec.job == "poisoned":
                raise OverflowError("surprise")
            return jobs.storage

        async with jobs.leading() as leader, jobs.pool(2, 2):
            leader.storage, term = storage, leader.term
            await leader.create_job(job_of("poisoned"), None)
            await leader.create_job(job_of("b"), None)
            await until(lambda: leader.state.job("b").standing is Standing.COMPLETED, "the other one", 600)
            await until(lambda: leader.state.job("poisoned").standing is Standing.FAILED, "an end", 3000)
            assert "8 times in a row, the last time with OverflowError: surprise" in (
                leader.state.job("poisoned").reason
            )
            assert leader.term is term
            told = [event for event in leader.events.after(0, 1000) if event.name == "leader_part_failed"]
            assert "leading job poisoned failed" in told[0].message

    run_virtually(main)


@pytest.mark.parametrize("error", [OverflowError("surprise"), ValueError("surprise")])
def test_a_leader_that_cannot_take_over_steps_down_and_tries_again(error: Exception) -> None:
    async def main() -> None:
        jobs, times = Jobs(), list[float]()

        async def fail(*given: Any) -> Any:
            times.append(clock.monotonic())
            if len(times) < 4:
                raise error
            return await take_over(*given)

        take_over = leader_module.take_over
        with replaced(leader_module, "take_over", fail):
            async with jobs.leading() as leader:
                assert leader.term.lock.lease.alive
        assert len(times) == 4

    run_virtually(main)
