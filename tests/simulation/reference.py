"""What synchronous training must give, computed in one loop with plain torch: no processes, no protocol.

Shared with the product: the order of tasks and records, the tree of lanes, the seeds, the norm of a gradient;
all else is written again here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import torch

from master_service.core.queue.file_table import FileTable, TableFile
from master_service.core.queue.streams import EpochOrder, Streams
from master_service.core.state.series import Value
from tests.simulation.compute import (
    BLOCK_ELEMENTS,
    RATE,
    gradients,
    layout,
    mean_over,
    metrics,
    result_of_lane,
    rounded,
    validation,
)
from tests.simulation.nonfinite import trained
from tests.simulation.plans import Job
from tests.simulation.rows import PinnedRows, ReferenceRows, lane_rows, no_rows, sum_of
from trainer_agent.data.shard import minibatch_indices, minibatches_in
from trainer_agent.model.compute import LaneResult
from trireme_shared.blocks.gradient_norm import clip_factor, norm_of, squares_of
from trireme_shared.protocol.lanes import step_seed
from trireme_shared.protocol.records import Mode, TaskKind
from trireme_shared.protocol.records.job_choices import Criterion, StopEarly


def tasks_of(job: Job) -> list[list[int]]:
    """Names of the records of each task; record names count through all files."""
    tasks: list[list[int]] = []
    name = 0
    for records in job.files:
        starts = range(0, records, job.task_records)
        tasks += [
            list(range(name + first, name + min(first + job.task_records, records))) for first in starts
        ]
        name += records
    return tasks


Ended = tuple[int, int]
"""Asynchronous: the epoch in which training ended early, and how many tasks of it had been given."""


def trained_tasks(job: Job, epoch: int, ended: Ended | None = None) -> list[int]:
    """Numbers of the tasks that an asynchronous job trains in this epoch."""
    count = len(tasks_of(job))
    order = EpochOrder(count, job.seed, epoch)
    if ended is not None:
        count = 0 if epoch > ended[0] else ended[1] if epoch == ended[0] else count
    return [order.task_at(position) for position in range(count)]


def task_minibatches(job: Job, epoch: int, task: int) -> list[list[int]]:
    """Names of the records of each minibatch, in the order of (seed, epoch, task)."""
    names = tasks_of(job)[task]
    chosen = [
        minibatch_indices(job.seed, epoch, task, len(names), job.minibatch, number, shuffle=True)
        for number in range(minibatches_in(len(names), job.minibatch))
    ]
    return [[names[int(index)] for index in indices] for indices in chosen]


def lane_streams(job: Job, epoch: int) -> list[list[list[int]]]:
    """Minibatches of each lane in this epoch."""
    table = FileTable(tuple(TableFile(str(n), count) for n, count in enumerate(job.files)), job.task_records)
    order = Streams(TaskKind.TRAIN, table, job.lanes, job.seed, True, job.minibatch).order(epoch)
    streams: list[list[list[int]]] = [[] for _ in range(job.lanes)]
    for position in range(table.tasks):
        streams[position % job.lanes] += task_minibatches(job, epoch, order.task_at(position))
    return streams


Vectors = list[np.ndarray[Any, Any]]


@cache
def series_of(job: Job) -> dict[str, dict[int, Value]]:
    """By name: the metrics of each step."""
    series: dict[str, dict[int, Value]] = {}
    step = 0
    for epoch in range(job.epochs):
        streams = lane_streams(job, epoch)
        for number in range(max(len(stream) for stream in streams)):
            given = [stream[number] if number < len(stream) else () for stream in streams]
            seen = [
                result_of_lane(step_seed(job.seed, step, lane), trained(names, skips=job.skips))
                for lane, names in enumerate(given)
            ]
            if job.skips:
                skipped = sum(len(names) - len(trained(names, skips=True)) for names in given)
                series.setdefault("nonfinite", {})[step] = Value(skipped, 1, skipped, skipped)
            loss, records, logged = _added(seen)
            if records:
                series.setdefault("loss", {})[step] = Value(loss, records, loss / records, loss / records)
            if logged is not None:
                series.setdefault("logged", {})[step] = logged
            step += 1
    for step, (*_, rate) in enumerate(_trained(job)):
        for group in range(2):
            series.setdefault(f"lr.{group}", {})[step] = Value(rate, 1, rate, rate)
    return series


def _added(seen: list[LaneResult]) -> tuple[float, int, Value | None]:
    """Loss, records and what was logged: each half first."""
    if len(seen) == 1:
        logged = seen[0].metrics.get("logged")
        return seen[0].loss_sum, seen[0].records, Value(*logged) if logged else None
    half = len(seen) // 2
    (loss, records, one), (other_loss, other_records, other) = _added(seen[:half]), _added(seen[half:])
    logged = one.plus(other) if one and other else one or other
    return loss + other_loss, records + other_records, logged


@cache
def final_parameters(job: Job) -> bytes:
    """All segments, one after the other."""
    *_, (_, _, last) = versions(job)  # they share their memory: each has the last one's values in the end
    return b"".join(vector.tobytes() for vector in last)


def parameters_at(job: Job, step: int) -> bytes:
    return next(
        b"".join(vector.tobytes() for vector in values) for at, _, values in versions(job) if at == step
    )


def stopping(job: Job, every: int | str, stop: StopEarly) -> tuple[int, int] | None:
    """The last evaluation while the job trains, and the step at which training ends behind it; None: at its
    end."""
    found, (metric, lowest), best, worse = evaluations(job, every), Criterion.parse(stop.metric), 0.0, 0
    for number in sorted(found):
        value = found[number][1][metric] * (1 if lowest else -1)
        best, worse = (value, 0) if number == 1 or value < best - stop.min_delta else (best, worse + 1)
        if worse >= stop.patience:
            return (number, found[number + 1][0]) if number + 1 in found else None
    return None


def records_until(job: Job, last: int) -> int:
    """Trained in the first `last` steps."""
    step = records = 0
    for epoch in range(job.epochs):
        streams = lane_streams(job, epoch)
        for number in range(max(map(len, streams))):
            records += (
                sum(len(stream[number]) for stream in streams if number < len(stream)) if step < last else 0
            )
            step += 1
    return records


def evaluations(job: Job, every: int | str) -> dict[int, tuple[int, dict[str, float]]]:
    """By number: the step and the metrics of each evaluation while the job trains."""
    found: dict[int, tuple[int, dict[str, float]]] = {}
    rows, step = ReferenceRows(job.travels_as, job.parameters_travel_as) if job.tables else None, 0
    for step, ended, vectors, _ in _trained(job, rows):
        number = ended if every == "epoch" else step // int(every)
        if _is_due(step, ended, every):
            found[number] = step, evaluated(job, vectors, rows)
    return {
        number: done for number, done in found.items() if done[0] != step
    }  # the last version is evaluated after training


def evaluated(job: Job, vectors: Vectors, rows: ReferenceRows | PinnedRows | None = None) -> dict[str, float]:
    """The metrics of these parameters, and rows, over the whole evaluation dataset."""
    return metrics(_sums(job, vectors, rows))


def _sums(job: Job, vectors: Vectors, rows: ReferenceRows | PinnedRows | None) -> dict[str, float]:
    """Minibatch after minibatch in each task; over the tasks the exact sum."""
    tasks: list[dict[str, float]] = []
    for number, names in enumerate(tasks_of(job)):
        sums: dict[str, float] = {}
        for first in range(0, len(names), job.minibatch):
            seed = step_seed(job.seed, number, -2 - first // job.minibatch)
            some = names[first : first + job.minibatch]
            of_rows = 0.0 if rows is None else sum_of(rows.lookup(some))
            for name, value in validation(vectors, seed, some, of_rows).items():
                sums[name] = sums.get(name, 0.0) + value
        tasks.append(sums)
    return {name: math.fsum(sums[name] for sums in tasks) for name in tasks[0]}


def versions(job: Job) -> Iterator[tuple[int, int, Vectors]]:
    """Each version behind the first: its number, the epoch that it ends (from 1; 0: none), and its values,
    which the next one changes."""
    return ((step, ended, vectors) for step, ended, vectors, _ in _trained(job))


def _is_due(step: int, ended: int, every: int | str | None) -> bool:
    return bool(ended) if every == "epoch" else every is not None and step % int(every) == 0


def final_rows(job: Job, last: int | None = None) -> bytes:
    """Of a job with tables, which ends at version `last`."""
    rows = ReferenceRows(job.travels_as, job.parameters_travel_as)
    for step, *_ in _trained(job, rows):
        if step == last:
            break
    return rows.records()


def _trained(job: Job, rows: ReferenceRows | None = None) -> Iterator[tuple[int, int, Vectors, float]]:
    """As `versions`, with the learning rate of the step that made it. On a plateau: what an evaluation finds
    counts from the next one on."""
    rate, found, least = RATE, None, math.inf
    rows = rows or (ReferenceRows(job.travels_as, job.parameters_travel_as) if job.tables else None)
    segments = layout(Mode.SYNC).segments
    vectors = [
        (np.linspace(-1, 1, s.elements) if s.dtype == "float32" else np.arange(s.elements)).astype(s.dtype)
        for s in segments
    ]
    params = [torch.nn.Parameter(torch.from_numpy(vector)) for vector in vectors[:2]]
    optimizer = torch.optim.SGD([{"params": [p]} for p in params], lr=RATE, momentum=0.9, foreach=True)
    step = 0
    for epoch in range(job.epochs):
        streams = lane_streams(job, epoch)
        longest = max(len(stream) for stream in streams)
        rate /= 2 if epoch and job.schedule == "epoch" else 1
        for number in range(longest):
            lanes, seen, of_lanes = {}, rounded(vectors, job.parameters_travel_as), []
            for lane, stream in enumerate(streams):
                names = trained(stream[number] if number < len(stream) else (), skips=job.skips)
                seed, of_rows = step_seed(job.seed, step, lane), 0.0
                if rows is not None:
                    looked_up = rows.sent(names)
                    of_lanes.append(lane_rows(seen, looked_up, seed, names) if names else no_rows())
                    of_rows = sum_of(looked_up)
                lanes[lane] = (gradients(seen, seed, names, of_rows), len(names))
            combined = mean_over((0, job.lanes), lanes, job.travels_as)
            filled = any(count for _, count in lanes.values())
            for param, gradient in zip(params, combined, strict=False):
                param.grad = torch.from_numpy(gradient) if filled else None
            if filled and job.clip_grad_norm is not None:
                norm = norm_of(
                    squares_of(part) for param in params for part in param.grad.split(BLOCK_ELEMENTS)
                )
                for param in params:
                    param.grad *= clip_factor(norm, job.clip_grad_norm)
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            if rows is not None:
                rows.step(of_lanes, rate / RATE)
            if filled:
                vectors[2][:], vectors[3][:] = combined[2], combined[3]
            step += 1
            ended = epoch + 1 if number + 1 == longest else 0
            yield step, ended, vectors, rate
            if job.schedule == "plateau" and _is_due(step, ended, job.evaluated_every):
                if found is not None:
                    rate /= 1 if found < least else 2
                    least = min(found, least)
                found = metrics(_sums(job, vectors, rows))["value"]
