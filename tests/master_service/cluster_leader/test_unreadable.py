"""A job that the leader's version cannot read is UNREADABLE alone: the others go on, it is listed with the
reason, and it can be deleted. The next leader, of another version, goes on with it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.equipment.virtual_loop import run_virtually
from tests.equipment.waiting import until
from tests.master_service.many_jobs import Jobs, job_of
from trireme_shared.protocol.errors import Conflict, StateUnreadable
from trireme_shared.protocol.records import Mode
from trireme_shared.protocol.records.cluster import JobSchedule, Standing, TaskRun
from trireme_shared.protocol.records.state_schema import SCHEMA, StateSchema


def changed(record: Any, **values: Any) -> bytes:
    """The record with other values in its spec."""
    document = json.loads(record.to_bytes())
    document["spec"] |= values
    return json.dumps(document).encode()


UNREADABLE = [
    changed(job_of("a"), mode="semi-synchronous"),
    changed(job_of("a"), dataset={"kind": "tape", "urls": ["t"]}),
    changed(job_of("a"), lanes=3),
    changed(job_of("a"), job=None),
    b"{",
    b"[1]",
    b"\xff",
]


@pytest.mark.parametrize("value", UNREADABLE)
def test_one_unreadable_job_takes_no_other_down(value: bytes) -> None:
    async def main() -> None:
        jobs = Jobs()
        await jobs.etcd.put(jobs.keys.job("a"), value)
        async with jobs.leading() as leader, jobs.pool(2, 1):
            await leader.create_job(job_of("b"), None)
            await leader.create_job(job_of("c", {"after": ["a"]}), None)
            await until(lambda: leader.state.job("b").standing is Standing.COMPLETED, "the other job to end")
            found = leader.state.job("a")
            assert found.standing is Standing.UNREADABLE
            assert "cannot be understood" in found.reason
            assert "errors.pydantic.dev" not in found.reason
            assert leader.state.job("c").standing is Standing.QUEUED, "it waits, and is not cancelled"
            assert (await jobs.etcd.get(jobs.keys.job("a"))).value == value, "it stays as it is"
            told = [event for event in leader.events.after(0, 100) if event.name == "job_unreadable"]
            assert [event.fields["job"] for event in told] == ["a"]
            for ask in (leader.pause_job, leader.resume_job, leader.cancel_job):
                with pytest.raises(Conflict, match="UNREADABLE"):
                    await ask("a")
            with pytest.raises(Conflict, match="it is UNREADABLE"):
                await leader.create_job(job_of("a"), None)
            await leader.delete_job("a")
            assert await jobs.etcd.get(jobs.keys.job("a")) is None
            await leader.create_job(job_of("a"), None)

    run_virtually(main)


def test_what_can_be_read_of_it_is_shown_and_its_script_stays() -> None:
    async def main() -> None:
        jobs = Jobs()
        job = job_of("a", {"priority": 70}, mode=Mode.ASYNC, lanes=8).with_fields(
            number=7, create_time="2026-11-29T00:00:00Z", source_digest="f" * 64
        )
        await jobs.etcd.put(jobs.keys.job("a"), changed(job, dataset={"kind": "tape"}, exchange="pigeon"))
        async with jobs.leading() as leader:
            found = leader.state.job("a")
            assert (found.number, found.create_time, found.scheduling.priority) == (7, job.create_time, 70)
            assert (found.spec.mode, found.spec.lanes, found.spec.storage) == (
                Mode.ASYNC,
                8,
                job.spec.storage,
            )
            assert leader.state.uses_source("f" * 64) == 1

    run_virtually(main)


def test_a_job_whose_own_keys_are_unreadable_is_left_alone_and_the_next_leader_goes_on_with_it() -> None:
    async def main() -> None:
        jobs = Jobs(tasks=40)
        keys = jobs.keys.keys_of("a")
        async with jobs.pool(2, 1):
            async with jobs.leading() as leader:
                await leader.create_job(job_of("a"), None)
                await until(lambda: len(jobs.taken) > 4, "some tasks")
            before = (await jobs.etcd.get(keys.task_meta)).value
            await jobs.etcd.put(keys.task_meta, b"in another form")
            async with jobs.leading("m2") as leader:
                await leader.create_job(job_of("b"), None)
                await until(lambda: leader.state.job("a").standing is Standing.UNREADABLE, "the look at it")
                assert keys.task_meta in leader.state.job("a").reason
                await until(lambda: leader.state.job("b").standing is Standing.COMPLETED, "the other to end")
                stored = await jobs.job("a")
                assert stored is not None
                assert stored.standing is Standing.ACTIVE
            await jobs.etcd.put(keys.task_meta, before)
            async with jobs.leading("m3") as leader:
                await until(lambda: leader.state.job("a").standing is Standing.COMPLETED, "its end", 300)
        assert len({task for job, _, task in jobs.taken if job == "a" and task.isdigit()}) == 40

    run_virtually(main)


def test_an_unreadable_schedule_begins_no_job_and_can_be_deleted() -> None:
    async def main() -> None:
        jobs = Jobs()
        schedule = JobSchedule(name="s", cron="* * * * *", spec=job_of("s").spec, next_time="soon")
        await jobs.etcd.put(jobs.keys.schedule("s"), changed(schedule, mode="semi-synchronous"))
        async with jobs.leading() as leader, jobs.pool(2, 1):
            await leader.create_job(job_of("b"), None)
            await until(lambda: leader.state.job("b").standing is Standing.COMPLETED, "the job to end")
            assert leader.state.schedule("s").reason.startswith("UNREADABLE: ")
            await leader.delete_schedule("s")
            assert await jobs.etcd.get(jobs.keys.schedule("s")) is None
            assert leader.state.unreadable == []

    run_virtually(main)


def test_unreadable_keys_of_the_pool_and_of_answers_take_nothing_down() -> None:
    async def main() -> None:
        jobs = Jobs()
        for key in (
            jobs.keys.assignment("trainer", "t0"),
            jobs.keys.drain("trainer", "t1"),
            jobs.keys.answer("0" * 64),
            jobs.keys.member("trainer", "t7"),
        ):
            await jobs.etcd.put(key, b"{")
        async with jobs.leading() as leader, jobs.pool(2, 1):
            assert ("trainer", "t1") in leader.state.drains
            await leader.create_job(job_of("b"), None)
            await until(lambda: leader.state.job("b").standing is Standing.COMPLETED, "the job to end")

    run_virtually(main)


def test_a_job_with_an_unreadable_task_is_set_aside() -> None:
    """Whether its pre-task has run is not known: it may be one that must not run twice."""

    async def main() -> None:
        jobs = Jobs()
        await jobs.etcd.put(jobs.keys.job("a"), job_of("a", pre_tasks=("true",)).to_bytes())
        run = json.loads(TaskRun(job="a", name="pre-0").to_bytes()) | {"state": "DREAMING"}
        await jobs.etcd.put(jobs.keys.task_run("a", "pre-0"), json.dumps(run).encode())
        async with jobs.leading() as leader:
            assert leader.state.job("a").standing is Standing.UNREADABLE
            assert "tasks/pre-0" in leader.state.job("a").reason
            await leader.delete_job("a")
            assert not (await jobs.etcd.range(jobs.keys.jobs, prefix=True)).kvs

    run_virtually(main)


# ------------------------------------------------------------ the form of what etcd holds


NEWER = StateSchema(schema_version=SCHEMA + 2, readable_by=SCHEMA + 1, trireme_version="9.0.0")


def test_a_cluster_in_a_form_that_this_version_does_not_know_is_not_led_and_nothing_is_changed() -> None:
    async def main() -> None:
        jobs = Jobs()
        await jobs.etcd.put(jobs.keys.schema, NEWER.to_bytes())
        with pytest.raises(StateUnreadable, match=r"Trireme 9\.0\.0 wrote .* this is Trireme"):
            await jobs.master().run(asyncio.Event())
        there = {kv.key for kv in (await jobs.etcd.range(jobs.keys.prefix, prefix=True)).kvs}
        assert there == {jobs.keys.schema}

    run_virtually(main)


def test_a_job_in_such_a_form_is_left_alone_and_a_later_form_that_can_be_read_stays() -> None:
    async def main() -> None:
        jobs = Jobs()
        later = NEWER.with_fields(readable_by=SCHEMA)
        await jobs.etcd.put(jobs.keys.schema, later.to_bytes())
        await jobs.etcd.put(jobs.keys.keys_of("a").schema, NEWER.to_bytes())
        async with jobs.leading() as leader, jobs.pool(4, 2):
            for name in "ab":
                await leader.create_job(job_of(name), None)
            await until(lambda: leader.state.job("a").standing is Standing.UNREADABLE, "the look at it")
            await until(lambda: leader.state.job("b").standing is Standing.COMPLETED, "the other job to end")
        assert StateSchema.from_bytes((await jobs.etcd.get(jobs.keys.schema)).value) == later
        own = (await jobs.etcd.get(jobs.keys.keys_of("b").schema)).value
        assert StateSchema.from_bytes(own) == StateSchema.own()

    run_virtually(main)


# ------------------------------------------------------------ fields that this version does not know


def test_a_job_with_unknown_fields_goes_on_and_they_stay_for_the_version_that_knows_them() -> None:
    async def main() -> None:
        jobs = Jobs()
        document = json.loads(job_of("a").to_bytes()) | {"colour": "red"}
        document["spec"] |= {"warp_factor": 9}
        document["spec"]["dataset"] |= {"shards": 2}
        document["scheduling"] |= {"mood": "good"}
        await jobs.etcd.put(jobs.keys.job("a"), json.dumps(document).encode())
        async with jobs.leading() as leader, jobs.pool(2, 1):
            await until(lambda: leader.state.job("a").standing is Standing.COMPLETED, "the job to end")
        for key in (jobs.keys.job("a"), jobs.keys.keys_of("a").spec):
            stored = json.loads((await jobs.etcd.get(key)).value)
            spec = stored.get("spec", stored)
            assert (spec["warp_factor"], spec["dataset"]["shards"]) == (9, 2)
        stored = json.loads((await jobs.etcd.get(jobs.keys.job("a"))).value)
        assert (stored["colour"], stored["scheduling"]["mood"]) == ("red", "good")

    run_virtually(main)
