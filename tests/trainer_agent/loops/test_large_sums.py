"""Sums of an evaluation that cannot be kept end the job at once, with the reason: another attempt would give
the same ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.equipment.replaced import replaced
from tests.trainer_agent.cluster import cluster
from tests.trainer_agent.scripts import spec_for, write_script
from tests.trainer_agent.tasks.test_source import source
from trainer_agent.loops.evaluating import TaskSums
from trireme_shared.protocol.errors import UserCodeError
from trireme_shared.protocol.records import Phase, Task, TaskKind
from trireme_shared.protocol.records.metric_states import MetricState
from trireme_shared.protocol.records.queue import MAX_SUMS_BYTES, EvaluationSums

MINIBATCH_BYTES = 30 * 1024
EVALUATION_TASK = Task(task_id="evaluate-0", kind=TaskKind.EVALUATE, attempt=1, file="part-0", count=64)
KEEPS_ALL = """
import torchmetrics


class Everything(torchmetrics.Metric):
    def __init__(self):
        super().__init__()
        self.add_state("kept", default=[], dist_reduce_fx="cat")

    def update(self, values):
        self.kept.append(torch.rand(len(values), 2560))  # states are sent compressed

    def compute(self):
        return torch.zeros(())


def evaluation_metrics():
    return {"everything": Everything()}


def evaluate(model, batch, metrics):
    metrics["everything"].update(batch["x"])
"""
MANY_NAMES = """
def evaluate(model, batch):
    return {f"a_sum_with_a_long_name_{number}": 1.0 for number in range(9000)}
"""


MANY_METRICS = """
def metrics(sums):
    return {f"a_metric_with_a_long_name_{number}": 1.0 for number in range(9000)}
"""


class Growing:
    """Computes evaluations whose metric keeps `kept` bytes of each minibatch."""

    def __init__(self, kept: int = MINIBATCH_BYTES) -> None:
        self.minibatches, self.kept = 0, kept

    async def evaluate(self, *_: Any, **__: Any) -> dict[str, Any]:
        self.minibatches += 1
        return {"auc": MetricState(tensors={"kept": {0: ("x" * self.kept,)}}), "loss": 0.0}


async def test_a_task_ends_at_the_minibatch_whose_states_are_too_many() -> None:
    """Not after all of them: a task of a million records would fill the trainer's memory before."""
    its, computing = source([]), Growing()
    sums = TaskSums.of(await its.load(EVALUATION_TASK), its.spec)
    with pytest.raises(UserCodeError, match="the metric auc of the evaluation has") as refused:
        while not sums.complete:
            await sums.next(its, computing)  # type: ignore[arg-type]  nothing else is computed
    assert refused.value.details["fatal"]
    assert f"bytes in one task, at most {MAX_SUMS_BYTES} bytes are taken" in refused.value.message
    fitting = MAX_SUMS_BYTES // MINIBATCH_BYTES
    assert (computing.minibatches, sums.done, sums.total) == (fitting + 1, fitting, 16)


async def test_what_a_metric_keeps_is_measured_once_until_it_may_be_too_much() -> None:
    """Not at each minibatch: to write all states costs more with every one that is kept."""
    its, computing = source([]), Growing(100)
    many = EVALUATION_TASK.with_fields(count=4 * 1000)
    sums, measured, room = TaskSums.of(await its.load(many), its.spec), [], EvaluationSums.room

    def measuring(found: EvaluationSums) -> int:
        measured.append(len(found.to_bytes()))
        return room(found)

    with replaced(EvaluationSums, "room", measuring):
        while not sums.complete:
            await sums.next(its, computing)  # type: ignore[arg-type]  nothing else is computed
    assert (sums.done, len(measured)) == (1000, 1)
    assert sums.room == MAX_SUMS_BYTES - len(EvaluationSums(sums=sums.sums).to_bytes()), "to the byte"


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize(
    ("evaluation", "told", "task"),
    [
        (KEEPS_ALL, "the metric everything of the evaluation has", "task evaluate-"),
        (MANY_NAMES, "the evaluation has 9000 sums of", "task evaluate-"),
        (MANY_METRICS, "the evaluation has 9000 metrics of", "task export-"),
    ],
)
async def test_a_job_whose_sums_are_too_large_fails_at_once_with_both_sizes(
    tmp_path: Path, evaluation: str, told: str, task: str, mode: str
) -> None:
    script = write_script(tmp_path, evaluation=evaluation)
    spec = spec_for(script, epochs=1, evaluation_dataset=spec_for(script).dataset, mode=mode)
    async with cluster(spec, 1) as made:
        state = await made.ended()
        events = [each.name for each in made.master.job.events.after(0, 100)]
    assert state.failure is not None
    assert (state.phase, state.failure.error_type) == (Phase.FAILED, "TOO_LARGE")
    assert told in state.failure.message
    assert f"at most {MAX_SUMS_BYTES} bytes are taken" in state.failure.message
    assert state.failure.task.startswith(task)
    ended = [name for name in events if name in ("task_requeued", "job_failed")]
    assert ended == ["task_requeued", "job_failed"], "no attempt after the first one"
