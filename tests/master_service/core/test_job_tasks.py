"""Pre- and post-tasks in the schedule: who runs which attempt, what its end means for the job, and whom they
wait for."""

from __future__ import annotations

from typing import Any

import pytest

from master_service.core.decisions import cluster_jobs
from master_service.core.decisions.scheduling import admission
from master_service.core.decisions.scheduling.admission import needed
from master_service.core.decisions.scheduling.schedule import schedule
from master_service.core.explanation.explain import explain_unled
from master_service.core.state.cluster import ClusterState, PutAssignment, PutTaskRun
from tests.equipment.replaced import replaced
from tests.master_service.cluster import spec_of
from tests.master_service.core.cluster_jobs import (
    WALL,
    active,
    deleted,
    give,
    held_by,
    job_of,
    member_of,
    run_children,
    state_of,
    step,
)
from trireme_shared.protocol.errors import Conflict
from trireme_shared.protocol.explanations import Code
from trireme_shared.protocol.records import JobState
from trireme_shared.protocol.records.cluster import ClusterJob, Standing, TaskRun, TaskState
from trireme_shared.protocol.records.job_choices import JobTask, Mode

T0 = ("trainer", "t0")


def with_tasks(name: str, pre: tuple[Any, ...] = (), post: tuple[Any, ...] = (), **fields: Any) -> ClusterJob:
    spec = spec_of(job=name, mode=Mode.ASYNC, pservers=1, pre_tasks=pre, post_tasks=post)
    return job_of(name, spec=spec, **fields)


def run_of(state: ClusterState, job: str, name: str) -> TaskRun:
    return state.task_runs[job][name]


def agents_follow(state: ClusterState) -> None:
    """As host agents do with assignments of tasks."""
    run_children(state)
    for place, held in state.assignments.items():
        if held.task and (member := state.members.get(place)):
            state.see(place, member.model_copy(update={"task": held.task, "attempt": held.attempt}), 0.0)
    for place, member in list(state.members.items()):
        if place not in state.assignments:
            idle = {"task": "", "attempt": 0, "ended": False, "exit_code": None, "output": ""}
            state.see(place, member.model_copy(update=idle), 0.0)


def end(state: ClusterState, code: int = 0, output: str = "", place: Any = T0, **fields: Any) -> None:
    """The member reports the end of the attempt that it runs."""
    told = {"ended": True, "exit_code": code, "output": output, **fields}
    state.see(place, state.members[place].model_copy(update=told), 0.0)


def test_members_are_assigned_only_after_the_pre_tasks_have_succeeded_one_after_the_other():
    state = state_of(with_tasks("a", pre=("first", "second")), trainers=2, pservers=1)
    for number, name in enumerate(("pre-0", "pre-1")):
        step(state)
        (place,) = state.assignments
        held = state.assignments[place]
        assert (held.task, held.attempt, held.limit_s) == (name, 1, 600.0)
        assert state.jobs["a"].standing is Standing.QUEUED
        assert state.jobs["a"].reason == f"its pre-task {number + 1} runs on {place[1]}, attempt 1"
        agents_follow(state)
        end(state, output="made 3 files", place=place)
        step(state)
        agents_follow(state)
        assert run_of(state, "a", name).state is TaskState.SUCCEEDED
        assert run_of(state, "a", name).output == "made 3 files"
    step(state)
    agents_follow(state)
    step(state)
    assert state.jobs["a"].standing is Standing.ACTIVE
    assert held_by(state, "a") == ["p0", "t0", "t1"]


def test_a_failed_pre_task_is_tried_again_after_a_pause_and_fails_its_job_at_last():
    state = state_of(with_tasks("a", pre=(JobTask(command="prepare", retries=1),)), trainers=1, pservers=1)
    step(state)
    agents_follow(state)
    end(state, code=3, output="no space")
    step(state)
    agents_follow(state)
    run = run_of(state, "a", "pre-0")
    assert (run.state, run.failures, run.reason) == (TaskState.WAITING, 1, "exit code 3")
    step(state)
    assert not state.assignments, "it pauses"
    assert "failed (exit code 3) and is tried again soon" in state.jobs["a"].reason
    step(state, now=5.0)
    assert state.assignments[T0].attempt == 2
    agents_follow(state)
    end(state, code=3, output="still no space")
    step(state, now=5.0)
    job, run = state.jobs["a"], run_of(state, "a", "pre-0")
    assert (run.state, run.failures, run.output) == (TaskState.FAILED, 2, "still no space")
    assert (job.standing, job.reason) == (Standing.FAILED, "its pre-task 1 failed: exit code 3")
    told = explain_unled(state, job, WALL, JobState())
    assert (told.code, told.details) == (Code.JOB_TASK_FAILED, ("still no space",))
    agents_follow(state)
    for change in cluster_jobs.resume(state, "a").changes:
        state.apply(change, 0.0)
    step(state, now=60.0)
    assert (state.assignments[T0].task, state.assignments[T0].attempt) == ("pre-0", 3)


def test_the_report_of_an_earlier_attempt_counts_for_nothing():
    state = state_of(with_tasks("a", pre=("prepare",)), trainers=1, pservers=1)
    step(state)
    agents_follow(state)
    end(state, attempt=0)
    step(state)
    assert run_of(state, "a", "pre-0").state is TaskState.RUNNING
    end(state, attempt=1, incarnation="another")
    step(state)
    assert run_of(state, "a", "pre-0").state is not TaskState.SUCCEEDED


def test_without_the_fence_the_report_of_an_earlier_attempt_is_taken_for_the_present_one():
    state = state_of(with_tasks("a", pre=("prepare",)), trainers=1, pservers=1)
    with replaced(admission, "reports_end", lambda member, _: member.ended):
        step(state)
        agents_follow(state)
        end(state, attempt=0)
        schedule_once(state)
    assert run_of(state, "a", "pre-0").state is TaskState.SUCCEEDED


def schedule_once(state: ClusterState) -> None:
    for change in schedule(state, 0.0, WALL).changes:
        state.apply(change, 0.0)


def test_a_task_whose_member_is_lost_runs_again_and_no_retry_is_taken_for_it():
    state = state_of(with_tasks("a", pre=("prepare",)), trainers=1, pservers=1)
    step(state)
    agents_follow(state)
    state.see(T0, None, 0.0)
    step(state, now=5.0)
    assert run_of(state, "a", "pre-0").state is TaskState.RUNNING, "it may come back"
    step(state, now=11.0)
    run = run_of(state, "a", "pre-0")
    assert (run.state, run.failures, run.lost) == (TaskState.WAITING, 0, 1)
    state.see(T0, member_of("trainer", "t0"), 12.0)
    step(state, now=12.0)
    assert state.assignments[T0].attempt == 2


def test_a_task_that_takes_its_member_along_each_time_is_given_up():
    state = state_of(with_tasks("a", pre=("prepare",)), trainers=1, pservers=1)
    for number in range(20):
        step(state)
        agents_follow(state)
        state.see(T0, member_of("trainer", "t0").model_copy(update={"incarnation": f"i{number}"}), 0.0)
        step(state)
        agents_follow(state)
    assert state.jobs["a"].standing is Standing.FAILED
    assert "20 attempts ended so" in state.jobs["a"].reason


def test_a_job_above_its_minimum_gives_a_trainer_to_a_task():
    state = state_of(active("x", min_trainers=1), with_tasks("a", pre=("prepare",)), trainers=2, pservers=2)
    give(state, "x", "t0", "t1", "p0")
    step(state)
    assert len(held_by(state, "x")) == 2
    agents_follow(state)
    step(state)
    assert [held.task for held in state.assignments.values() if held.task] == ["pre-0"]
    assert len(held_by(state, "x")) == 2


def test_a_task_takes_no_trainer_that_a_job_needs():
    state = state_of(active("x", min_trainers=2), with_tasks("a", pre=("prepare",)), trainers=2, pservers=2)
    give(state, "x", "t0", "t1", "p0")
    step(state)
    assert held_by(state, "x") == ["p0", "t0", "t1"]
    assert state.jobs["a"].reason == "its pre-task 1 waits for a trainer that is idle"
    assert explain_unled(state, state.jobs["a"], WALL, JobState()).code is Code.JOB_TASK_UNFINISHED


def test_tasks_take_one_trainer_in_four_at_most():
    jobs = [with_tasks(f"a{number}", pre=("prepare",), priority=number) for number in range(5)]
    state = state_of(*jobs, active("x", min_trainers=1), trainers=8, pservers=1)
    give(state, "x", "t0", "p0")
    step(state)
    assert sorted(held.job for held in state.assignments.values() if held.task) == ["a3", "a4"]
    assert state.jobs["a0"].reason == "its pre-task 1 waits: 2 other tasks run"


@pytest.mark.parametrize(
    ("standing", "when", "runs"),
    [
        (Standing.COMPLETED, "completed", True),
        (Standing.FAILED, "completed", False),
        (Standing.FAILED, "always", True),
        (Standing.CANCELLED, "always", True),
    ],
)
def test_post_tasks_run_after_the_end_that_they_are_for(standing, when, runs):
    job = with_tasks("a", post=(JobTask(command="publish", when=when),), standing=standing)
    state = state_of(job, trainers=1, pservers=0)
    assert needed(state, WALL)["trainer"] == int(runs)
    step(state)
    assert bool(state.assignments) is runs
    if not runs:
        return
    with pytest.raises(Conflict, match="post-task 1 is not over"):
        deleted(state, "a")
    agents_follow(state)
    end(state)
    step(state)
    agents_follow(state)
    step(state)
    assert run_of(state, "a", "post-0").state is TaskState.SUCCEEDED
    assert not state.assignments
    assert deleted(state, "a").changes


def test_cancel_stops_a_pre_task_with_its_job_and_a_post_task_alone():
    for job, name in (
        (with_tasks("a", pre=("prepare",)), "pre-0"),
        (with_tasks("a", post=("publish",), standing=Standing.COMPLETED), "post-0"),
    ):
        state = state_of(job, trainers=1, pservers=0)
        step(state)
        agents_follow(state)
        for change in cluster_jobs.cancel(state, "a", "now").changes:
            state.apply(change, 0.0)
        step(state)
        assert not state.assignments
        assert run_of(state, "a", name).state is TaskState.CANCELLED


def test_a_paused_job_stops_its_pre_task_and_runs_it_again_later():
    state = state_of(with_tasks("a", pre=("prepare",)), trainers=1, pservers=1)
    step(state)
    agents_follow(state)
    for change in cluster_jobs.pause(state, "a").changes:
        state.apply(change, 0.0)
    step(state)
    assert (run_of(state, "a", "pre-0").state, dict(state.assignments)) == (TaskState.WAITING, {})
    agents_follow(state)
    for change in cluster_jobs.resume(state, "a").changes:
        state.apply(change, 0.0)
    step(state)
    assert state.assignments[T0].attempt == 2


def test_a_start_is_one_transaction_and_an_end_is_written_before_the_member_is_told_to_forget_it():
    state = state_of(*[with_tasks(f"a{n}", pre=("prepare",)) for n in range(40)], trainers=160, pservers=0)
    changes = schedule(state, 0.0, WALL).changes
    pairs = list(zip(changes[::2], changes[1::2], strict=False))[:30]
    assert all(isinstance(run, PutTaskRun) and isinstance(held, PutAssignment) for run, held in pairs)
    assert [run.run.member for run, _ in pairs] == [held.place[1] for _, held in pairs]
    for _ in range(5):
        for change in schedule(state, 0.0, WALL).changes:
            state.apply(change, 0.0)
    agents_follow(state)
    for place in list(state.assignments):
        end(state, place=place)
    for _ in range(5):
        for change in schedule(state, 0.0, WALL).changes:
            state.apply(change, 0.0)
    done = [run.state for runs in state.task_runs.values() for run in runs.values()]
    assert done == [TaskState.SUCCEEDED] * 40


def test_a_task_is_a_command_or_a_function_by_its_form():
    assert JobTask.model_validate("pkg.mod:main").function == "pkg.mod:main"
    assert JobTask.model_validate("echo a:b").command == "echo a:b"
    for bad in (
        {},
        {"command": "x", "function": "a:b"},
        {"function": "no function"},
        {"command": "a\0b"},
        "",
    ):
        with pytest.raises(ValueError, match=r"give either|not of the form|null character"):
            JobTask.model_validate(bad)
