"""Waiting for others, in virtual time: bounded, with pauses that grow, and what is only told is never waited for."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import subprocess
import sys

import pytest

from shared.errors import DeadlineExceeded, Gone, PeerError, StaleAttempt, StaleGeneration, UserCodeError
from shared.records import CompleteTask, StepMetrics, Task, TaskKind
from shared.runtime import clock
from tests.equipment.virtual_loop import VirtualLoop
from tests.equipment.virtual_loop import run as run_virtually
from trainer_agent.tasks.reports import Reports
from trainer_agent.waiting.retry import Backoff, retry
from trainer_agent.waiting.single_error import single_error


def virtually(main):
    rng = random.Random(1)
    loop = VirtualLoop(rng)
    result = run_virtually(loop, main(), rng)
    assert loop.errors == []
    return result


class Master:
    """Notes what it is told; `errors` are raised first, one a call."""

    def __init__(self, *errors):
        self.errors, self.heard = list(errors), []

    def __getattr__(self, name):
        async def call(*arguments):
            if self.errors:
                raise self.errors.pop(0)
            self.heard.append((name, *arguments))

        return call


def task(number):
    return Task(task_id=str(number), kind=TaskKind.TRAIN, attempt=1)


DONE = CompleteTask(trainer="me", attempt=1, records=3)


async def with_reports(master, act, held=list):
    reports = Reports(master, "me", held)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(reports.run())
        await act(reports)
        running.cancel()


# ---------------------------------------------------------------- retries


def test_peers_are_asked_again_with_growing_pauses_until_they_answer():
    async def main():
        asked = []

        async def call():
            asked.append(clock.monotonic())
            if len(asked) < 5:
                raise PeerError("not yet")
            return "here"

        return await retry(call, "something"), [later - earlier for earlier, later in itertools.pairwise(asked)]

    answer, pauses = virtually(main)
    assert answer == "here"
    assert all(low <= pause <= 2 * low for pause, low in zip(pauses, (0.025, 0.05, 0.1, 0.2), strict=True))


def test_patience_ends_with_what_was_waited_for_and_the_last_answer():
    async def main():
        async def call():
            raise PeerError("nobody there")

        await retry(call, "an answer from pserver 3", limit_s=60)

    with pytest.raises(
        DeadlineExceeded, match=r"gave up after 6\d s: an answer from pserver 3; the last answer: nobody there"
    ):
        virtually(main)


def test_a_callers_error_is_not_repeated():
    async def main():
        async def call():
            raise StaleAttempt("late")

        await retry(call, "anything")

    with pytest.raises(StaleAttempt):
        virtually(main)


def test_progress_restores_patience():
    async def main():
        backoff = Backoff("blocks", limit_s=10)
        for _ in range(30):
            await asyncio.sleep(9)
            await backoff.failed("slow")
            backoff.reset()

    virtually(main)


# ---------------------------------------------------------------- reports


def test_completions_are_told_in_order_although_the_master_is_away_for_a_while():
    master = Master(PeerError("away"), PeerError("away"))

    async def act(reports):
        for number in range(3):
            reports.complete(task(number), DONE)
        await reports.flush(30)

    virtually(lambda: with_reports(master, act))
    assert master.heard == [("complete_task", str(number), DONE) for number in range(3)]


def test_a_stale_completion_does_not_hold_up_the_next_one():
    master = Master(StaleAttempt("attempt 2 is pending"))

    async def act(reports):
        reports.complete(task(0), DONE)
        reports.complete(task(1), DONE)
        await reports.flush(30)

    virtually(lambda: with_reports(master, act))
    assert master.heard == [("complete_task", "1", DONE)]


def test_flushing_gives_up_on_a_master_that_stays_away():
    master = Master(*[PeerError("away")] * 1000)

    async def act(reports):
        reports.complete(task(0), DONE)
        before = clock.monotonic()
        await reports.flush(5)
        assert clock.monotonic() - before == pytest.approx(5)

    virtually(lambda: with_reports(master, act))


def test_metrics_of_many_steps_go_in_one_batch_and_a_loss_that_is_no_number_is_left_out():
    master = Master()

    async def act(reports):
        for step in range(5):
            reports.share(StepMetrics(step=step, epoch=0, loss_sum=float("nan") if step == 2 else 1.0, records=4))
        await asyncio.sleep(1)

    virtually(lambda: with_reports(master, act))
    assert [(name, [share.step for share in batch.steps]) for name, batch in master.heard] == [
        ("report_metrics", [0, 1, 3, 4])
    ]


def test_a_member_is_suspected_at_most_once_a_second():
    master = Master()

    async def act(reports):
        for _ in range(30):
            reports.suspect("pserver-0", "reset")
            await asyncio.sleep(0.1)

    virtually(lambda: with_reports(master, act))
    assert master.heard == [("report_suspect", "pserver-0")] * 3


def test_tasks_at_hand_show_that_they_are_alive():
    master = Master()

    async def act(_):
        await asyncio.sleep(11)

    virtually(lambda: with_reports(master, act, held=lambda: [(task(7), 2)]))
    assert [(name, task_id, progress.minibatches) for name, task_id, progress in master.heard] == [
        ("report_progress", "7", 2)
    ] * 2


# ---------------------------------------------------------------- errors of groups


@pytest.mark.parametrize(
    ("errors", "raised"),
    [
        ([PeerError("a"), Gone("b")], Gone),
        ([Gone("a"), UserCodeError("b")], UserCodeError),
        ([PeerError("a"), StaleGeneration("b")], StaleGeneration),
        ([UserCodeError("a"), ZeroDivisionError("a bug")], ZeroDivisionError),
        ([PeerError("a"), ExceptionGroup("inner", [PeerError("b"), Gone("c")])], Gone),
    ],
)
def test_the_weightiest_error_of_a_group_is_raised(errors, raised):
    with pytest.raises(raised), single_error():
        raise ExceptionGroup("several", errors)


# ---------------------------------------------------------------- the process


@pytest.mark.processes
def test_a_process_without_a_job_says_which_setting_is_missing():
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRIREME_")}
    done = subprocess.run(
        [sys.executable, "-m", "trainer_agent"],
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
        env=environment,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "TRIREME_JOB: Field required\n"
