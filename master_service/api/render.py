"""One job, its metrics and evaluations as answers of the REST API; pages of lists. Reads only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    phase, reason = standing(job)
    return JobView(
        job=spec.job,
        phase=phase,
        stage=state.stage,
        mode=spec.mode,
        generation=state.generation,
        reason=reason,
        failure=state.failure,
        stalled=stalled,
        progress=progress(job, metrics, stalled=bool(stalled)),
        evaluation=evaluation(job),
        members=MemberCounts(
            trainers=len(job.members.trainers),
            trainers_desired=spec.trainers,
            pservers=len(job.members.pservers),
            pservers_desired=spec.pservers,
        ),
        losses=job.losses,
        result=state.result,
        master=master,
        spec=spec,
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
    records_done, records_total = job.records_done, spec.epochs * training.streams.records
    rate = metrics.rate(clock.monotonic()) if job.state.stage is Stage.TRAIN and not stalled else 0.0
    left = records_total - records_done
    last = next(reversed(metrics.epochs.values()), None)
    return JobProgress(
        epoch=training.current,
        epochs=spec.epochs,
        step=metrics.step,
        loss=last.loss if last else None,
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
    start, now = offset_of(page_token), clock.monotonic()
    if state in ("PENDING", "REQUEUED"):
        ids = sorted(queue.pending if state == "PENDING" else queue.requeued, key=queue.streams.number)
        chosen, token = page_of(ids, start, page_size)
        views = tuple(_task_view(queue, task_id, state, now) for task_id in chosen)
        return TaskPage(tasks=views, next_page_token=token)
    if state == "DISCARDED":
        lost, token = page_of(sorted(queue.discarded), start, page_size)
        views = tuple(_task_view(queue, task_id, state, now, epoch) for epoch, task_id in lost)
        return TaskPage(tasks=views, next_page_token=token)
    found: list[TaskView] = []
    number = start
    while number < min(queue.total, start + SCANNED_AT_ONCE) and len(found) < page_size:
        task_id = queue.streams.task_id(number)
        its_state = queue.state_of(task_id)
        if state is None or its_state == state:
            found.append(_task_view(queue, task_id, its_state, now))
        number += 1
    return TaskPage(tasks=tuple(found), next_page_token=str(number) if number < queue.total else "")


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
    pservers = [job.members.pservers[index] for index in sorted(job.members.pservers)]
    everyone: list[PserverMember | TrainerMember] = [*pservers, *job.members.trainers.values()]
    page, token = page_of(everyone, offset_of(page_token), page_size)
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
    kept = job.members.latest.kept if job.members.latest else ()
    page, token = page_of(kept, offset_of(page_token), page_size)
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
    found.sort(key=lambda operation: (operation.create_time, operation.operation_id), reverse=True)
    page, token = page_of(found, offset_of(page_token), page_size)
    return ResizePage(resizes=tuple(map(resize, page)), next_page_token=token)


def operations(job: Job, state: OperationState | None, page_size: int, page_token: str) -> OperationPage:
    """`state` None: in any."""
    found = [operation for operation in job.operations.records.values() if state in (None, operation.state)]
    found.sort(key=lambda operation: (operation.create_time, operation.operation_id), reverse=True)
    page, token = page_of(found, offset_of(page_token), page_size)
    return OperationPage(operations=tuple(page), next_page_token=token)


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
    """`metric`: "step_loss" or "epoch_loss"; the token is the last number seen. Raises NotFound."""
    series = {"step_loss": kept.steps, "epoch_loss": kept.epochs}.get(metric)
    if series is None:
        raise NotFound(f"metric {metric} does not exist; there are step_loss and epoch_loss")
    after = offset_of(page_token) if page_token else -1
    numbers = sorted(number for number in series if number > after)
    page, more = page_of(numbers, 0, page_size)
    points = tuple(
        MetricPoint(number=n, loss=series[n].loss, records=series[n].records, skipped=series[n].skipped)
        for n in page
    )
    return MetricPage(metric=metric, points=points, next_page_token=str(page[-1]) if more else "")


def evaluations(found: Sequence[Evaluation], page_size: int, page_token: str) -> EvaluationPage:
    """`found`: in the order of their numbers, of which the token is the last one seen."""
    before = offset_of(page_token) if page_token else None
    newest = [each for each in reversed(found) if before is None or each.number < before]
    page, more = page_of(newest, 0, page_size)
    return EvaluationPage(evaluations=tuple(page), next_page_token=str(page[-1].number) if more else "")


def series_page(table: SeriesTable, page_size: int, page_token: str) -> SeriesPage:
    """In the order of their names."""
    page, token = page_of(sorted(table.by_name), offset_of(page_token), page_size)
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

T = TypeVar("T")

TOKEN_PATTERN = r"^[0-9]{0,18}$"  # noqa: S105


def page_of(items: Sequence[T], start: int, page_size: int) -> tuple[Sequence[T], str]:
    """The items from `start` on, and the token of the next page, empty if there is none."""
    end = start + page_size
    return items[start:end], str(end) if end < len(items) else ""


def offset_of(page_token: str) -> int:
    if not page_token:
        return 0
    if not (page_token.isascii() and page_token.isdigit() and len(page_token) < 19):
        raise InvalidArgument(
            f"page_token {page_token[:40]!r} was not given by this API; use next_page_token of the last page"
        )
    return int(page_token)
