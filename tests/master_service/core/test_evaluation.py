"""Evaluations while a job trains, as the master decides them."""

from __future__ import annotations

import pytest

from master_service.core.changes import Decision
from master_service.core.decisions import evaluation, tasks
from master_service.core.queue.file_table import FileTable, TableFile
from master_service.core.state.job import Job, Members
from trireme_shared.checkpoints.schedule import kept_after
from trireme_shared.protocol.errors import Conflict, StaleAttempt
from trireme_shared.protocol.evaluations import MOST_METRICS, evaluation_of, evaluations_before
from trireme_shared.protocol.records import (
    AcquireTask,
    CompleteTask,
    FailTask,
    FailureCause,
    JobSpec,
    JobState,
    Phase,
    SlotMap,
    Stage,
    Task,
    TrainerList,
    UserFailure,
)
from trireme_shared.protocol.records.checkpoints import CheckpointLatest, CheckpointRef
from trireme_shared.protocol.records.datasets import TextLines
from trireme_shared.protocol.records.metric_states import Elements, MetricState, Reduction, Sum
from trireme_shared.protocol.records.step import LanePosition, StepRecord

DATASET = TextLines("a.txt")


def ref(number: int, step: int = 0, timeline: int = 0) -> CheckpointRef:
    return CheckpointRef(
        uuid=f"u{number}", step=step or 10 * number, timeline=timeline, manifest="m", evaluation=number
    )


class Trained:
    """A job whose evaluations have 2 tasks of 4 records. `kept`: newest first."""

    def __init__(
        self, *kept: CheckpointRef, keep_best: str | None = None, stop_early: str | None = None
    ) -> None:
        spec = JobSpec(
            job="j", script="s", storage="d", dataset=DATASET, evaluation_dataset=DATASET, evaluate_every=10,
            lanes=2, global_batch_size=4, records_per_task=4, max_task_failures=2, keep_best=keep_best,
            stop_early=stop_early,
        )  # fmt: skip
        self.job = Job.open(
            spec, FileTable((TableFile("a.txt", 8),), 4), FileTable((TableFile("b.txt", 8),), 4)
        )
        self.job.state = JobState(phase=Phase.RUNNING, generation=1)
        self.job.trainers = TrainerList(generation=1, lanes=2, names=("t1", "t2", "t3"))
        self.keep(*kept)
        self.events: list[str] = []
        self.requests = 0

    def keep(self, *kept: CheckpointRef) -> None:
        slots = SlotMap(version=1, owners=(0,))
        first = kept[0]
        self.job.members = Members(
            latest=CheckpointLatest(
                uuid=first.uuid, step=first.step, timeline=first.timeline, term=1, timestamp="", manifest="m",
                slots=slots, kept=kept
            )
        )  # fmt: skip

    def do(self, decision: Decision[object]) -> object:
        for change in decision.changes:
            self.job.apply(change, 0.0)
        self.events += [event.message for event in decision.events]
        return decision.answer

    def ask(self, trainer: str = "t1", awaited: int = 0, *, beside: bool = True) -> str | Task:
        self.requests += 1
        generation = self.job.state.generation
        ask = AcquireTask(
            trainer=trainer, request=f"r{self.requests}", generation=generation, beside=beside, epoch=awaited
        )
        answer = tasks.acquire(self.job, ask)
        self.do(answer)
        return answer.answer.task or answer.answer.answer

    def complete(self, task: str | Task, trainer: str = "t1", **sums: Sum) -> None:
        assert isinstance(task, Task)
        report = CompleteTask(
            trainer=trainer, attempt=task.attempt, epoch=task.epoch, timeline=task.timeline, sums=sums
        )
        self.do(tasks.complete(self.job, task.task_id, report))

    def evaluate(self, metric: float, name: str = "accuracy") -> None:
        assert self.do(evaluation.begin(self.job))
        for value in (1.0, 2.0):
            self.complete(self.ask(), right=value)
        self.complete(self.ask(), **{name: metric})


def test_an_evaluation_begins_with_its_checkpoint_and_gives_its_tasks_then_the_metrics():
    trained = Trained(ref(1))
    assert trained.ask() == "end"
    assert trained.ask(awaited=1) == "wait"
    assert trained.do(evaluation.begin(trained.job))
    assert not trained.do(evaluation.begin(trained.job))
    first, second = trained.ask("t1"), trained.ask("t2")
    assert [task.task_id for task in (first, second) if isinstance(task, Task)] == [
        "validate-0",
        "validate-1",
    ]
    assert trained.ask("t3") == "wait"
    trained.complete(second, "t2", right=2.5, records=4)
    trained.complete(first, right=1.5, records=4)
    assert trained.job.validation.sums == {"right": 4.0, "records": 8.0}
    metrics = trained.ask()
    assert isinstance(metrics, Task)
    assert metrics.task_id == "metrics-0"
    trained.complete(metrics, accuracy=0.5, broken=float("nan"))
    assert trained.job.evaluations[1].metrics == {"accuracy": 0.5}
    assert trained.events == [
        "evaluation 1 begins: step 10",
        "evaluation 1 (step 10): accuracy 0.5; not finite: broken",
    ]
    assert trained.ask(awaited=1) == "end"
    assert not trained.job.validation.sums


def test_states_of_metric_objects_count_once_in_whatever_order_tasks_end_and_are_no_metrics():
    def state(number: float, text: str) -> MetricState:
        counts = Elements(reduction=Reduction.SUM, dtype="float64", shape=(1,), numbers=(number,))
        return MetricState(elements={"sum": counts}, tensors={"kept": {0: (text,)}})

    trained = Trained(ref(1))
    trained.do(evaluation.begin(trained.job))
    first, second = trained.ask("t1"), trained.ask("t2")
    trained.complete(second, "t2", auc=state(1e16, "second"))
    trained.complete(first, auc=state(-1e16, "first"))
    again = trained.job.validation
    trained.complete(second, "t2", auc=state(1.0, "again"))
    assert trained.job.validation == again
    found = again.sums["auc"]
    assert isinstance(found, MetricState)
    assert found.elements["sum"].numbers == (0.0,)
    assert found.tensors == {"kept": {0: ("first",), 1: ("second",)}}
    trained.complete(trained.ask(), accuracy=0.5, auc=state(1.0, "no number"))
    assert trained.job.evaluations[1].metrics == {"accuracy": 0.5}


def test_training_tasks_are_given_beside_an_evaluation():
    trained = Trained(ref(1))
    trained.do(evaluation.begin(trained.job))
    trained.ask("t3")
    answer = tasks.acquire(trained.job, AcquireTask(trainer="t1", request="l", generation=1, stream=0)).answer
    assert answer.task is not None
    assert answer.task.task_id.isdigit()


def test_a_report_of_an_earlier_evaluation_is_stale():
    trained = Trained(ref(1))
    trained.do(evaluation.begin(trained.job))
    late = trained.ask("t2")
    assert isinstance(late, Task)
    trained.do(evaluation.leave_out(trained.job, 1, "lost"))
    trained.keep(ref(2), ref(1))
    trained.do(evaluation.begin(trained.job))
    again = trained.ask("t2")
    assert isinstance(again, Task)
    assert (again.task_id, again.attempt) == (late.task_id, late.attempt)
    with pytest.raises(StaleAttempt):
        trained.complete(late, "t2", right=1.0)


def test_the_tasks_of_a_lost_trainer_and_late_ones_are_given_again():
    trained = Trained(ref(1))
    trained.do(evaluation.begin(trained.job))
    trained.ask("t3")
    trained.job.trainers = TrainerList(generation=1, lanes=2, names=("t1", "t2"))
    trained.do(tasks.put_back_lost(trained.job))
    again = trained.ask("t1")
    assert isinstance(again, Task)
    assert (again.task_id, again.attempt) == ("validate-0", 2)
    trained.do(tasks.expire(trained.job, 1e9))
    third = trained.ask("t2")
    assert isinstance(third, Task)
    assert (third.task_id, third.attempt) == ("validate-0", 3)


def test_a_rollback_forgets_what_came_after_its_checkpoint():
    trained = Trained(ref(1))
    trained.evaluate(0.5)
    trained.keep(ref(2), ref(1))
    trained.evaluate(0.6)
    trained.keep(ref(3), ref(2), ref(1))
    trained.do(evaluation.begin(trained.job))
    trained.ask()
    trained.job.state = trained.job.state.model_copy(
        update={"generation": 8, "timeline": 7, "checkpoint": "u1"}
    )
    trained.do(Decision(None, evaluation.rewind(trained.job, 15)))
    status = trained.job.evaluation
    assert (status.timeline, status.settled, status.running) == (7, 1, None)
    assert [each.number for each in evaluation.in_force(trained.job)] == [1]
    assert not trained.do(evaluation.begin(trained.job)), "those of the timeline that was left do not count"
    trained.keep(ref(2, timeline=7), ref(3), ref(2), ref(1))
    trained.evaluate(0.6)
    assert trained.job.evaluations[2].timeline == 7


@pytest.mark.parametrize("setting", ["keep_best", "stop_early"])
def test_a_metric_that_no_evaluation_reports_fails_the_job_and_names_those_that_are(setting: str):
    trained = Trained(ref(1), **{setting: "acuracy:max"})
    trained.evaluate(0.5)
    state = trained.job.state
    assert (state.phase, state.cause) == (Phase.FAILED, FailureCause.SCRIPT)
    assert state.reason == (
        f"{setting} is acuracy, and an evaluation has the metrics accuracy; name one of those, or "
        "have metrics(sums) in the script give it"
    )


def test_a_metric_that_not_even_the_last_evaluation_reports_is_told_with_the_export():
    """No evaluation was due while it trained."""
    trained = Trained(ref(1), keep_best="acuracy:max")
    trained.job.state = trained.job.state.model_copy(update={"stage": Stage.EXPORT})
    trained.complete(trained.ask(beside=False), loss=1.0)
    why = "keep_best is acuracy, and an evaluation has the metrics loss: the last model alone is exported"
    assert why in trained.events


def test_a_metric_that_a_setting_names_is_kept_however_many_there_are():
    trained = Trained(ref(1), keep_best="zz:max")
    assert trained.do(evaluation.begin(trained.job))
    for _ in range(2):
        trained.complete(trained.ask(), right=1.0)
    trained.complete(trained.ask(), **{f"m{number}": 1.0 for number in range(MOST_METRICS)}, zz=0.5)
    assert trained.job.evaluation.best is not None
    assert trained.job.evaluation.best.value == 0.5
    assert (
        f"; 1 more metrics are left out, of {MOST_METRICS} at most that are kept of an evaluation: let "
        "metrics(sums) in the script say which"
    ) in trained.events[-1]


def test_metrics_that_are_not_finite_are_named():
    trained = Trained(ref(1))
    assert trained.do(evaluation.begin(trained.job))
    for _ in range(2):
        trained.complete(trained.ask(), right=1.0)
    nowhere = {f"m{number}": float("nan") for number in range(6)}
    trained.complete(trained.ask(), right=1.0, **nowhere)
    assert trained.events[-1].endswith("right 1; not finite: m0, m1, m2, m3 and 2 more")


def test_a_metric_that_one_evaluation_lacks_is_no_reason_to_fail():
    trained = Trained(ref(1), keep_best="accuracy:max")
    trained.evaluate(0.5)
    trained.keep(ref(2), ref(1))
    trained.evaluate(float("nan"))
    trained.keep(ref(3), ref(2), ref(1))
    trained.evaluate(0.0, name="other")
    assert trained.job.state.phase is Phase.RUNNING
    assert trained.job.evaluation.best is not None
    assert trained.job.evaluation.best.step == 10


def test_a_restore_of_a_later_checkpoint_brings_the_evaluations_before_it_back():
    trained = Trained(ref(1), keep_best="accuracy:max", stop_early="accuracy:max:patience=3")
    for number, accuracy in enumerate([0.5, 0.7, 0.6], start=1):
        trained.keep(*(ref(each) for each in range(number, 0, -1)))
        trained.evaluate(accuracy)
    before = trained.job.evaluation
    trained.do(Decision(None, evaluation.rewind(trained.job, 15)))
    assert trained.job.evaluation.settled == 1
    trained.do(Decision(None, evaluation.rewind(trained.job, 35)))
    assert trained.job.evaluation == before, "the best one and the patience, too"
    trained.do(Decision(None, evaluation.rewind(trained.job, 15)))
    trained.keep(ref(3), ref(1))
    trained.do(Decision(None, evaluation.rewind(trained.job, 35)))
    assert trained.job.evaluation.settled == 1, (
        "the checkpoint of the best one is not kept, so it is made again"
    )


def test_a_rollback_forgets_evaluations_that_were_left_out_behind_its_checkpoint():
    """Nobody knows of which version an evaluation would have been whose checkpoint never came."""
    trained = Trained(ref(1))
    trained.evaluate(0.5)
    for number in (2, 3):
        trained.do(evaluation.leave_out(trained.job, number, "its checkpoint was not written"))
    trained.do(Decision(None, evaluation.rewind(trained.job, 15)))
    assert trained.job.evaluation.settled == 1
    assert list(trained.job.evaluations) == [1]
    trained.keep(ref(2, timeline=trained.job.state.timeline), ref(1))
    assert trained.do(evaluation.begin(trained.job)), "it comes again"


@pytest.mark.parametrize(
    ("keep_best", "steps"), [("accuracy:max", [10, 20, 20, 20]), ("accuracy:min", [10, 10, 10, 40])]
)
def test_the_best_evaluation_is_known_and_a_rollback_takes_it_back(keep_best: str, steps: list[int]):
    trained, found = Trained(ref(1), keep_best=keep_best), []
    for number, accuracy in enumerate([0.5, 0.7, 0.7, 0.4], start=1):
        trained.keep(*(ref(each) for each in range(number, 0, -1)))
        trained.evaluate(accuracy)
        assert trained.job.evaluation.best is not None
        found.append(trained.job.evaluation.best.step)
    assert found == steps
    trained.do(Decision(None, evaluation.rewind(trained.job, 15)))
    assert trained.job.evaluation.best is not None
    assert trained.job.evaluation.best.step == 10


def test_training_ends_at_the_version_behind_the_evaluation_that_was_one_too_many():
    trained = Trained(ref(1), stop_early="accuracy:max:patience=2:min_delta=0.1")
    for number, accuracy in enumerate([0.5, 0.55, 0.6], start=1):
        trained.keep(*(ref(each) for each in range(number, 0, -1)))
        trained.evaluate(accuracy)
    status = trained.job.evaluation
    assert (status.stop_after, status.stops_before(3), status.stops_before(4)) == (3, False, True)
    trained.keep(ref(4), ref(3))
    assert not trained.do(evaluation.begin(trained.job)), "that version is evaluated after training"
    positions = (LanePosition(lane=0, exhausted=True), LanePosition(lane=1, offset=2))
    ask = AcquireTask(trainer="t1", request="s", generation=1, stream=0, epoch=1, index=40, stopped=positions)
    trained.do(tasks.close_epoch(trained.job, ask))
    assert trained.job.state.stage is Stage.EVALUATE
    result = trained.job.state.result
    assert (result.trained_records, result.stopped_step, result.stopped_epochs) == (6, 40, 0)
    assert trained.job.training.finished
    assert tasks.acquire(trained.job, ask).answer.answer == "end"


def test_a_trainer_cannot_end_training_early_by_itself():
    trained = Trained(ref(1), stop_early="accuracy:max")
    ask = AcquireTask(
        trainer="t1",
        request="s",
        generation=1,
        stream=0,
        epoch=1,
        stopped=(LanePosition(lane=0), LanePosition(lane=1)),
    )
    with pytest.raises(Conflict):
        tasks.close_epoch(trained.job, ask)


def test_the_checkpoint_of_the_best_evaluation_is_kept():
    refs = [ref(number) for number in range(6, 0, -1)]
    latest = Trained(*refs).job.members.latest
    kept = kept_after(latest, ref(7), (), 1, {"u2"})
    assert [each.evaluation for each in kept] == [7, 6, 2]


def test_a_checkpoint_that_is_damaged_leaves_its_evaluation_out_and_the_job_goes_on():
    trained = Trained(ref(1))
    trained.do(evaluation.begin(trained.job))
    failure = UserFailure(error_type="CHECKPOINT_UNUSABLE", message="changed")
    for _ in range(2):
        task = trained.ask()
        assert isinstance(task, Task)
        report = FailTask(trainer="t1", attempt=task.attempt, epoch=task.epoch, failure=failure)
        trained.do(tasks.fail_task(trained.job, task.task_id, report))
    assert trained.job.state.phase is Phase.RUNNING
    assert "changed" in trained.job.evaluations[1].left_out
    assert trained.job.evaluation.settled == 1


def test_an_error_of_the_script_ends_the_job():
    trained = Trained(ref(1))
    trained.do(evaluation.begin(trained.job))
    for _ in range(2):
        task = trained.ask()
        assert isinstance(task, Task)
        failed = UserFailure(error_type="KeyError", message="x")
        report = FailTask(trainer="t1", attempt=task.attempt, epoch=task.epoch, failure=failed)
        trained.do(tasks.fail_task(trained.job, task.task_id, report))
    assert trained.job.state.phase is Phase.FAILED


@pytest.mark.parametrize(
    ("version", "epoch", "exhausted", "every", "number", "before"),
    [
        (0, 0, False, 5, None, 0),
        (5, 0, False, 5, 1, 0),
        (6, 0, True, 5, None, 1),
        (12, 1, True, "epoch", 2, 1),
        (13, 2, False, "epoch", None, 2),
        (15, 2, True, 5, None, 2),  # the last version is evaluated after training
        (15, 2, True, "epoch", None, 2),
        (10, 0, True, None, None, 0),
    ],
)
def test_which_versions_are_evaluated(version, epoch, exhausted, every, number, before):
    positions = tuple(LanePosition(lane=lane, epoch=epoch, exhausted=exhausted) for lane in range(2))
    record = StepRecord(version=version, positions=positions)
    assert evaluation_of(record, every, 3) == number
    assert evaluations_before(record, every) == before
