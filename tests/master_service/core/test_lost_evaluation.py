"""A synchronous job whose result depends on evaluations goes back for one whose checkpoint is lost."""

from __future__ import annotations

import pytest

from master_service.core.decisions import evaluation, recovery, tasks
from tests.master_service.core.test_evaluation import Trained
from trireme_shared.checkpoints.schedule import way_back
from trireme_shared.protocol.records import FailTask, JobState, Phase, Task, UserFailure
from trireme_shared.protocol.records.checkpoints import CheckpointRef

EVERY = 10
BEST = "accuracy:max"


def ref(step: int, timeline: int = 0, origin: str = "") -> CheckpointRef:
    """Evaluations are of each tenth version."""
    return CheckpointRef(
        uuid=f"u{step}-{timeline}", step=step, timeline=timeline, manifest="m", origin=origin,
        evaluation=0 if step % EVERY else step // EVERY, evaluated_before=max(0, step - 1) // EVERY,
    )  # fmt: skip


def back_at(trained: Trained, step: int) -> None:
    """It has loaded that checkpoint, and runs."""
    job = trained.job
    assert (job.state.phase, job.state.checkpoint) == (Phase.ROLLING_BACK, ref(step).uuid)
    for change in evaluation.rewind(job, step):
        job.apply(change, 0.0)
    job.state = job.state.model_copy(update={"phase": Phase.RUNNING})


def test_it_goes_back_as_soon_as_a_later_version_is_saved():
    trained = Trained(ref(7), ref(5), keep_best=BEST)
    assert not recovery.is_evaluation_lost(trained.job), "it may be on its way"
    trained.keep(ref(10), ref(7))
    assert not recovery.is_evaluation_lost(trained.job), "it is there"
    trained.keep(ref(11), ref(7), ref(5))
    assert trained.do(recovery.go_back_for_evaluation(trained.job))
    assert trained.events == ["the checkpoint of evaluation 1 was not written: the job goes back to step 7"]
    assert not trained.do(recovery.go_back_for_evaluation(trained.job)), "it goes back already"
    back_at(trained, 7)
    again = ref(10, trained.job.state.timeline, ref(7).uuid)
    trained.keep(again, ref(7), ref(5))
    assert not recovery.is_evaluation_lost(trained.job)
    trained.evaluate(0.5)
    assert trained.job.evaluations[1].checkpoint == again.uuid


def test_results_that_change_nothing_are_left_out_without_going_back():
    trained = Trained(ref(20), ref(7))
    assert not recovery.is_evaluation_lost(trained.job)
    assert trained.do(evaluation.begin(trained.job))
    assert trained.job.evaluation.settled == 1


def test_it_goes_back_behind_the_evaluations_that_are_over():
    trained = Trained(ref(10), ref(7), stop_early="accuracy:max:patience=3")
    trained.evaluate(0.5)
    trained.keep(ref(23), ref(14), ref(10))
    trained.do(recovery.go_back_for_evaluation(trained.job))
    back_at(trained, 14)
    assert trained.job.evaluation.settled == 1
    assert trained.job.evaluation.recent[0].metrics == {"accuracy": 0.5}


def test_after_three_times_the_evaluation_is_left_out():
    trained = Trained(ref(11), ref(7), keep_best=BEST)
    for _ in range(recovery.MOST_REDONE):
        assert trained.do(recovery.go_back_for_evaluation(trained.job))
        back_at(trained, 7)
        timeline = trained.job.state.timeline
        trained.keep(ref(11, timeline, ref(7).uuid), ref(7))
    assert not trained.do(recovery.go_back_for_evaluation(trained.job))
    trained.keep(ref(20, timeline, ref(7).uuid), ref(7))
    assert trained.do(evaluation.begin(trained.job))
    assert "left out" in trained.events[-2]


def test_before_any_checkpoint_was_there_training_starts_over():
    trained = Trained(ref(12), keep_best=BEST)
    assert trained.do(recovery.go_back_for_evaluation(trained.job))
    assert (trained.job.state.phase, trained.job.state.checkpoint) == (Phase.ROLLING_BACK, "")
    assert "training starts over" in trained.events[-1]


@pytest.mark.parametrize(
    "state",
    [
        JobState(phase=Phase.ROLLING_BACK, generation=1),
        JobState(phase=Phase.RUNNING, generation=2, timeline=2),
        JobState(phase=Phase.FAILED, generation=1),
    ],
)
def test_a_job_that_does_not_run_or_whose_evaluations_are_of_another_timeline_is_left_alone(state):
    trained = Trained(ref(11), ref(7), keep_best=BEST)
    trained.job.state = state
    assert not recovery.is_evaluation_lost(trained.job)


def test_it_is_not_needed_where_training_ends_before_that_evaluation():
    trained = Trained(ref(10), ref(7), stop_early="accuracy:max:patience=1")
    trained.evaluate(0.5)
    trained.keep(ref(20), ref(10), ref(7))
    trained.evaluate(0.4)
    assert trained.job.evaluation.stop_after == 2
    trained.keep(ref(31), ref(20))
    assert not recovery.is_evaluation_lost(trained.job)


@pytest.mark.parametrize(
    ("error_type", "goes_back"), [("CHECKPOINT_UNUSABLE", True), ("STORAGE_UNREACHABLE", False)]
)
def test_a_damaged_checkpoint_is_made_again_and_a_storage_that_is_away_is_not_waited_for(
    error_type, goes_back
):
    trained = Trained(ref(10), ref(7), keep_best=BEST)
    trained.do(evaluation.begin(trained.job))
    failure = UserFailure(error_type=error_type, message="changed")
    for _ in range(2):
        task = trained.ask()
        assert isinstance(task, Task)
        report = FailTask(trainer="t1", attempt=task.attempt, epoch=task.epoch, failure=failure)
        trained.do(tasks.fail_task(trained.job, task.task_id, report))
    if goes_back:
        assert trained.job.state.damaged == (ref(10).uuid,)
        back_at(trained, 7)
        assert trained.job.evaluation.running is None
    else:
        assert trained.job.state.phase is Phase.RUNNING
        assert "changed" in trained.job.evaluations[1].left_out


def test_the_checkpoint_to_go_back_to_is_the_newest_before_that_version_and_whole():
    spec = Trained(ref(1), keep_best=BEST).job.spec
    kept = [ref(step) for step in (23, 20, 14, 10, 7)]
    assert way_back(spec, 2, kept, kept[0], ()) == ref(20)
    assert way_back(spec, 1, kept, kept[0], ()) == ref(10)
    assert way_back(spec, 1, kept, kept[0], {ref(10).uuid}) == ref(7)
    assert way_back(spec, 1, kept[:2], kept[0], ()) is None
    unmarked = ref(7).model_copy(update={"evaluated_before": None})
    assert way_back(spec, 1, [unmarked], unmarked, ()) is None, (
        "nobody knows which evaluations it has before it"
    )
