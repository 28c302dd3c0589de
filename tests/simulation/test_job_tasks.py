"""Pre- and post-tasks under leaders that die at any write, and members that die at any moment: one success of
each is recorded."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from tests.equipment.virtual_loop import run_virtually
from tests.equipment.waiting import until
from tests.master_service.many_jobs import Place, create_once, job_of
from tests.simulation.many_jobs import SimulatedJobs
from trireme_shared.protocol.errors import NotFound
from trireme_shared.protocol.records.cluster import Kind, Standing, TaskRun, TaskState
from trireme_shared.protocol.records.job_choices import JobTask

TASKS = {
    "pre_tasks": (JobTask(command="fetch"), JobTask(command="prepare", retries=2)),
    "post_tasks": (JobTask(function="publish:main", when="always"),),
}
NAMES = ("pre-0", "pre-1", "post-0")


async def runs_of(jobs: SimulatedJobs, job: str) -> dict[str, TaskRun]:
    found = (await jobs.etcd.range(jobs.keys.below_job(job), prefix=True)).kvs
    return {run.name: run for run in (TaskRun.model_validate_json(kv.value) for kv in found)}


def run(last: int | None, *, lose: int = 0) -> tuple[list[str], int, list[tuple[str, str, int]]]:
    """The first leader dies instead of its write number `last`. `lose`: so many times the member that runs a
    task dies in the middle of it. Broken promises, how many writes the leader made, the attempts that
    ended."""

    async def main() -> tuple[list[str], int, list[tuple[str, str, int]]]:
        jobs = SimulatedJobs(tasks=3, task_s=0.2)
        jobs.exit_codes[("a", "pre-1")] = [3]
        first = jobs.start_master("m1")
        await until(lambda: jobs.leading_node is first, "the first master to lead")
        jobs.start_master("m2")
        members = [
            Member(jobs, "trainer", "t0"),
            Member(jobs, "trainer", "t1"),
            Member(jobs, "pserver", "p0"),
        ]
        await until(lambda: len(first.master.state.members) == 3, "the pool")
        begin = len(first.crash_point.done)
        if last is not None:
            first.crash_point.last = begin + last
        await jobs.insist(lambda leader: create_once(leader, job_of("a", **TASKS)))
        for _ in range(lose):
            await until(lambda: tasked(members), "a task to run")
            await tasked(members)[0].die_and_come_back()
        await jobs.until_standing("a", Standing.COMPLETED)
        async with asyncio.timeout(300):
            while (
                not all(run.state.over for run in (await runs_of(jobs, "a")).values())
                or len(await runs_of(jobs, "a")) < 3
            ):
                await asyncio.sleep(0.1)
        await jobs.until_idle()
        broken = jobs.check_history()
        runs = await runs_of(jobs, "a")
        broken += [f"{name} is {runs[name]}" for name in NAMES if runs[name].state is not TaskState.SUCCEEDED]
        # the first request may have been answered, though nobody heard it
        with contextlib.suppress(NotFound):
            await jobs.insist(lambda leader: leader.delete_job("a"))
        broken += [f"{name} is left" for name in await runs_of(jobs, "a")]
        writes = len(first.crash_point.done) - begin
        for member in members:
            member.running.cancel()
        await jobs.end()
        return broken, writes, jobs.ran

    return run_virtually(main)


class Member:
    def __init__(self, jobs: SimulatedJobs, kind: Kind, name: str) -> None:
        self.jobs, self.kind, self.name = jobs, kind, name
        self.start()

    def start(self) -> None:
        self.place = Place(self.jobs, self.kind, self.name)
        self.running = asyncio.ensure_future(self.place.run())

    async def die_and_come_back(self) -> None:
        self.running.cancel()
        await asyncio.wait([self.running])
        await self.jobs.etcd.delete(self.jobs.keys.member(self.kind, self.name))
        await asyncio.sleep(1)
        self.start()


def tasked(members: list[Member]) -> list[Member]:
    return [member for member in members if member.place.member.task and not member.place.member.ended]


ENDED = [("a", "pre-0", 1), ("a", "pre-1", 1), ("a", "pre-1", 2), ("a", "post-0", 1)]


def test_each_task_succeeds_once_and_a_failed_attempt_is_repeated():
    broken, writes, ended = run(None)
    assert broken == []
    assert ended == ENDED
    assert writes > 10


@pytest.mark.timeout(300)
def test_the_leader_dies_at_any_write_of_tasks_and_none_runs_again_for_that():
    writes = run(None)[1]
    for last in range(writes):
        broken, done, ended = run(last)
        assert broken == [], f"death instead of write {last}"
        assert (done, ended) == (last, ENDED), f"death instead of write {last}"


def test_a_task_whose_member_dies_runs_again_and_one_success_is_recorded():
    broken, _, ended = run(None, lose=2)
    assert broken == []
    assert ended == [("a", "pre-0", 3), ("a", "pre-1", 1), ("a", "pre-1", 2), ("a", "post-0", 1)]
