"""The job as answers of the REST API. Reads only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from master_service.api.resources import (
    CheckpointDetails,
    CheckpointPage,
    CheckpointView,
    JobProgress,
    JobView,
    MasterView,
    MemberCounts,
    MemberPage,
    MemberView,
    MetricPage,
    MetricPoint,
    TaskPage,
    TaskView,
)
from master_service.core.decisions.operations import abandoned, find_checkpoint
from master_service.core.queue.task_queue import TaskQueue
from master_service.core.state.job import Job
from master_service.core.state.metrics import Metrics
from master_service.leadership.master import Master
from shared.errors import InvalidArgument, NotFound
from shared.records import Mode, PserverMember, Stage, TaskKind, TrainerMember
from shared.records.checkpoints import CheckpointRef
from shared.runtime import clock

SCANNED_AT_ONCE = 10_000


def job(job: Job, metrics: Metrics, master: MasterView) -> JobView:
    spec, state, now = job.spec, job.state, clock.monotonic()
    return JobView(
        job=spec.job,
        phase=state.phase,
        stage=state.stage,
        mode=spec.mode,
        generation=state.generation,
        reason=state.reason,
        failure=state.failure,
        progress=_progress(job, metrics, now),
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


def _progress(job: Job, metrics: Metrics, now: float) -> JobProgress:
    training, spec = job.training, job.spec
    per_epoch = training.streams.records
    _, _, done, discarded = training.counts
    closed = round(per_epoch * (done + discarded) / training.total) if training.total else 0
    open_records = sum(
        min(held.minibatches * spec.minibatch_size, training.streams.records_of(task_id))
        for task_id, held in training.pending.items()
    )
    before = training.current * per_epoch
    records_done = min(before + closed + open_records, spec.epochs * per_epoch)
    rate = metrics.rate(now) if job.state.stage is Stage.TRAIN else 0.0
    left = spec.epochs * per_epoch - records_done
    last = next(reversed(metrics.epochs.values()), None)
    return JobProgress(
        epoch=training.current,
        epochs=spec.epochs,
        step=metrics.step if metrics.steps else None,
        loss=last.loss if last else None,
        records_done=records_done,
        records_total=spec.epochs * per_epoch,
        records_per_s=round(rate, 3) if rate else None,
        eta_s=round(left / rate, 3) if rate else None,
    )


# ------------------------------------------------------------------ tasks


def task(job: Job, task_id: str) -> TaskView:
    """Raises NotFound."""
    queue = job.queue_of(task_id)
    return _task_view(queue, task_id, queue.state_of(task_id), clock.monotonic())


def tasks(job: Job, kind: TaskKind, state: str | None, page_size: int, page_token: str) -> TaskPage:
    """In order of number. TODO and DONE tasks are found by a scan of SCANNED_AT_ONCE tasks a page: a page may be short, or
    empty, and still have a next one. Raises NotFound without such a queue, InvalidArgument for a bad token."""
    queue = job.queues.get(kind)
    if queue is None:
        raise NotFound(f"the job has no {kind} tasks")
    start, now = _offset(page_token), clock.monotonic()
    if state in ("PENDING", "REQUEUED"):
        ids = sorted(queue.pending if state == "PENDING" else queue.requeued, key=queue.streams.number)
        chosen = ids[start : start + page_size]
        more = start + page_size < len(ids)
        views = tuple(_task_view(queue, task_id, state, now) for task_id in chosen)
        return TaskPage(tasks=views, next_page_token=str(start + page_size) if more else "")
    if state == "DISCARDED":
        lost = sorted(queue.discarded)
        page = tuple(_discarded_view(queue, *key) for key in lost[start : start + page_size])
        more = start + page_size < len(lost)
        return TaskPage(tasks=page, next_page_token=str(start + page_size) if more else "")
    found: list[TaskView] = []
    number = start
    while number < min(queue.total, start + SCANNED_AT_ONCE) and len(found) < page_size:
        task_id = queue.streams.task_id(number)
        its_state = queue.state_of(task_id)
        if state is None or its_state == state:
            found.append(_task_view(queue, task_id, its_state, now))
        number += 1
    return TaskPage(tasks=tuple(found), next_page_token=str(number) if number < queue.total else "")


def _task_view(queue: TaskQueue, task_id: str, state: str, now: float) -> TaskView:
    stream, index = queue.streams.place(queue.current, task_id)
    task = queue.streams.task(task_id, 0, queue.current, stream, index)
    where: dict[str, object] = {"file": task.file, "first": task.first, "count": task.count}
    where |= {"task_id": task_id, "kind": queue.kind, "state": state, "epoch": queue.current}
    where |= {"stream": stream, "index": index}
    held, back = queue.pending.get(task_id), queue.requeued.get(task_id)
    if held is not None:
        record = held.record
        where |= {"attempt": record.attempt, "failures": record.failures, "trainer": record.trainer}
        where |= {"minibatches": held.minibatches, "silent_s": round(now - held.last_sign, 3)}
        where |= {"remaining_s": round(held.deadline - now, 3)}
    elif back is not None:
        where |= {"attempt": back.attempts, "failures": back.failures, "cause": back.cause}
    elif state == "DISCARDED":
        return _discarded_view(queue, queue.current, task_id)
    return TaskView.model_validate(where)


def _discarded_view(queue: TaskQueue, epoch: int, task_id: str) -> TaskView:
    lost = queue.discarded[epoch, task_id].task
    stream, index = queue.streams.place(epoch, task_id)
    task = queue.streams.task(task_id, lost.attempts, epoch, stream, index)
    return TaskView(
        task_id=task_id,
        kind=queue.kind,
        state="DISCARDED",
        epoch=epoch,
        stream=stream,
        index=index,
        file=task.file,
        first=task.first,
        count=task.count,
        attempt=lost.attempts,
        failures=lost.failures,
        cause=lost.cause,
    )


# ------------------------------------------------------------------ members


def members(job: Job, page_size: int, page_token: str) -> MemberPage:
    start = _offset(page_token)
    everyone: Iterator[TrainerMember | PserverMember] = iter(
        [*(job.members.pservers[index] for index in sorted(job.members.pservers)), *job.members.trainers.values()]
    )
    page = [member_view(job, member) for member in islice(everyone, start, start + page_size)]
    more = next(everyone, None) is not None
    return MemberPage(members=tuple(page), next_page_token=str(start + page_size) if more else "")


def member_view(job: Job, member: TrainerMember | PserverMember) -> MemberView:
    if isinstance(member, PserverMember):
        return MemberView(
            member_id=f"pserver-{member.index}",
            kind="pserver",
            url=member.url,
            incarnation=member.incarnation,
            host=member.host,
            pid=member.pid,
            index=member.index,
        )
    lanes = job.lanes.of(member.trainer) if job.lanes and job.spec.mode is Mode.SYNC else None
    held = [task_id for queue in job.queues.values() for task_id in queue.held_by(member.trainer)]
    return MemberView(
        member_id=member.trainer,
        kind="trainer",
        url=member.url,
        incarnation=member.incarnation,
        host=member.host,
        pid=member.pid,
        lanes=lanes,
        tasks=tuple(held),
    )


# ------------------------------------------------------------------ checkpoints


def checkpoints(job: Job, page_size: int, page_token: str) -> CheckpointPage:
    kept = job.members.latest.kept if job.members.latest else ()
    start = _offset(page_token)
    page = tuple(_checkpoint(job, ref) for ref in kept[start : start + page_size])
    return CheckpointPage(
        checkpoints=page, next_page_token=str(start + page_size) if len(kept) > start + page_size else ""
    )


async def checkpoint_details(master: Master, checkpoint_id: str) -> CheckpointDetails:
    """Raises NotFound, CheckpointUnusable."""
    ref = find_checkpoint(master.job, checkpoint_id)
    view, manifest = _checkpoint(master.job, ref), await master.term.storage.read_manifest(ref)
    return CheckpointDetails(
        **view.model_dump(),
        epoch=max((position.epoch for position in manifest.record.positions), default=0),
        pservers=len(manifest.parts),
        size_bytes=sum(part.bytes for part in manifest.parts),
        write_time=manifest.timestamp,
        files=tuple(part.file for part in manifest.parts),
    )


def _checkpoint(job: Job, ref: CheckpointRef) -> CheckpointView:
    latest = job.members.latest
    state = "LATEST" if latest is not None and ref.uuid == latest.uuid else "KEPT"
    if ref.uuid in abandoned(job):
        state = "LEFT"
    return CheckpointView(checkpoint_id=ref.uuid, step=ref.step, timeline=ref.timeline, state=state)


# ------------------------------------------------------------------ metrics


def metrics(kept: Metrics, metric: str, page_size: int, page_token: str) -> MetricPage:
    """`metric`: "step_loss" or "epoch_loss"; the token is the last number seen. Raises NotFound."""
    series = {"step_loss": kept.steps, "epoch_loss": kept.epochs}.get(metric)
    if series is None:
        raise NotFound(f"metric {metric} does not exist; there are step_loss and epoch_loss")
    after = _offset(page_token) if page_token else -1
    numbers: Iterable[int] = sorted(number for number in series if number > after)
    chosen = list(islice(numbers, page_size + 1))
    points = [MetricPoint(number=n, loss=series[n].loss, records=series[n].records) for n in chosen[:page_size]]
    more = len(chosen) > page_size
    return MetricPage(metric=metric, points=tuple(points), next_page_token=str(points[-1].number) if more else "")


def _offset(page_token: str) -> int:
    if not page_token:
        return 0
    if not (page_token.isascii() and page_token.isdigit() and len(page_token) < 19):
        raise InvalidArgument(
            f"page_token {page_token[:40]!r} was not given by this API; use next_page_token of the last page"
        )
    return int(page_token)
