"""Evaluations of an asynchronous job: which cuts are evaluated, and how training ends early."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from master_service.core.changes import Decision, NextEpoch
from master_service.core.decisions import evaluation, pause_checkpoint, tasks
from master_service.core.queue.file_table import FileTable, TableFile
from master_service.core.state.job import Job, Members
from trireme_shared.protocol.errors import StaleGeneration
from trireme_shared.protocol.records import (
    AcquireTask,
    CompleteTask,
    JobSpec,
    JobState,
    Mode,
    Phase,
    SlotMap,
    Stage,
    Task,
    TaskAnswer,
    TaskKind,
    TaskProgress,
    TrainerList,
)
from trireme_shared.protocol.records.checkpoints import CheckpointLatest, CheckpointRef
from trireme_shared.protocol.records.datasets import TextLines
from trireme_shared.protocol.records.job import Saving

DATASET = TextLines("a.txt")
SETTINGS = {
    "job": "j", "script": "s", "storage": "d", "dataset": DATASET, "evaluation_dataset": DATASET,
    "mode": Mode.ASYNC, "lanes": 1, "global_batch_size": 2, "records_per_task": 4, "epochs": 2,
    "evaluate_every": 3,
}  # fmt: skip


def marks_of(job: Job) -> dict[str, int]:
    """What a cut made now says of evaluations."""
    return evaluation.marked(job, Saving(uuid="", step=1)).model_dump(
        include={"evaluation", "minibatches"}, exclude_defaults=True
    )


class Trained:
    """A job of 2 epochs of 4 tasks of 2 minibatches; an evaluation has one task."""

    def __init__(self, records: int = 16, **changes: object) -> None:
        spec = JobSpec.model_validate({**SETTINGS, **changes})
        self.job = Job.open(
            spec, FileTable((TableFile("a.txt", records),), 4), FileTable((TableFile("b.txt", 4),), 4)
        )
        self.job.state = JobState(phase=Phase.RUNNING, generation=1)
        self.job.trainers = TrainerList(generation=1, names=("t1", "t2"))
        self.kept: list[CheckpointRef] = []
        self.events: list[str] = []
        self.requests = 0

    def do(self, decision: Decision[object]) -> object:
        for change in decision.changes:
            self.job.apply(change, 0.0)
        self.events += [event.name for event in decision.events]
        return decision.answer

    def ask(self, *, beside: bool = False) -> Task | str:
        self.requests += 1
        ask = AcquireTask(trainer="t1", request=f"r{self.requests}", generation=1, beside=beside)
        answer = self.do(tasks.acquire(self.job, ask))
        assert isinstance(answer, TaskAnswer)
        return answer.task or answer.answer

    def complete(self, task: Task | str, **sums: float) -> None:
        assert isinstance(task, Task)
        report = CompleteTask(
            trainer="t1", attempt=task.attempt, epoch=task.epoch, timeline=task.timeline, sums=sums
        )
        self.do(tasks.complete(self.job, task.task_id, report))

    def train(self, count: int) -> None:
        for _ in range(count):
            self.complete(self.ask())

    def commit(self, step: int) -> CheckpointRef:
        """A checkpoint of a cut made now."""
        marks = marks_of(self.job)
        ref = CheckpointRef(
            uuid=f"u{step}", step=step, timeline=self.job.state.timeline, manifest="m", **marks
        )
        self.kept.insert(0, ref)
        latest = CheckpointLatest(
            uuid=ref.uuid, step=step, timeline=ref.timeline, term=1, timestamp="", manifest="m",
            slots=SlotMap(version=1, owners=(0,)), kept=tuple(self.kept),
        )  # fmt: skip
        self.job.members = Members(latest=latest)
        return ref

    def evaluate(self, value: float) -> None:
        assert self.do(evaluation.begin(self.job))
        self.complete(self.ask(beside=True), right=1.0)
        self.complete(self.ask(beside=True), accuracy=value)


def test_an_evaluation_is_due_once_so_many_minibatches_are_trained_and_the_one_before_it_is_over():
    trained = Trained()
    trained.train(1)
    assert marks_of(trained.job) == {}
    trained.train(1)
    assert marks_of(trained.job) == {"evaluation": 1, "minibatches": 4}
    trained.commit(1)
    assert trained.do(evaluation.begin(trained.job))
    trained.train(3)
    assert evaluation.due(trained.job) == 0
    trained.complete(trained.ask(beside=True), right=1.0)
    trained.complete(trained.ask(beside=True), accuracy=0.5)
    done = trained.job.evaluations[1]
    assert (done.step, done.saved, done.checkpoint) == (4, 1, "u1")
    assert marks_of(trained.job) == {"evaluation": 2, "minibatches": 10}


def test_minibatches_of_tasks_under_way_count_as_far_as_trainers_have_told():
    trained = Trained()
    trained.train(1)
    task = trained.ask()
    assert isinstance(task, Task)
    report = TaskProgress(trainer="t1", attempt=1, minibatches=1)
    tasks.report_progress(trained.job, task.task_id, report).sign_of_life(task.task_id, 1, 0.0)
    assert marks_of(trained.job) == {"evaluation": 1, "minibatches": 3}


def test_by_epoch_one_is_due_when_an_epoch_is_over():
    trained = Trained(evaluate_every="epoch")
    trained.train(3)
    assert evaluation.due(trained.job) == 0
    trained.train(1)
    assert marks_of(trained.job) == {"evaluation": 1, "minibatches": 8}


def test_the_cut_of_a_pause_is_marked_whatever_it_was_taken_for():
    trained = Trained()
    trained.train(2)
    trained.job.state = trained.job.state.model_copy(
        update={"phase": Phase.CHECKPOINTING, "saving": Saving(uuid="u1", step=1)}
    )
    assert trained.do(pause_checkpoint.cut(trained.job))
    saving = trained.job.state.saving
    assert saving is not None
    assert (saving.cut, saving.evaluation, saving.minibatches) == (True, 1, 4)


def test_each_cut_is_marked_until_one_is_committed_and_the_newest_of_them_is_evaluated():
    trained = Trained()
    trained.train(2)
    trained.commit(1)
    trained.train(1)
    newest = trained.commit(2)
    assert trained.do(evaluation.begin(trained.job))
    running = trained.job.evaluation.running
    assert running is not None
    assert running.ref == newest
    assert trained.job.evaluation.checkpoints == {"u2"}


def test_the_export_waits_for_the_evaluation_that_runs_and_none_begins_after_training():
    trained = Trained()
    trained.train(2)
    trained.commit(1)
    trained.do(evaluation.begin(trained.job))
    trained.train(6)
    assert trained.job.state.stage is Stage.EVALUATE
    trained.complete(trained.ask(), right=1.0)
    assert (trained.job.state.stage, trained.ask()) == (Stage.EXPORT, "wait")
    trained.complete(trained.ask(beside=True), right=1.0)
    trained.complete(trained.ask(beside=True), accuracy=0.5)
    export = trained.ask()
    assert isinstance(export, Task)
    assert export.kind is TaskKind.EXPORT
    late = Trained()
    late.train(2)
    late.commit(1)
    late.train(6)
    assert not late.do(evaluation.begin(late.job))


def stopping() -> Trained:
    """One evaluation said so, in mid-epoch, while a task is under way."""
    trained = Trained(24, stop_early="accuracy:max:patience=1", evaluate_every=1)
    for step in (1, 2):
        trained.train(1)
        trained.commit(step)
        trained.evaluate(0.5)
    return trained


def test_training_ends_early_once_the_tasks_that_were_given_are_done():
    trained = stopping()
    trained.job.evaluation = trained.job.evaluation.model_copy(update={"stop_after": None})
    under_way, again = trained.ask(), trained.ask()
    trained.job.evaluation = trained.job.evaluation.model_copy(update={"stop_after": 2})
    assert isinstance(again, Task)
    trained.do(Decision(None, trained.job.training.put_back(again.task_id, "its trainer died")))
    given = trained.ask()
    assert isinstance(given, Task)
    assert given.task_id == again.task_id
    assert trained.ask() == "wait"
    trained.complete(under_way)
    assert trained.job.state.stage is Stage.TRAIN
    trained.complete(given)
    assert trained.job.state.stage is Stage.EVALUATE
    result = trained.job.state.result
    assert (result.stopped_step, result.trained_records, result.stopped_epochs) == (8, 16, 0)


def test_with_nothing_under_way_training_ends_when_the_next_task_is_asked_for():
    trained = stopping()
    assert trained.ask() == "wait"
    assert trained.job.state.stage is Stage.EVALUATE
    result = trained.job.state.result
    assert (result.stopped_step, result.trained_records, result.stopped_epochs) == (4, 8, 0)
    assert trained.events[-3:] == ["stopping_early", "stopped_early", "stage_changed"]
    assert evaluation.due(trained.job) == 0


def test_a_request_whose_answer_was_lost_gets_its_task_although_training_ends():
    trained = stopping()
    trained.job.evaluation = trained.job.evaluation.model_copy(update={"stop_after": None})
    task = trained.ask()
    trained.job.evaluation = trained.job.evaluation.model_copy(update={"stop_after": 2})
    trained.requests -= 1
    assert trained.ask() == task


def test_a_rollback_forgets_evaluations_of_later_checkpoints_and_begins_anew_the_one_under_way():
    trained = Trained(evaluate_every=1)
    trained.train(1)
    trained.commit(1)
    trained.evaluate(0.5)
    trained.train(1)
    trained.commit(2)
    trained.do(evaluation.begin(trained.job))
    trained.ask(beside=True)

    def go_back(step: int) -> None:
        trained.job.state = trained.job.state.model_copy(update={"timeline": 7 + step})
        trained.do(Decision(None, (NextEpoch(0), *evaluation.rewind(trained.job, step))))

    go_back(2)
    status = trained.job.evaluation
    assert (status.timeline, status.settled, [one.number for one in status.recent]) == (9, 1, [1])
    assert status.running is not None
    assert status.running.number == 2
    assert trained.job.queues[TaskKind.VALIDATE].counts == (1, 0, 0, 0)
    go_back(1)
    assert (trained.job.evaluation.running, trained.job.evaluation.settled) == (None, 1)
    go_back(0)
    assert (trained.job.evaluation.settled, trained.job.evaluations) == (0, {})


def test_independent_checkpoints_cannot_be_evaluated():
    with pytest.raises(
        ValidationError,
        match="evaluate_every is 3 and checkpoint_kind independent: what is evaluated is one version",
    ):
        JobSpec.model_validate({**SETTINGS, "checkpoint_kind": "independent"})


def test_a_trainer_that_has_not_heard_of_a_roll_back_is_given_nothing() -> None:
    """It was at the evaluation after training, or the export: it would report a task of training as one of
    those, and its records were never trained."""
    trained = Trained()
    trained.job.state = JobState(phase=Phase.RUNNING, generation=8, timeline=7)
    with pytest.raises(StaleGeneration, match="before the job went back to a checkpoint"):
        tasks.acquire(trained.job, AcquireTask(trainer="t1", request="r", generation=6))
    answer = tasks.acquire(trained.job, AcquireTask(trainer="t1", request="r", generation=7)).answer
    assert answer.task is not None
    assert answer.task.timeline == 7
