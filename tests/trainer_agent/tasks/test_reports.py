"""What a trainer reports while it trains, in virtual time: nothing of it is waited for."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from tests.trainer_agent.virtual_time import virtually
from trainer_agent.tasks.activity import PROGRESS_S, Activity, Held
from trainer_agent.tasks.reports import KEPT_STEPS, MetricBuffer, Reports
from trireme_shared.platform.runtime import clock
from trireme_shared.protocol.errors import PeerError, StaleAttempt
from trireme_shared.protocol.records import CompleteTask, MetricBatch, StepMetrics, Task, TaskKind
from trireme_shared.protocol.records.tasks import MetricValue


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
    reports = Reports(master, "me", Activity(active=SimpleNamespace(held=held)))
    async with asyncio.TaskGroup() as group:
        running = group.create_task(reports.run())
        await act(reports)
        running.cancel()


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
            reports.share(
                StepMetrics(step=step, epoch=0, loss_sum=float("nan") if step == 2 else 1.0, records=4)
            )
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

    virtually(lambda: with_reports(master, act, held=lambda: [Held(task(7), 2, 9)]))
    assert [(name, task_id, each.minibatches, each.work) for name, task_id, each in master.heard] == [
        ("report_progress", "7", 2, 9)
    ] * 2


def test_a_task_that_was_given_to_others_is_known_as_given_up_as_long_as_it_is_held():
    """Whoever evaluates it may hang: then nothing is waited for, so that the master does not wait either."""
    held = [Held(task(7), 2), Held(task(8), 0)]
    activity = Activity(active=SimpleNamespace(held=lambda: held))
    known = []

    async def main():
        running = asyncio.create_task(Reports(Master(StaleAttempt("another has it")), "me", activity).run())
        for _ in range(2):
            await asyncio.sleep(PROGRESS_S + 0.1)
            known.append(activity.given_up)
        held.pop(0)
        await asyncio.sleep(PROGRESS_S)
        known.append(activity.given_up)
        running.cancel()

    virtually(main)
    assert known == [(task(7),), (task(7),), ()]


def test_metrics_are_due_after_a_while_and_shares_of_one_step_are_added():
    buffer = MetricBuffer()
    assert buffer.due_in(5.0) is None
    buffer.add(StepMetrics(step=1, epoch=0, loss_sum=2.0, records=3), 5.0)
    buffer.add(StepMetrics(step=1, epoch=0, loss_sum=1.0, records=1), 5.1)
    assert buffer.due_in(5.2) == 0.5 - (5.2 - 5.0)
    assert buffer.take() == (StepMetrics(step=1, epoch=0, loss_sum=3.0, records=4),)
    assert buffer.take() == ()


def test_metrics_that_nobody_takes_do_not_pile_up():
    buffer = MetricBuffer()
    for step in range(KEPT_STEPS + 5):
        buffer.add(StepMetrics(step=step, epoch=0, loss_sum=0.0, records=1), 0.0)
    assert (len(buffer.steps), buffer.dropped, min(buffer.steps)) == (KEPT_STEPS, 5, 5)


def logged(step, **values):
    metrics = {
        name: MetricValue(total=value, weight=1, least=value, most=value) for name, value in values.items()
    }
    return StepMetrics(step=step, epoch=0, loss_sum=1.0, records=1, metrics=metrics)


def test_what_was_logged_of_a_step_adds_up_and_a_report_has_bounded_values():
    buffer = MetricBuffer()
    buffer.add(logged(0, a=1.0), 0.0)
    buffer.add(logged(0, a=3.0, b=5.0), 0.0)
    [share] = buffer.take()
    assert share.metrics == {
        "a": MetricValue(total=4.0, weight=2, least=1.0, most=3.0),
        "b": MetricValue(total=5.0, weight=1, least=5.0, most=5.0),
    }
    many = {f"{'n' * 62}{number:02d}": 1e300 / 3 for number in range(32)}
    for step in range(300):
        buffer.add(logged(step, **many), 0.0)
    steps = []
    while taken := buffer.take():
        assert len(MetricBatch(trainer="t", steps=taken).model_dump_json()) < 1 << 20
        steps += [share.step for share in taken]
    assert steps == list(range(300))


def test_all_that_was_logged_is_told_before_a_trainer_leaves():
    master = Master()

    async def act(reports):
        for step in range(450):
            reports.share(logged(step, a=1.0))
        await reports.flush(30)

    virtually(lambda: with_reports(master, act))
    assert sorted(share.step for _, batch in master.heard for share in batch.steps) == list(range(450))
