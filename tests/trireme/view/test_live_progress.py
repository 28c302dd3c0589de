"""The events and warnings that the launcher shows besides the progress."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from tests.equipment.virtual_loop import run_virtually
from trireme.view.child_events import ChildEvent
from trireme.view.live_progress import ProgressReporter, too_few_tasks
from trireme_shared.platform.etcd import NoSpace
from trireme_shared.platform.runtime import clock
from trireme_shared.protocol.errors import CursorExpired, PeerError
from trireme_shared.protocol.events import EventRecord
from trireme_shared.protocol.records import JobSpec, Mode, Stage, Strategy, TaskSummary
from trireme_shared.protocol.rest import EventPage, JobProgress, JobView, MemberCounts


def event(number, message, at=None):
    time = clock.timestamp() if at is None else at
    return EventRecord(event_id=number, event_time=time, name="job_running", message=message, fields={})


class Master:
    """It has one event, and one of an earlier run, and fails when it is first asked for its tasks."""

    def __init__(self):
        self.asked = 0

    @asynccontextmanager
    async def client(self):
        yield self, "digits"

    async def list_events(self, _, *, after):
        told = (event(1, "it ran before", at=""), event(2, "it runs"))
        return EventPage(events=told if after < 2 else (), next_after=2, oldest=1, newest=2)

    async def get_job(self, _):
        progress = JobProgress(epoch=0, epochs=1, records_done=0, records_total=64)
        members = MemberCounts(trainers=2, trainers_desired=2, pservers=2, pservers_desired=2)
        running = {"phase": "RUNNING", "stage": Stage.TRAIN, "generation": 1, "reason": ""}
        return JobView.model_construct(**running, members=members, progress=progress)

    async def get_task_summary(self, _):
        self.asked += 1
        if self.asked == 1:
            raise PeerError("nobody leads")
        return TaskSummary.model_construct(total=0 if self.asked == 2 else 1, task_records=64)


class Screen:
    def __init__(self):
        self.shown = []

    def event(self, text):
        self.shown.append(text)

    def show(self, *_):
        pass


async def test_a_master_that_leaves_in_the_middle_of_an_answer_costs_no_event_and_no_warning():
    master, screen = Master(), Screen()
    spec = JobSpec.model_construct(mode=Mode.SYNC, trainers=2, records_per_task=64)
    reporter = ProgressReporter(spec, screen)
    with pytest.raises(PeerError):
        await reporter.poll(master.client)
    assert screen.shown == []
    for _ in range(4):
        await reporter.poll(master.client)
    assert screen.shown == ["it runs", too_few_tasks(spec, 1, 64)]
    assert master.asked == 3, "it is asked until it knows, and no more"


@pytest.mark.parametrize(
    "name",
    [
        "warning",
        "setting_unused",
        "settings_changed",
        "steps_are_short",
        "records_left_out",
        "best_unknown",
        "died_at_task",
        "task_discarded",
    ],
)
async def test_what_makes_a_job_another_one_than_was_asked_for_is_shown(name):
    class Told(Master):
        async def list_events(self, _, *, after):
            told = EventRecord(event_id=1, event_time=clock.timestamp(), name=name, message="look", fields={})
            return EventPage(events=() if after else (told,), next_after=1, oldest=1, newest=1)

        async def get_task_summary(self, _):
            return TaskSummary.model_construct(total=2, task_records=64)

    screen = Screen()
    reporter = ProgressReporter(
        JobSpec.model_construct(mode=Mode.SYNC, trainers=1, records_per_task=64), screen
    )
    for _ in range(2):
        await reporter.poll(Told().client)
    assert screen.shown == ["look"]


class Forgetful(Master):
    """It has forgotten what came right after the first event."""

    async def list_events(self, job, *, after):
        if after and after < 5:
            raise CursorExpired("the events right after 2 are not kept", after=after, oldest=6, newest=6)
        if after < 5:
            return await super().list_events(job, after=after)
        told = (event(6, "it runs on"),) if after < 6 else ()
        return EventPage(events=told, next_after=6, oldest=6, newest=6)


async def test_events_that_are_forgotten_before_they_were_asked_for_are_left_out():
    master, screen = Forgetful(), Screen()
    reporter = ProgressReporter(
        JobSpec.model_construct(mode=Mode.SYNC, trainers=1, records_per_task=64), screen
    )
    with pytest.raises(PeerError):
        await reporter.poll(master.client)
    for _ in range(4):
        await reporter.poll(master.client)
    assert screen.shown == ["it runs", "it runs on"]


class Full(Master):
    """Its etcd has no space at first."""

    async def get_job(self, job):
        if asyncio.get_running_loop().time() < 10:
            raise NoSpace("etcd is out of space", hint="free some")
        return await super().get_job(job)


def test_that_etcd_has_no_space_is_shown_once():
    screen = Screen()

    async def main():
        spec = JobSpec.model_construct(mode=Mode.SYNC, trainers=1, records_per_task=64)
        running = asyncio.ensure_future(ProgressReporter(spec, screen).run(Full().client))
        await asyncio.sleep(20)
        running.cancel()
        await asyncio.wait([running])

    run_virtually(main)
    assert screen.shown == ["etcd is out of space; free some", "it runs"]


@pytest.mark.parametrize("mode", list(Mode))
def test_the_death_of_the_last_trainer_or_parameter_server_is_not_told_as_that_of_one_among_others(mode):
    screen = Screen()
    reporter = ProgressReporter(JobSpec.model_construct(mode=mode), screen)
    for name in ("trainer-0", "trainer-1", "pserver-0", "master-0", "etcd"):
        reporter.on_child(ChildEvent(name, "started"))
    for name in ("trainer-0", "trainer-1", "pserver-0", "etcd"):
        reporter.on_child(ChildEvent(name, "died", "SIGKILL", 7))
    first, last, pserver, etcd = screen.shown
    assert ("other trainers" in first, "other trainers" in last, "the job waits for it" in last) == (
        True,
        False,
        True,
    )
    assert "the others" not in pserver
    assert etcd == "etcd died (SIGKILL, pid 7): it is started again"
    reporter.on_child(ChildEvent("trainer-1", "restarted"))
    reporter.on_child(ChildEvent("trainer-0", "died", "SIGKILL", 8))
    assert "other trainers" in screen.shown[-1]


def told_of_deaths(spec: JobSpec, *names: str) -> list[str]:
    """What is shown when they die one after the other."""
    screen = Screen()
    reporter = ProgressReporter(spec, screen)
    for name in names:
        reporter.on_child(ChildEvent(name, "started"))
    for name in names:
        reporter.on_child(ChildEvent(name, "died", "SIGKILL", 7))
    return screen.shown


def test_the_last_trainer_of_a_collective_job_takes_the_parameters_along():
    spec = JobSpec.model_construct(mode=Mode.SYNC, strategy=Strategy.COLLECTIVE)
    first, last = told_of_deaths(spec, "trainer-0", "trainer-1")
    assert "other trainers take its lanes" in first
    back = (
        "nobody has the parameters now: the job goes back to its newest checkpoint, or starts over if "
        "it has none; it is"
    )
    assert back in last


def test_no_checkpoint_is_promised_when_a_parameter_server_of_an_asynchronous_job_dies():
    first, last = told_of_deaths(JobSpec.model_construct(mode=Mode.ASYNC), "pserver-0", "pserver-1")
    assert "its newest checkpoint, the others go on; without one the job starts over;" in first
    assert "goes back to its newest checkpoint, or starts over if it has none;" in last


class Answering(Master):
    """It answers for ten seconds, and again from second 30 on."""

    async def list_events(self, job, *, after):
        if 10 < asyncio.get_running_loop().time() < 30:
            raise PeerError("no answer")
        return await super().list_events(job, after=after)


@pytest.mark.parametrize(("etcd", "who"), [(False, "the master"), (True, "etcd")])
def test_while_nobody_answers_the_silence_is_shown_and_no_time_left(etcd, who):
    shown = []

    class Shown(Screen):
        def show(self, progress, now):
            shown.append((now, progress.training()))

    async def main():
        spec = JobSpec.model_construct(mode=Mode.SYNC, trainers=2, records_per_task=64)
        reporter = ProgressReporter(spec, Shown())
        silent_s = lambda: max(0.0, asyncio.get_running_loop().time() - 12) if etcd else 0.0  # noqa: E731
        running = asyncio.ensure_future(reporter.run(Answering().client, silent_s))
        await asyncio.sleep(40)
        running.cancel()
        await asyncio.wait([running])

    run_virtually(main)
    silent = [(now, text) for now, text in shown if "stalled" in text]
    assert 13 < silent[0][0] < 14
    assert 29 < silent[-1][0] < 30
    assert silent[-1][1] == f"epoch 1/1  stalled: waiting for {who}, silent for {18 if etcd else 20} s"
    assert shown[-1][1] == "epoch 1/1"


@pytest.mark.parametrize(
    ("trainers", "tasks", "said"),
    [
        (2, 2, ""),
        (1, 1, ""),
        (3, 1, "an epoch has 1 task of 64 records for 3 trainers: 2 of them will have nothing to do"),
        (4, 3, "an epoch has 3 tasks of 64 records for 4 trainers: 1 of them will have nothing to do"),
    ],
)
def test_a_dataset_of_too_few_tasks_is_told(trainers, tasks, said):
    spec = JobSpec.model_construct(trainers=trainers, records_per_task=64)
    assert too_few_tasks(spec, tasks, 64).startswith(said)
    assert bool(too_few_tasks(spec, tasks, 64)) == bool(said)
