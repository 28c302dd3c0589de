"""What a user may count on (training.md), checked on a cluster whose job has ended. Each line returned is a
violation."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from master_service.core.state.series import SeriesTable, WholeSteps
from master_service.storage.series_files import add_encoded, to_read
from tests.simulation.asynchronous_evaluations import asynchronous_evaluations
from tests.simulation.cluster import SimulatedCluster
from tests.simulation.compute import INTEGER_BLOCK, INTEGERS, RECORD_SLOTS, applied_of, param_blocks
from tests.simulation.nodes import described
from tests.simulation.plans import Job
from tests.simulation.reference import (
    Ended,
    evaluations,
    final_parameters,
    final_rows,
    parameters_at,
    records_until,
    series_of,
    stopping,
    task_minibatches,
    tasks_of,
    trained_tasks,
)
from tests.simulation.rows import COUNTING, SLOTS, counted
from trireme_shared.protocol.evaluations import Evaluation, EvaluationStatus, results_count
from trireme_shared.protocol.records import (
    Dispatch,
    EvaluationSums,
    JobResult,
    Mode,
    Phase,
    SlotMap,
    TaskMeta,
)
from trireme_shared.protocol.records.checkpoints import history
from trireme_shared.protocol.records.job import Losses
from trireme_shared.protocol.records.job_choices import Criterion
from trireme_shared.tables.hashing import slots_of


def violations(cluster: SimulatedCluster) -> Iterator[str]:
    yield from cluster.failures
    yield from cluster.simulated.violations
    yield from (f"a handler crashed: {described(error)}" for error in cluster.network.crashes)
    if cluster.state.phase is not Phase.COMPLETED:
        yield f"the job is {cluster.state.phase}: {cluster.state.reason}"
        return
    if cluster.plan.job.trainers_hold and not results_count(cluster.spec) and _checkpoint_lost(cluster):
        return
    yield from _queues(cluster)
    yield from _parameters(cluster)
    if cluster.plan.evaluate:
        yield from _evaluation(cluster)
    if cluster.plan.evaluate_every is not None and cluster.plan.job.mode is Mode.SYNC:
        yield from _evaluations(cluster, cluster.plan.evaluate_every)
    elif cluster.plan.evaluate_every is not None:
        yield from asynchronous_evaluations(cluster, cluster.plan.evaluate_every)
    if cluster.plan.job.mode is Mode.ASYNC:
        yield from _ledgers(cluster)
    elif cluster.plan.dispatch is Dispatch.MASTER:
        yield from _series(cluster)


def _checkpoint_lost(cluster: SimulatedCluster) -> bool:
    """Whether that of an evaluated version was never written: then that evaluation is left out
    (docs/checkpoints.md), and what depends on it is another job's."""
    every = cluster.plan.evaluate_every
    seen = {ref.uuid: ref for latest in cluster.simulated.checkpoints_seen.values() for ref in latest.kept}
    written = {
        ref.step for ref in history([*seen.values()], cluster.state.timeline, cluster.state.checkpoint)
    }
    expected = {} if every is None else evaluations(cluster.plan.job, every)
    stored = [
        cluster.simulated.value(cluster.keys.evaluations + name)
        for name in cluster.simulated.names(cluster.keys.evaluations)
    ]
    done = [Evaluation.model_validate_json(value) for value in stored if value is not None]
    found, ended = {each.number for each in done if not each.left_out}, _stopping(cluster)
    due = {number: step for number, (step, _) in expected.items() if ended is None or number <= ended[0]}
    return any(step not in written and number not in found for number, step in due.items())


def _series(cluster: SimulatedCluster) -> Iterator[str]:
    """What is stored of each step: once, and as in the undisturbed run."""
    table, steps, contents = SeriesTable(), WholeSteps(), cluster.series.contents
    for name in to_read(contents)[0]:
        add_encoded(table, steps, contents[name], name)
    expected, ended = series_of(cluster.plan.job), _stopping(cluster)
    if ended is not None:
        expected = {
            name: {step: value for step, value in values.items() if step < ended[1]}
            for name, values in expected.items()
        }
    for name, values in expected.items():
        found = [(bucket.step, bucket.value) for bucket in table.by_name.get(name, ())]
        if found != list(values.items()):
            wrong = sorted({*found} ^ {*values.items()})
            yield f"{name} is stored of {len(found)} steps, expected {len(values)}: {wrong[:4]}"
    norms = [bucket.step for bucket in table.by_name.get("grad_norm", ())]
    if cluster.plan.job.clip_grad_norm is not None and norms != list(expected["lr.0"]):
        yield f"grad_norm is stored of steps {norms}"
    if strange := {name for name, series in table.by_name.items() if series.ordered} - {
        *expected,
        "grad_norm",
    }:
        yield f"there are series of {strange}"


def _queues(cluster: SimulatedCluster) -> Iterator[str]:
    """No task is pending, none was discarded, every epoch is over."""
    keys, job = cluster.keys, cluster.plan.job
    for kind, key in (
        ("pending", keys.pending("")),
        ("requeued", keys.requeued("")),
        ("discarded", keys.discarded("")),
    ):
        names = cluster.simulated.names(key)
        if names:
            yield f"tasks {sorted(names)} are still {kind} after the end"
    meta = TaskMeta.model_validate_json(cluster.simulated.value(keys.task_meta) or b"")
    if meta.epoch != job.epochs and _ended(cluster) is None:
        yield f"the queue stands at epoch {meta.epoch} of {job.epochs}"
    result: JobResult = cluster.state.result
    ended = _stopping(cluster)
    expected = records_until(job, ended[1]) if ended is not None else _records(cluster)
    if (result.trained_records, result.discarded_records) != (expected, 0):
        yield (
            f"{result.trained_records} records trained and {result.discarded_records} discarded, "
            f"expected {expected} and 0"
        )


def _parameters(cluster: SimulatedCluster) -> Iterator[str]:
    job, exported = cluster.plan.job, cluster.trace.exported
    if not exported:
        yield "nothing was exported"
        return
    again = job.mode is Mode.ASYNC and cluster.state.timeline > 0  # trained once more, to other bits
    again |= cluster.plan.first_epochs is not None
    if any(one != other for one, other in pairwise(exported)) and not again:
        yield "two exports differ"
    final = cluster.final_parameters()
    if len(final) < len(exported[-1]):  # a parameter server died after the end: the export stays
        final = exported[-1]
    if exported[-1] != final:
        yield "the export is not what the parameter servers hold"
    if job.mode is Mode.SYNC:
        ended = _stopping(cluster)
        wanted = parameters_at(job, ended[1]) if ended is not None else final_parameters(job)
        if final != wanted:
            yield f"the final parameters differ from the undisturbed run's{_difference(final, wanted)}"
        if job.tables and cluster.final_rows() not in (None, final_rows(job, ended and ended[1])):
            yield "the final rows of the embedding table differ from the undisturbed run's"
        return
    expected = _applications(job, _ended(cluster))
    lossy = _lossy(cluster)
    owners = {number: index for index, store in cluster.stores() for number in store.blocks}
    initials = [np.linspace(-1, 1, 3 * 64).astype(np.float32), np.linspace(-1, 1, 2 * 64).astype(np.float32)]
    for block in param_blocks():
        applied = applied_of(final, block, initials[block.segment])
        over = [r for r in range(len(expected)) if float(applied[r]) - expected[r] > 1e-3]
        under = [r for r in range(len(expected)) if expected[r] - float(applied[r]) > 1e-3]
        whose = owners.get(block.number)
        wrong = over + (under if whose not in lossy and not (whose is None and lossy) else [])
        if wrong:
            shown = {r: (round(float(applied[r]), 3), round(expected[r], 3)) for r in wrong[:4]}
            yield (
                f"block {block.number}: records were not applied once an epoch (record: got, expected) "
                f"{shown}"
            )
    yield from _counters(cluster, final, owners, lossy)
    yield from _rows(cluster, expected, lossy)


def _rows(
    cluster: SimulatedCluster, expected: list[float], lossy: dict[int, tuple[int, int]]
) -> Iterator[str]:
    """The row of each record has counted it once an epoch, at the owner of its slot."""
    value = cluster.simulated.value(cluster.keys.slots)
    stores = {index: store for index, store in cluster.stores() if store.rows is not None}
    if value is None or not cluster.plan.job.tables:
        return
    records = np.arange(len(expected))
    owners = np.array(SlotMap.model_validate_json(value).owners)[slots_of(records, COUNTING.seed, SLOTS)]
    applied = {index: counted(store.rows.tables[0]) for index, store in stores.items()}
    for record, whose in enumerate(owners.tolist()):
        if whose not in applied:  # it died after the end
            continue
        found = applied[whose].get(record, 0.0)
        if found - expected[record] > 1e-3 or (expected[record] - found > 1e-3 and whose not in lossy):
            yield (
                f"the row of record {record} at pserver-{whose} counted {found:.3f}, expected "
                f"{expected[record]:.3f}"
            )


def _counters(
    cluster: SimulatedCluster, final: bytes, owners: dict[int, int], lossy: dict[int, tuple[int, int]]
) -> Iterator[str]:
    """The last block, of integers, has counted every record of every epoch."""
    counted = np.frombuffer(final[-8 * INTEGERS :], np.int64) - np.arange(INTEGERS)
    expected = _records(cluster)
    whose = owners.get(INTEGER_BLOCK)
    may_lack = whose in lossy or (whose is None and bool(lossy))
    if len(set(counted.tolist())) != 1 or not (
        counted[0] == expected or (may_lack and counted[0] < expected)
    ):
        yield f"the integers of block {INTEGER_BLOCK} counted {counted.tolist()} records, expected {expected}"


def _lossy(cluster: SimulatedCluster) -> dict[int, tuple[int, int]]:
    """Parameter servers with losses on record: (lost, skipped) minibatches."""
    value = cluster.simulated.value(cluster.keys.losses)
    losses = Losses.model_validate_json(value) if value else Losses()
    indexes = {*losses.lost, *losses.skipped}
    return {int(i): (losses.lost.get(i, 0), losses.skipped.get(i, 0)) for i in indexes}


def _blocks_moved(cluster: SimulatedCluster) -> bool:
    """Whether the number of parameter servers has changed."""
    slots = cluster.simulated.value(cluster.keys.slots)
    return slots is not None and SlotMap.model_validate_json(slots).version > 1


def _difference(one: bytes, other: bytes) -> str:
    a, b = np.frombuffer(one[: 4 * 344], np.float32), np.frombuffer(other[: 4 * 344], np.float32)
    return f" in {int((a != b).sum())} of {len(a)} numbers, by at most {float(np.abs(a - b).max()):g}"


def _ended(cluster: SimulatedCluster) -> Ended | None:
    """Where an asynchronous job ended early, as its queue says."""
    if cluster.plan.job.mode is Mode.SYNC or cluster.state.result.stopped_step is None:
        return None
    meta = TaskMeta.model_validate_json(cluster.simulated.value(cluster.keys.task_meta) or b"")
    return meta.epoch, int(cluster.simulated.value(cluster.keys.cursor("0")) or b"0")


def _records(cluster: SimulatedCluster) -> int:
    """That an asynchronous job has to train."""
    job, ended = cluster.plan.job, _ended(cluster)
    return sum(len(tasks_of(job)[n]) for epoch in range(job.epochs) for n in trained_tasks(job, epoch, ended))


def _applications(job: Job, ended: Ended | None) -> list[float]:
    """Per record: epochs / n, n being the records of the push that holds it. Its push: push_every minibatches
    of a task in that epoch's order, so n depends on where the order puts the record."""
    expected = [0.0] * sum(job.files)
    for epoch in range(job.epochs):
        for names, count in _pushes(job, epoch, ended):
            for name in names:
                expected[name] += 1 / count
    assert len(expected) <= RECORD_SLOTS
    return expected


def _pushes(job: Job, epoch: int, ended: Ended | None) -> Iterator[tuple[list[int], int]]:
    """(records, how many) of each push of an epoch of asynchronous training."""
    for number in trained_tasks(job, epoch, ended):
        minibatches = task_minibatches(job, epoch, number)
        for first in range(0, len(minibatches), job.push_every):
            names = [name for minibatch in minibatches[first : first + job.push_every] for name in minibatch]
            yield names, len(names)


def _evaluation(cluster: SimulatedCluster) -> Iterator[str]:
    job = cluster.plan.job
    sums = EvaluationSums.model_validate_json(cluster.simulated.value(cluster.keys.evaluation) or b"{}")
    records = sum(job.files)
    expected = {"records": float(records), "total": float(records * (records - 1) // 2)}
    if sums.sums != expected or sums.finished != len(tasks_of(job)):
        yield f"evaluation added up to {sums}, expected {expected} from {len(tasks_of(job))} tasks"
    seen = {digest for digest, _ in cluster.trace.evaluated}
    again = (job.mode is Mode.ASYNC and cluster.state.timeline > 0) or cluster.plan.first_epochs is not None
    if seen != {hashlib.sha256(cluster.trace.exported[-1]).hexdigest()} and not again:
        yield f"evaluation saw {len(seen)} sets of parameters, not the final ones only"


def _stopping(cluster: SimulatedCluster) -> tuple[int, int] | None:
    """The last evaluation, and the step at which training has to end early."""
    every, stop = cluster.plan.evaluate_every, cluster.spec.stop_early
    if cluster.plan.job.mode is Mode.ASYNC:
        return None
    return stopping(cluster.plan.job, every, stop) if every is not None and stop is not None else None


def _evaluations(cluster: SimulatedCluster, every: int | str) -> Iterator[str]:
    """Each once, of the right version, with the undisturbed run's metrics to the bit."""
    found = {}
    for name in cluster.simulated.names(cluster.keys.evaluations):
        one = Evaluation.model_validate_json(cluster.simulated.value(cluster.keys.evaluations + name) or b"")
        found[one.number] = one.step, one.metrics
    ended = _stopping(cluster)
    expected = {
        number: done
        for number, done in evaluations(cluster.plan.job, every).items()
        if ended is None or number <= ended[0]
    }
    if cluster.state.result.stopped_step != (ended[1] if ended is not None else None):
        yield f"training ended at step {cluster.state.result.stopped_step}, expected {ended}"
    if found != expected:
        missing, other = expected.keys() - found.keys(), found.keys() - expected.keys()
        wrong = {
            n: (found[n], expected[n]) for n in found.keys() & expected.keys() if found[n] != expected[n]
        }
        yield (
            f"evaluations {sorted(missing)} are missing, {sorted(other)} are not due, these differ "
            f"(got, expected): {wrong}"
        )
    status = EvaluationStatus.model_validate_json(
        cluster.simulated.value(cluster.keys.evaluation_status) or b"{}"
    )
    if expected and cluster.plan.keep_best is not None:
        metric, lowest = Criterion.parse(cluster.plan.keep_best)
        step = min(expected.values(), key=lambda each: each[1][metric] * (1 if lowest else -1))[0]
        best = cluster.state.result.best
        if (
            best is None
            or best.step != step
            or set(cluster.trace.best[-1:]) != {parameters_at(cluster.plan.job, step)}
        ):
            yield (
                f"the best evaluation is that of step {step}, exported is {best}, "
                f"{len(cluster.trace.best)} times"
            )
    if expected and (status.running is not None or status.settled != max(expected)):
        yield f"at the end the evaluations are {status}"


def _ledgers(cluster: SimulatedCluster) -> Iterator[str]:
    """The parameter servers' own ledgers say the same; what is missing there is on record, to the
    minibatch."""
    job, tasks, ended = cluster.plan.job, tasks_of(cluster.plan.job), _ended(cluster)
    trained = [
        sum(-(-len(tasks[number]) // job.minibatch) for number in trained_tasks(job, epoch, ended))
        for epoch in range(job.epochs)
    ]
    value = cluster.simulated.value(cluster.keys.slots)
    owners = SlotMap.model_validate_json(value).owners if value is not None else ()
    for index, store in cluster.stores():
        if not store.numbers or index not in owners:  # it has nothing, or all of its slots have moved away
            continue
        counts = {entry.epoch: entry for entry in store.ledger.counts()}
        lost, skipped = _lossy(cluster).get(index, (0, 0))
        if lost or skipped:
            lowest = sum(entry.applied_lowest for entry in counts.values())
            highest = sum(entry.applied_highest for entry in counts.values())
            whole = sum(trained)
            # an independent checkpoint is no cut, and blocks that moved bring their former owners' losses: at
            # most so many
            at_most = cluster.plan.independent or _blocks_moved(cluster)
            exact = at_most or lowest + lost <= whole
            if not (exact and whole <= lowest + lost + skipped and highest <= whole):
                yield (
                    f"pserver-{index} has {lowest} to {highest} of {whole} minibatches at its "
                    "blocks, on record are "
                    f"{lost} lost and {skipped} skipped"
                )
            continue
        for epoch, minibatches in enumerate(trained):
            entry = counts.get(epoch)
            if entry is None and minibatches == 0:
                continue
            if entry is None:
                yield f"pserver-{index} has no ledger of epoch {epoch}"
            elif (entry.applied_lowest, entry.applied_highest, entry.tasks_open) != (
                minibatches,
                minibatches,
                0,
            ):
                yield (
                    f"pserver-{index}, epoch {epoch}: {entry}, expected {minibatches} minibatches at "
                    "every block"
                )
