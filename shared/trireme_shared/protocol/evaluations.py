"""Evaluations while a job trains: of which versions, by what they are compared, what came out.

version due ─► its checkpoint is committed ─► tasks over the evaluation dataset ─► metrics
    ─► Evaluation, and the next EvaluationStatus
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Annotated

from pydantic import Field

from trireme_shared.protocol.errors import Gone, InvalidArgument
from trireme_shared.protocol.records.checkpoints import CheckpointRef
from trireme_shared.protocol.records.job_choices import Criterion, Mode, StopEarly
from trireme_shared.protocol.records.job_spec import JobSpec
from trireme_shared.protocol.records.record import Record
from trireme_shared.protocol.records.step import StepRecord
from trireme_shared.protocol.records.tasks import BestEvaluation

MOST_METRICS = 64


class Patience(Record):
    """Of stop_early: the value that later ones have to be better than, and how many evaluations were not.
    `over`: so training ends."""

    value: float = Field(description="The value that later ones have to be better than.")
    worse: int = Field(default=0, description="So many evaluations in a row were not better.")
    over: bool = Field(default=False, description="Whether training ends.")


class Evaluation(Record):
    """Evaluation `number` of a job (counted from 1), of the version `step`, which `checkpoint` holds.
    Asynchronous: `step` is how many minibatches were trained, `saved` the checkpoint's number in the job.
    `metrics`: as the script's `metrics(sums)` gives them; values that are not finite are left out.
    `left_out`: why there is no result. `best`: the best one up to here, this one included. `patience`: of
    stop_early."""

    number: int
    step: int
    timeline: int
    checkpoint: str
    metrics: Annotated[dict[str, float], Field(max_length=MOST_METRICS)] = Field(default_factory=dict)
    left_out: str = Field(default="", description="Why there is no result; empty: there is one.")
    best: BestEvaluation | None = Field(
        default=None, description="The best evaluation up to this one; null: the job has no keep_best."
    )
    patience: Patience | None = Field(
        default=None,
        description="How many evaluations were not better than which value; null: the job has no stop_early.",
    )
    saved: int = Field(
        default=0, description="Asynchronous: number of its checkpoint; 0: the job is synchronous."
    )


class RunningEvaluation(Record):
    """Its tasks are given out."""

    number: int
    ref: CheckpointRef


class EvaluationStatus(Record):
    """What members follow. It holds for `timeline` only. Evaluations up to number `settled` are over;
    `recent`: the last two of them. `stop_after`: training ends at the version of the evaluation behind this
    one. `redone`: the evaluation for which the job went back last, because its checkpoint was lost, and how
    many times it did."""

    timeline: int = 0
    settled: int = 0
    running: RunningEvaluation | None = None
    recent: tuple[Evaluation, ...] = ()
    best: BestEvaluation | None = None
    stop_after: int | None = None
    redone: tuple[int, int] = (0, 0)

    def stops_before(self, number: int | None) -> bool:
        """Whether training ends at the version of evaluation `number`."""
        return number is not None and self.stop_after is not None and self.stop_after < number

    @property
    def number(self) -> int:
        """Of the evaluation that runs, or of the last one that is over."""
        return self.running.number if self.running is not None else self.settled

    @property
    def checkpoints(self) -> frozenset[str]:
        """Those that must be kept: the best evaluation's, and the one that is evaluated."""
        best = {self.best.checkpoint} if self.best is not None else set()
        return frozenset(best | ({self.running.ref.uuid} if self.running is not None else set()))

    def result(self, number: int) -> Evaluation | None:
        """Of that evaluation, if it is one of the last two."""
        return next((each for each in self.recent if each.number == number), None)


def results_count(spec: JobSpec) -> bool:
    """Whether the results of evaluations change what a synchronous job gives: its steps, when training ends,
    or its best model."""
    uses = spec.plateau_metric is not None or spec.stop_early is not None or spec.keep_best is not None
    return uses and spec.evaluate_every is not None and spec.mode is Mode.SYNC


def criteria(spec: JobSpec) -> dict[str, str]:
    """By setting: the metric of evaluations that it names."""
    best, stop = spec.keep_best, spec.stop_early
    named = {
        "keep_best": Criterion.parse(best).metric if best is not None else None,
        "stop_early": Criterion.parse(stop.metric).metric if stop is not None else None,
        "plateau_metric": spec.plateau_metric,
    }
    return {setting: metric for setting, metric in named.items() if metric is not None}


def why_unreported(spec: JobSpec, metrics: Collection[str]) -> str:
    """Which settings name a metric that an evaluation with these `metrics` does not report, as a sentence;
    "": none does. Values that are not finite are reported, too."""
    missing = [
        f"{setting} is {metric}" for setting, metric in criteria(spec).items() if metric not in metrics
    ]
    return (
        f"{', '.join(missing)}, and an evaluation has the metrics {', '.join(metrics) or 'none'}"
        if missing
        else ""
    )


WHAT_TO_DO = "name one of those, or have metrics(sums) in the script give it"


def check_criteria(spec: JobSpec, metrics: Collection[str]) -> None:
    """`metrics`: the names that an evaluation reported. Raises InvalidArgument if a setting names another
    one."""
    if why := why_unreported(spec, metrics):
        raise InvalidArgument(why, hint=WHAT_TO_DO)


def plateau_value(
    status: EvaluationStatus, number: int, metric: str, known: Evaluation | None = None
) -> float | None:
    """What ReduceLROnPlateau is told at the version of evaluation `number`: the value of `metric` in the
    evaluation before (NaN: it has none that is finite), None if that was left out. `known`: a result that the
    status may have forgotten. Raises Gone: two later results are known, so this version is overtaken, and
    what took effect at it cannot be told any more."""
    found = status.result(number - 1)
    if found is None and known is not None and known.number == number - 1:
        found = known
    if found is None and len(status.recent) > 1 and min(each.number for each in status.recent) >= number:
        raise Gone(
            f"the result of evaluation {number - 1} is forgotten, {status.settled} are over; join again"
        )
    return found.metrics.get(metric, math.nan) if found is not None and not found.left_out else None


def evaluated_point(mode: Mode, step: int) -> str:
    """For people: `step 40`; `minibatch 40` of an asynchronous job, which has no common step."""
    return f"{'step' if mode is Mode.SYNC else 'minibatch'} {step}"


def better(best: BestEvaluation | None, done: Evaluation, keep_best: str | None) -> BestEvaluation | None:
    """The better one; `best` if `done` has no value of the metric, or an equal one."""
    if keep_best is None:
        return None
    criterion = Criterion.parse(keep_best)
    value = done.metrics.get(criterion.metric)
    if value is None or (best is not None and not criterion.is_better(value, best.value)):
        return best
    return BestEvaluation(
        number=done.number, step=done.step, checkpoint=done.checkpoint, metric=criterion.metric, value=value
    )


def patience_after(
    before: Patience | None, metrics: Mapping[str, float], stop: StopEarly | None
) -> Patience | None:
    """After one more evaluation. Without a value of the metric it is one that is not better."""
    if stop is None:
        return None
    criterion = Criterion.parse(stop.metric)
    value = metrics.get(criterion.metric)
    if value is not None and (before is None or criterion.is_better(value, before.value, stop.min_delta)):
        return Patience(value=value)
    if before is None:
        return None
    worse = before.worse + 1
    return Patience(value=before.value, worse=worse, over=worse >= stop.patience)


def evaluation_of(record: StepRecord, every: int | str | None, epochs: int) -> int | None:
    """The number of the evaluation that is due at this version; None: none is. The last version is evaluated
    after training."""
    if every is None or record.version == 0 or not record.positions:
        return None
    over = all(position.exhausted for position in record.positions)
    epoch = max(position.epoch for position in record.positions)
    if over and epoch + 1 >= epochs:
        return None
    if every == "epoch":
        return epoch + 1 if over else None
    assert isinstance(every, int)
    return None if record.version % every else record.version // every


def evaluations_before(record: StepRecord, every: int | str | None) -> int:
    """How many evaluations are due at versions before this one."""
    if every is None or record.version == 0 or not record.positions:
        return 0
    if every == "epoch":
        return max(position.epoch for position in record.positions)
    assert isinstance(every, int)
    return (record.version - 1) // every
