"""One job, its metrics and evaluations as answers of the REST API; pages of lists. Reads only."""

from __future__ import annotations

import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from master_service.core.decisions.discarded_tasks import AskedTask
from master_service.core.decisions.operations import abandoned, find_checkpoint
from master_service.core.queue.task_queue import TaskQueue
from master_service.core.state.job import Job, holds_parameters
from master_service.core.state.kept import EventLog
from master_service.core.state.metrics import Metrics
from master_service.core.state.series import Epoch, Series, SeriesTable
from master_service.leadership.master import Master
from trireme_shared.platform.runtime import clock
from trireme_shared.protocol.errors import InvalidArgument, NotFound
from trireme_shared.protocol.evaluations import Evaluation
from trireme_shared.protocol.records import (
    DiscardedTask,
    Mode,
    Phase,
    PserverMember,
    RequeuedTask,
    Stage,
    Strategy,
    TaskKind,
    TrainerMember,
)
from trireme_shared.protocol.records.checkpoints import CheckpointRef
from trireme_shared.protocol.records.operations import Operation, OperationState
from trireme_shared.protocol.rest import (
    CheckpointDetails,
    CheckpointPage,
    CheckpointView,
    EvaluationPage,
    EvaluationProgress,
    EventPage,
    JobProgress,
    JobView,
    MasterView,
    MemberCounts,
    MemberPage,
    MemberView,
    MetricPage,
    MetricPoint,
    OperationPage,
    ResizePage,
    ResizeView,
    SeriesPage,
    SeriesPoint,
    SeriesPoints,
    SeriesSummary,
    TaskPage,
    TaskView,
)

SCANNED_AT_ONCE = 10_000


def job(job: Job, metrics: Metrics, master: MasterView, stalled: str = "") -> JobView:
    """`stalled`: for whom it waits, empty if it makes progress."""
    spec, state = job.spec, job.state
    return summary(job, metrics, master, stalled).with_fields(
        stage=state.stage,
        generation=state.generation,
        failure=state.failure,
        evaluation=evaluation(job),
        losses=job.losses,
        result=state.result,
        settings=spec,
        history=spec.history,
        sources=spec.sources,
    )


def summary(job: Job, metrics: Metrics, master: MasterView, stalled: str = "") -> JobView:
    """As lists have it."""
    spec = job.spec
    phase, reason = standing(job)
    return JobView(
        job=spec.job,
        state=phase,
        phase=phase,
        reason=reason,
        stalled=stalled,
        mode=spec.mode,
        progress=progress(job, metrics, stalled=bool(stalled)),
        metrics=job.newest_metrics,
        failure=job.listed_failure,
        members=MemberCounts(
            trainers=len(job.members.trainers),
            trainers_desired=spec.trainers,
            pservers=len(job.members.pservers),
            pservers_desired=spec.pservers,
        ),
        master=master,
        script=spec.script,
        storage=spec.storage,
    )


def standing(job: Job) -> tuple[Phase, str]:
    """Phase and reason. A job that has nobody to train or to serve waits, whatever it was doing."""
    state, members = job.state, job.members
    served = bool(members.pservers) or job.spec.strategy is Strategy.COLLECTIVE
    if state.phase is not Phase.RUNNING or (members.trainers and served):
        return state.phase, state.reason
    missing = "a trainer" if served else "the parameter servers"
    return Phase.WAITING, f"waiting for {missing}"


def progress(job: Job, metrics: Metrics, *, stalled: bool = False) -> JobProgress:
    training, spec = job.training, job.spec
    records_done, records_total = job.records_done, job.records_total
    rate = metrics.rate(clock.monotonic()) if job.state.stage is Stage.TRAIN and not stalled else 0.0
    left = records_total - records_done
    return JobProgress(
        epoch=training.current,
        epochs=spec.epochs,
        step=metrics.step,
        loss=metrics.loss,
        records_done=records_done,
        records_total=records_total,
        records_per_s=round(rate, 3) if rate else None,
        eta_s=round(left / rate, 3) if rate else None,
    )


def evaluation(job: Job) -> EvaluationProgress | None:
    if job.spec.evaluate_every is None:
        return None
    status, queue = job.evaluation, job.queues[TaskKind.VALIDATE]
    last = status.recent[-1] if status.recent else None
    if status.running is None:
        return EvaluationProgress(settled=status.settled, last=last)
    return EvaluationProgress(
        settled=status.settled,
        running=status.running.number,
        step=status.running.ref.evaluated_step,
        tasks_done=queue.counts[2],
        tasks_total=queue.total,
        last=last,
    )


# ------------------------------------------------------------------ tasks


def task(job: Job, task_id: str) -> TaskView:
    """Raises NotFound."""
    queue = job.queue_of(task_id)
    return _task_view(queue, task_id, queue.state_of(task_id), clock.monotonic())


def asked_task(job: Job, asked: AskedTask) -> TaskView:
    """As it is once the request has taken effect."""
    queue, now = job.queue_of(asked.task_id), clock.monotonic()
    view = _task_view(queue, asked.task_id, asked.state, now, record=asked.record)
    return view if asked.failures is None else view.with_fields(failures=asked.failures)


def tasks(job: Job, kind: TaskKind, state: str | None, page_size: int, page_token: str) -> TaskPage:
    """In order of number. TODO and DONE tasks are found by a scan of SCANNED_AT_ONCE tasks a page: a page may
    be short, or empty, and still have a next one. Raises NotFound without such a queue, InvalidArgument for a
    bad token."""
    queue = job.queues.get(kind)
    if queue is None:
        raise NotFound(f"the job has no {kind} tasks")
    now = clock.monotonic()
    if state in ("PENDING", "REQUEUED"):
        ids = queue.pending if state == "PENDING" else queue.requeued
        chosen, token = page_of(ids, lambda each: (queue.streams.number(each),), page_size, page_token)
        views = tuple(_task_view(queue, task_id, state, now) for task_id in chosen)
        return TaskPage(tasks=views, next_page_token=token)
    if state == "DISCARDED":
        lost, token = page_of(queue.discarded, lambda each: each, page_size, page_token)
        views = tuple(_task_view(queue, task_id, state, now, epoch) for epoch, task_id in lost)
        return TaskPage(tasks=views, next_page_token=token)
    found: list[TaskView] = []
    number = start = number_after(page_token)
    while number < min(queue.total, start + SCANNED_AT_ONCE) and len(found) < page_size:
        task_id = queue.streams.task_id(number)
        its_state = queue.state_of(task_id)
        if state is None or its_state == state:
            found.append(_task_view(queue, task_id, its_state, now))
        number += 1
    return TaskPage(tasks=tuple(found), next_page_token=token_of(number - 1) if number < queue.total else "")


def _task_view(
    queue: TaskQueue,
    task_id: str,
    state: str,
    now: float,
    epoch: int | None = None,
    record: RequeuedTask | DiscardedTask | None = None,
) -> TaskView:
    """`epoch`: of a discarded task, if it is not the current one. `record`: the one that it gets now."""
    epoch = queue.current if epoch is None else epoch
    stream, index = queue.streams.place(epoch, task_id)
    task = queue.streams.task(task_id, 0, epoch, stream, index)
    where: dict[str, object] = {"file": task.file, "first": task.first, "count": task.count}
    where |= {"task_id": task_id, "kind": queue.kind, "state": state, "epoch": epoch}
    where |= {"stream": stream, "index": index}
    back: RequeuedTask | DiscardedTask | None = queue.requeued.get(task_id)
    if record is not None:
        back = record
    elif state == "DISCARDED":
        back = queue.discarded[epoch, task_id].task
    elif held := queue.pending.get(task_id):
        given = held.record
        where |= {"attempt": given.attempt, "failures": given.failures, "trainer": given.trainer}
        where |= {"minibatches": held.minibatches, "silent_s": round(now - held.last_sign, 3)}
        where |= {"remaining_s": round(held.deadline - now, 3)}
    if back is not None:
        where |= {"attempt": back.attempts, "failures": back.failures, "cause": back.cause}
    return TaskView.model_validate(where)


# ------------------------------------------------------------------ members


def members(job: Job, page_size: int, page_token: str) -> MemberPage:
    everyone: list[TrainerMember | PserverMember] = [*job.members.pservers.values()]
    everyone += job.members.trainers.values()
    page, token = page_of(everyone, _place_of, page_size, page_token)
    tasks_of: dict[str, list[str]] = {}
    for queue in job.queues.values():
        for task_id, held in queue.pending.items():
            for each in held.record.attempts:
                tasks_of.setdefault(each.trainer, []).append(task_id)
    views = tuple(_member_view(job, member, tasks_of.get(_name_of(member), ())) for member in page)
    return MemberPage(members=views, next_page_token=token)


def member_view(job: Job, member: TrainerMember | PserverMember) -> MemberView:
    held = [task_id for queue in job.queues.values() for task_id in queue.held_by(_name_of(member))]
    return _member_view(job, member, held)


def _name_of(member: TrainerMember | PserverMember) -> str:
    return member.trainer if isinstance(member, TrainerMember) else f"pserver-{member.index}"


def _place_of(member: TrainerMember | PserverMember) -> Key:
    """In lists: parameter servers, then trainers."""
    return (1, member.trainer) if isinstance(member, TrainerMember) else (0, member.index)


def _member_view(job: Job, member: TrainerMember | PserverMember, held: Sequence[str]) -> MemberView:
    if isinstance(member, PserverMember):
        return MemberView(
            member_id=_name_of(member),
            kind="pserver",
            url=member.url,
            incarnation=member.incarnation,
            host=member.host,
            pid=member.pid,
            index=member.index,
            slots=job.slots.owners.count(member.index) if job.slots is not None else None,
            trireme_version=member.trireme_version,
        )
    lanes = job.trainers.lanes_of(member.trainer) if job.spec.mode is Mode.SYNC else None
    has_parameters = None
    if job.spec.strategy is Strategy.COLLECTIVE:
        has_parameters = holds_parameters(member.holds, job.state.timeline, job.state.checkpoint)
    return MemberView(
        member_id=member.trainer,
        kind="trainer",
        url=member.url,
        incarnation=member.incarnation,
        host=member.host,
        pid=member.pid,
        lanes=lanes,
        has_parameters=has_parameters,
        tasks=tuple(held),
        trireme_version=member.trireme_version,
    )


# ------------------------------------------------------------------ checkpoints


def checkpoints(job: Job, page_size: int, page_token: str) -> CheckpointPage:
    kept, left = job.members.latest.kept if job.members.latest else (), abandoned(job)

    def place(ref: CheckpointRef) -> Key:
        """Timelines of the present history grow; what it left behind comes last."""
        return (ref.uuid not in left, ref.timeline, ref.step, ref.uuid)

    page, token = page_of(kept, place, page_size, page_token, newest_first=True)
    return CheckpointPage(checkpoints=tuple(_checkpoint(job, ref) for ref in page), next_page_token=token)


async def checkpoint_details(master: Master, checkpoint_id: str) -> CheckpointDetails:
    """Raises NotFound, CheckpointUnusable."""
    ref = find_checkpoint(master.job, checkpoint_id)
    view, manifest = _checkpoint(master.job, ref), await master.term.storage.read_manifest(ref)
    return CheckpointDetails(
        **view.model_dump(),
        epoch=max((position.epoch for position in manifest.record.positions), default=0),
        pservers=len(manifest.parts),
        size_bytes=sum(part.bytes for part in manifest.parts),
        needed_bytes=sum(manifest.files.values()),
        bases=manifest.bases,
        deltas=manifest.deltas,
        write_time=manifest.timestamp,
        files=tuple(part.file for part in manifest.parts),
    )


def _checkpoint(job: Job, ref: CheckpointRef) -> CheckpointView:
    latest = job.members.latest
    state = "LATEST" if latest is not None and ref.uuid == latest.uuid else "KEPT"
    if ref.uuid in abandoned(job):
        state = "LEFT"
    kind: Literal["base", "delta"] = "delta" if ref.on else "base"
    return CheckpointView(
        checkpoint_id=ref.uuid, step=ref.step, timeline=ref.timeline, state=state, kind=kind, builds_on=ref.on
    )


# ------------------------------------------------------------------ resizes


def resize(operation: Operation) -> ResizeView:
    """Raises NotFound for an operation of another kind."""
    if operation.resize is None:
        msg = f"{operation.operation_id} is no resize, but {operation.kind}"
        raise NotFound(msg)
    return ResizeView(
        **operation.resize.model_dump(),
        resize_id=operation.operation_id,
        state=operation.state,
        reason=operation.reason,
        error_code=operation.error_code,
        create_time=operation.create_time,
        end_time=operation.end_time,
    )


def resizes(job: Job, page_size: int, page_token: str) -> ResizePage:
    found = [operation for operation in job.operations.records.values() if operation.resize is not None]
    page, token = page_of(found, _when_begun, page_size, page_token, newest_first=True)
    return ResizePage(resizes=tuple(map(resize, page)), next_page_token=token)


def operations(
    kept: Iterable[Operation], state: OperationState | None, page_size: int, page_token: str
) -> OperationPage:
    """`state` None: in any."""
    found = [operation for operation in kept if state in (None, operation.state)]
    page, token = page_of(found, _when_begun, page_size, page_token, newest_first=True)
    return OperationPage(operations=tuple(page), next_page_token=token)


def _when_begun(operation: Operation) -> Key:
    return (operation.create_time, operation.operation_id)


# ------------------------------------------------------------------ events


def events(kept: EventLog, after: int, page_size: int) -> EventPage:
    """Raises CursorExpired."""
    kept.check(after)
    found = tuple(kept.after(after, page_size))
    return EventPage(
        events=found,
        next_after=found[-1].event_id if found else after,
        oldest=kept.oldest,
        newest=kept.newest,
    )


# ------------------------------------------------------------------ metrics and evaluations


@dataclass(frozen=True, slots=True)
class KeptMetrics:
    """`known`: whole steps before this one are in `epochs`. `timeline`: what earlier ones say of steps from
    `done` on does not count."""

    table: SeriesTable
    epochs: Mapping[int, Epoch]
    known: int
    timeline: int = 0
    done: int | None = None


def metrics(kept: Metrics, metric: str, page_size: int, page_token: str) -> MetricPage:
    """`metric`: "step_loss" or "epoch_loss". Raises NotFound."""
    series = {"step_loss": kept.steps, "epoch_loss": kept.epochs}.get(metric)
    if series is None:
        raise NotFound(f"metric {metric} does not exist; there are step_loss and epoch_loss")
    page, token = page_of(series, lambda number: (number,), page_size, page_token)
    points = tuple(
        MetricPoint(number=n, loss=series[n].loss, records=series[n].records, skipped=series[n].skipped)
        for n in page
    )
    return MetricPage(metric=metric, points=points, next_page_token=token)


def evaluations(found: Sequence[Evaluation], page_size: int, page_token: str) -> EvaluationPage:
    page, token = page_of(found, lambda each: (each.number,), page_size, page_token, newest_first=True)
    return EvaluationPage(evaluations=tuple(page), next_page_token=token)


def series_page(table: SeriesTable, page_size: int, page_token: str) -> SeriesPage:
    """In the order of their names."""
    page, token = page_of(table.by_name, lambda name: (name,), page_size, page_token)
    return SeriesPage(
        series=tuple(_summary(name, table.by_name[name]) for name in page), next_page_token=token
    )


def series_points(kept: KeptMetrics, name: str, first: int, last: int, most: int) -> SeriesPoints:
    """At most `most` points of the steps in [first, last]. Raises NotFound."""
    found = kept.table.by_name.get(name)
    if found is None:
        there = ", ".join(sorted(kept.table.by_name)) or "none yet"
        raise NotFound(f"metric {name} does not exist; there are: {there}")
    points = found.points(first, last, most, kept.timeline, kept.done)
    return SeriesPoints(
        name=name,
        points=tuple(
            SeriesPoint(
                step=point.first,
                last_step=point.last,
                mean=point.mean,
                least=point.value.least,
                most=point.value.most,
                weight=point.value.weight,
            )
            for point in points
        ),
    )


def epoch_points(kept: KeptMetrics, name: str, first: int, last: int, most: int) -> SeriesPoints:
    """The last `most` epochs that begin with a step in [first, last]. Raises NotFound."""
    epochs = kept.epochs
    ends = {number: epoch.first - 1 for number, epoch in epochs.items()}
    found = [
        SeriesPoint(
            step=epoch.first,
            last_step=ends.get(number + 1, max(epoch.first, kept.known - 1)),
            epoch=number,
            mean=value.total / value.weight,
            least=value.least,
            most=value.most,
            weight=value.weight,
        )
        for number, epoch in sorted(epochs.items())
        if first <= epoch.first <= last and (value := epoch.sums.get(name)) is not None
    ]
    if not found and not any(name in epoch.sums for epoch in epochs.values()):
        there = ", ".join(sorted({each for epoch in epochs.values() for each in epoch.sums})) or "none yet"
        raise NotFound(f"metric {name} is not kept by epoch; there are: {there}")
    return SeriesPoints(name=name, points=tuple(found[-most:]))


def _summary(name: str, series: Series) -> SeriesSummary:
    steps = [bucket.step for bucket in series]
    last = steps[-1] + series.width - 1
    return SeriesSummary(
        name=name, first_step=steps[0], last_step=last, points=len(steps), width=series.width
    )


# ------------------------------------------------------------------ pages of lists
# A token holds the key of the last item of its page, and the next page begins after that key: also if the
# item, or others before it, are gone by then. What is there all the time is shown once.

T = TypeVar("T")
Key = tuple[str | int, ...]

TOKEN_PATTERN = r"^[A-Za-z0-9_-]{0,3000}$"  # noqa: S105


def page_of(
    items: Iterable[T],
    key: Callable[[T], Key],
    page_size: int,
    page_token: str,
    *,
    newest_first: bool = False,
) -> tuple[list[T], str]:
    """At most `page_size` items in the order of their keys (`newest_first`: the largest key first), and the
    token of the next page, empty if there is none. `key`: tells items apart, and stays the same. Raises
    InvalidArgument for a token of another list."""
    ordered = sorted(items, key=key, reverse=newest_first)
    if page_token:
        last = _key_of(page_token)
        try:
            ordered = [each for each in ordered if (key(each) < last if newest_first else key(each) > last)]
        except TypeError:  # a text and a number
            raise _not_given(page_token) from None
    page = ordered[:page_size]
    return page, token_of(*key(page[-1])) if len(ordered) > page_size else ""


def number_after(page_token: str) -> int:
    """Of items with the numbers 0, 1, ...: the first one of the page. Raises InvalidArgument."""
    if not page_token:
        return 0
    match _key_of(page_token):
        case (int(number),) if number >= 0:
            return number + 1
    raise _not_given(page_token)


def token_of(*key: str | int) -> str:
    return urlsafe_b64encode(json.dumps(key, separators=(",", ":")).encode()).decode().rstrip("=")


def _key_of(page_token: str) -> Key:
    try:
        key = json.loads(urlsafe_b64decode(page_token + "=" * (-len(page_token) % 4)))
    except (ValueError, RecursionError):
        raise _not_given(page_token) from None
    if not isinstance(key, list) or not all(isinstance(part, str | int) for part in key):
        raise _not_given(page_token)
    return tuple(key)


def _not_given(page_token: str) -> InvalidArgument:
    return InvalidArgument(
        f"page_token {page_token[:40]!r} was not given by this list; use next_page_token of its last page"
    )
