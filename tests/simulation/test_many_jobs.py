"""Many jobs under leaders that die at any write: nothing is lost, nothing is doubled, and nothing is left
behind."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from master_service.cluster import store
from tests.equipment.replaced import replaced
from tests.equipment.virtual_loop import run_virtually
from tests.equipment.waiting import until
from tests.master_service.many_jobs import create_once, job_of
from tests.simulation.many_jobs import SimulatedJobs
from trireme_shared.protocol.errors import Conflict, NotFound
from trireme_shared.protocol.records.cluster import Standing

TASKS = 5
EVERY = 2  # rounds: the first tries writes 0, 2, 4, ..., the second 1, 3, 5, ...
DONE = {(job, str(task)) for job in "bc" for task in range(TASKS)}


async def settled(ask: Awaitable[Any]) -> None:
    """The first request may have been answered, though nobody heard it: then the second one comes too
    late."""
    with contextlib.suppress(Conflict, NotFound):
        await ask


async def use(jobs: SimulatedJobs) -> list[str]:
    """`a` runs, is paused, and is cancelled; `b` waits for its members and ends; `c` is paused while it
    waits, and resumed; `d` is cancelled while it waits. At last all are deleted. Broken promises."""
    for name in "abcd":
        asked = job_of(name, {"min_trainers": 2} if name == "b" else None)
        await jobs.insist(lambda leader, asked=asked: create_once(leader, asked))
    await settled(jobs.insist(lambda leader: leader.pause_job("c")))
    await settled(jobs.insist(lambda leader: leader.cancel_job("d")))
    await settled(jobs.insist(lambda leader: leader.pause_job("a")))
    await jobs.until_standing("b", Standing.COMPLETED)
    await settled(jobs.insist(lambda leader: leader.cancel_job("a")))
    await settled(jobs.insist(lambda leader: leader.resume_job("c")))
    await jobs.until_standing("c", Standing.COMPLETED)
    for name in "ad":  # they may have ended before the next leader heard of it
        await jobs.until_standing(name, Standing.CANCELLED, Standing.COMPLETED)
    await jobs.until_idle()
    broken = [
        f"{job} is COMPLETED with {done} of {TASKS * 10} records"
        for job in "bc"
        if (done := await jobs.records_done(job)) != TASKS * 10
    ]
    for name in "abcd":
        await settled(jobs.insist(lambda leader, name=name: leader.delete_job(name)))
    return broken


def run(last: int | None, *, at_last: Callable[[SimulatedJobs], None] | None = None) -> tuple[list[str], int]:
    """The first leader dies instead of its write number `last`. Broken promises, and how many writes it
    made."""

    async def main() -> tuple[list[str], int]:
        jobs = SimulatedJobs(tasks=TASKS, task_s=0.2)
        first = jobs.start_master("m1")
        await until(lambda: jobs.leading_node is first, "the first master to lead")
        jobs.start_master("m2")
        async with jobs.pool(2, 1):
            await until(lambda: len(first.master.state.members) == 3, "the pool")
            begin = len(first.crash_point.done)
            before = {kv.key for kv in (await jobs.etcd.range("/", prefix=True)).kvs}
            if last is not None:
                first.crash_point.last = begin + last
            if at_last is not None:
                first.crash_point.at_last = lambda: at_last(jobs)
            broken = await use(jobs) + jobs.check_history()
            if last is None:
                broken += [
                    f"{task} of {job} is lost"
                    for job, task in sorted(DONE - {(j, t) for j, _, t in jobs.taken})
                ]
            await asyncio.sleep(5)
            left = {kv.key for kv in (await jobs.etcd.range("/", prefix=True)).kvs} - before
            broken += [
                f"{key} is left" for key in sorted(left) if not key.startswith(jobs.keys.prefix + "cluster")
            ]
            assert jobs.leading_node is not None
            state = jobs.leading_node.master.state
            kept = (state.jobs, state.assignments, state.gone_since, jobs.leading_node.master.term.jobs)
            broken += [f"the leader keeps {each}" for each in kept if each]
        writes = len(first.crash_point.done) - begin
        await jobs.end()
        return broken, writes

    return run_virtually(main)


def test_without_a_death_every_job_ends_and_nothing_is_left():
    broken, writes = run(None)
    assert broken == []
    assert writes > 30


@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", range(EVERY))
def test_the_leader_dies_at_any_write_of_submissions_assignments_and_pauses(first):
    writes = run(None)[1]
    for last in range(first, writes, EVERY):
        broken, done = run(last)
        assert broken == [], f"death instead of write {last}"
        assert done == last


@pytest.mark.timeout(300)
def test_a_leader_that_is_cut_off_at_any_write_and_comes_back_late_changes_nothing():
    """Its write waits in the network until the next leader has decided otherwise."""

    def cut(jobs: SimulatedJobs) -> None:
        jobs.simulated.cut("m1")
        asyncio.get_running_loop().call_later(15.0, jobs.simulated.mend, "m1")

    writes = run(None)[1]
    for last in range(0, writes, 3):
        broken, _ = run(last, at_last=cut)
        assert broken == [], f"cut off at write {last}"


def late_write() -> list[str]:
    """m1 starts job `a`; its write arrives when m2 has cancelled `a` and has given the only members to `b`.
    Broken promises."""

    async def main() -> list[str]:
        jobs = SimulatedJobs(tasks=200, task_s=0.2)
        first = jobs.start_master("m1")
        await until(lambda: jobs.leading_node is first, "the first master to lead")
        second = jobs.start_master("m2")
        await jobs.insist(lambda leader: leader.create_job(job_of("a"), None))
        first.late.key = jobs.keys.assignment("trainer", "t0")
        async with jobs.pool(1, 1):
            await until(lambda: first.late.waits, "the first master to start the job")
            jobs.kill(first)
            await until(lambda: jobs.leading_node is second, "the second master to lead")
            await jobs.insist(lambda leader: leader.cancel_job("a"))
            await jobs.until_standing("a", Standing.CANCELLED)
            await jobs.insist(lambda leader: leader.create_job(job_of("b"), None))
            await until(lambda: sum(job == "b" for job, _, _ in jobs.taken) > 20, "the second job to train")
            await first.late.deliver()
            await asyncio.sleep(3)
            broken = jobs.check_history()
        await jobs.end()
        return broken

    return run_virtually(main)


def test_the_write_of_a_dead_leader_that_arrives_late_is_refused():
    assert late_write() == []


def test_without_the_clusters_fence_two_leaders_assign_one_place():
    with replaced(store, "fence_of", lambda *_: []):
        broken = late_write()
    assert any("t0 is given to a while it runs b" in line for line in broken), broken
    assert any("job a went from CANCELLED to ACTIVE" in line for line in broken), broken


@pytest.mark.timeout(300)
def test_a_hundred_jobs_on_a_pool_of_eight_all_end_once_and_leave_nothing():
    async def main() -> None:
        jobs = SimulatedJobs(tasks=4, task_s=0.1)
        jobs.start_master("m1")
        await until(lambda: jobs.leading_node is not None, "a master to lead")
        names = [f"job-{number}" for number in range(100)]
        async with jobs.pool(5, 3):
            await until(lambda: len(jobs.leading_node.master.state.members) == 8, "the pool")
            before = {kv.key for kv in (await jobs.etcd.range("/", prefix=True)).kvs}
            for number, name in enumerate(names):
                scheduling = {
                    "priority": 10 * (number % 5),
                    "min_trainers": 1 + number % 3,
                    "weight": 1.0 + number % 2,
                }
                asked = job_of(name, scheduling)
                await jobs.insist(lambda leader, asked=asked: create_once(leader, asked))
            for name in names:
                await jobs.until_standing(name, Standing.COMPLETED, limit_s=1000)
            await jobs.until_idle()
            done = [(job, task) for job, _, task in jobs.taken if task.isdigit()]
            assert len(done) == len(set(done)) == 400
            epochs = {job.job: job.epoch for job in jobs.leading_node.master.state.jobs.values()}
            assert epochs == dict.fromkeys(names, 1)
            assert jobs.check_history() == []
            for name in names:
                await jobs.insist(lambda leader, name=name: leader.delete_job(name))
            left = {kv.key for kv in (await jobs.etcd.range("/", prefix=True)).kvs} - before
            assert {key for key in left if not key.startswith(jobs.keys.prefix + "cluster")} == set()
            term = jobs.leading_node.master.term
            assert (term.state.jobs, term.state.assignments, term.state.gone_since, term.jobs) == (
                {},
                {},
                {},
                {},
            )
            assert not any(term.state.unfit.values())
        await jobs.end()

    run_virtually(main)
