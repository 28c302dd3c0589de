"""What evaluations of an asynchronous job must give, whoever dies: no two runs have the same versions, so
each is checked against itself."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from tests.simulation.cluster import SimulatedCluster
from tests.simulation.compute import RATE
from tests.simulation.plans import Job
from tests.simulation.reference import evaluated
from tests.simulation.rows import COUNTING, PinnedRows
from trireme_shared.protocol.evaluations import Evaluation, EvaluationStatus, patience_after
from trireme_shared.protocol.records import JobState, Phase
from trireme_shared.protocol.records.job import Losses
from trireme_shared.protocol.records.job_choices import Criterion

TOLERANCE = 1e-3


def done_evaluations(cluster: SimulatedCluster) -> list[Evaluation]:
    names = sorted(cluster.simulated.names(cluster.keys.evaluations))
    values = [cluster.simulated.value(cluster.keys.evaluations + name) or b"" for name in names]
    return [Evaluation.model_validate_json(value) for value in values]


def asynchronous_evaluations(cluster: SimulatedCluster, every: int | str) -> Iterator[str]:
    """Numbered without a gap, each of one version that was pinned, with the sums of each record once; the
    best one is exported; training ends early if they say so, and only then."""
    job, trace = cluster.plan.job, cluster.trace
    found = done_evaluations(cluster)
    if [one.number for one in found] != list(range(1, len(found) + 1)):
        yield f"evaluations {[one.number for one in found]} are not numbered from 1 on"
    between = job.minibatches // job.epochs if every == "epoch" else int(every)
    points = [0, *(one.step // between for one in found)]
    if any(first >= second for first, second in pairwise(points)):
        yield f"evaluations at minibatches {[one.step for one in found]} are not one for each {between}"
    versions = {
        tuple(sorted(evaluated(job, vectors, rows).items())): held
        for held, (vectors, rows) in trace.pinned.items()
    }
    lost, torn = lost_minibatches(cluster), torn_pushes(cluster)
    for vectors, rows in trace.pinned.values():
        yield from _rows_of_another_instant(job, vectors[0], rows, lost, torn)
    for one in found:
        if one.left_out or tuple(sorted(one.metrics.items())) not in versions:
            yield f"evaluation {one.number} is of no version that was pinned: {one}"
    status = EvaluationStatus.model_validate_json(
        cluster.simulated.value(cluster.keys.evaluation_status) or b"{}"
    )
    if status.running is not None or status.settled != len(found):
        yield f"at the end there are {len(found)} evaluations, and their status is {status}"
    yield from _best(cluster, found, versions)
    yield from _stop(cluster, found)


def lost_minibatches(cluster: SimulatedCluster) -> int:
    """That parameter servers lacked after they came back from a checkpoint, as far as it was ever on record:
    a later roll-back may undo it, versions that were evaluated before keep it."""
    most: dict[str, int] = {}
    key = cluster.keys.losses.encode()
    for event in cluster.simulated.store.history:
        if event["kv"]["key"] == key and event.get("type") != "DELETE":
            losses = Losses.model_validate_json(event["kv"]["value"])
            for index in {*losses.lost, *losses.skipped}:
                count = losses.lost.get(index, 0) + losses.skipped.get(index, 0)
                most[index] = max(most.get(index, 0), count)
    return sum(most.values())


def torn_pushes(cluster: SimulatedCluster) -> int:
    """That a version may have at some blocks and not at others: one of each trainer that was left out of its
    cut, or had left before. Quiet jobs have none."""
    state, pause = cluster.keys.state.encode(), cluster.keys.pause.encode()
    trainers, left_out, gone = cluster.keys.trainers.encode(), 0, set()
    for event in cluster.simulated.store.history:
        key = event["kv"]["key"]
        if key == state:
            found = JobState.model_validate_json(event["kv"]["value"])
            if found.phase is Phase.COMPLETED:  # everybody leaves now
                break
            left_out = max(left_out, len(found.saving.left_out) if found.saving is not None else 0)
        elif key.startswith(trainers) and key != pause and event.get("type") == "DELETE":
            gone.add(key)
    return left_out + len(gone)


def _rows_of_another_instant(
    job: Job, values: np.ndarray[Any, Any], rows: PinnedRows | None, lost: int, torn: int
) -> Iterator[str]:
    """The first block and the table count the same: how often each record was trained. `lost`: minibatches
    that are on record as lost at one parameter server, so that its block or its rows lack them and the others
    do not; each counts 1 in all, as each of `torn` pushes."""
    if rows is None:
        return
    names = range(sum(job.files))
    initial = np.linspace(-1, 1, len(values)).astype(np.float32)
    counted = (values - initial)[: len(names)] / RATE
    of_rows = rows.lookup(names)[:, 0] / COUNTING.optimizer.lr
    apart = np.abs(counted - of_rows)
    if apart.max() > TOLERANCE and apart.sum() > lost + torn + TOLERANCE * len(names):
        yield (
            f"an evaluation had rows {of_rows.tolist()} beside blocks {counted.tolist()}, with "
            f"{lost} minibatches on record as "
            f"lost and at most {torn} torn pushes: they are of two instants"
        )


def _best(
    cluster: SimulatedCluster, found: list[Evaluation], versions: dict[tuple[tuple[str, float], ...], bytes]
) -> Iterator[str]:
    if cluster.plan.keep_best is None or not found:
        return
    metric, lowest = Criterion.parse(cluster.plan.keep_best)
    first = min(found, key=lambda one: one.metrics[metric] * (1 if lowest else -1))
    best = cluster.state.result.best
    # the sums after training have no `value`, so the last version never is the best one
    if best is None or (best.number, best.step, best.value) != (
        first.number,
        first.step,
        first.metrics[metric],
    ):
        yield f"the best evaluation is {first}, the job says {best}"
    elif cluster.trace.best[-1] != versions.get(tuple(sorted(first.metrics.items()))):
        yield f"evaluation {first.number} is the best one, other parameters were exported"


def _stop(cluster: SimulatedCluster, found: list[Evaluation]) -> Iterator[str]:
    stop, patience = cluster.spec.stop_early, None
    for one in found:
        if patience is not None and patience.over:
            yield f"evaluation {one.number} came after one that ends training"
        patience = patience_after(patience, one.metrics, stop)
    over = patience is not None and patience.over
    if cluster.state.result.stopped_step is not None and not over:
        yield (
            f"training ended early at minibatch {cluster.state.result.stopped_step} although no "
            "evaluation says so"
        )
