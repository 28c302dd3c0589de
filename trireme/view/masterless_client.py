"""The client of a masterless job: reads from etcd what a master's REST API would answer, and gives the same
records.

etcd+http://127.0.0.1:2379/digits ─► WatchedJob (one watch) ─► the records that a master would give
create or restore a checkpoint: written into etcd as an operation, carried out by the trainer that sweeps
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, NoReturn

from master_service.api import render
from master_service.api.render import metrics
from master_service.control.events import EventFeed
from master_service.control.observation import Movement, Observer, StallWatch
from master_service.control.operation_runner import OperationRunner
from master_service.core.decisions import operations
from master_service.core.explanation.explain import explain
from master_service.core.explanation.situation import STILL_S
from master_service.core.state.metrics import WINDOW_S, Metrics, Sums
from master_service.masterless.shared_job import SharedWriter, WatchedJob
from master_service.storage.job_storage import FileStorage, JobStorage
from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.etcd.reading import read_record
from trireme_shared.platform.runtime import clock
from trireme_shared.protocol.errors import Conflict, DeadlineExceeded, NotFound
from trireme_shared.protocol.explanations import Explanation
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import JobSpec, MasterLock, Phase, TaskKind, TaskSummary
from trireme_shared.protocol.records.operations import Operation
from trireme_shared.protocol.rest import (
    CheckpointView,
    EventPage,
    JobView,
    MasterView,
    MemberView,
    MetricPoint,
    TaskView,
)

PAGE = 500
MANY = 10_000
LOOK_S = 0.1
WATCHED_S = STILL_S + 1.0


class MasterlessClient:
    """The methods of AsyncClient for a job without a master; the job that they name is this one. Run `run()`;
    methods raise NotReady until the job is open."""

    def __init__(
        self,
        etcd: Etcd,
        keys: Keys,
        *,
        storage: Callable[[JobSpec], JobStorage] = FileStorage,
    ) -> None:
        self._etcd, self._keys, self._storage = etcd, keys, storage
        self._view = WatchedJob(etcd, keys, storage, lambda: None)
        self._writer = SharedWriter(etcd, keys, self._view, lambda _: None)
        self._stall = StallWatch(etcd)
        self._observer = Observer(etcd, keys, self._stall)
        self._loss: tuple[int, Sums] = (0, Sums())
        self._step: int | None = None
        self._done: deque[tuple[float, int]] = deque()

    def __repr__(self) -> str:
        return f"<MasterlessClient of {self._keys.job}: {self._view!r}>"

    async def run(self) -> None:
        """Follow etcd until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._view.run())
            group.create_task(self._writer.run())

    async def ready(self, timeout_s: float) -> None:
        """Raises DeadlineExceeded."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._view.until(lambda view: view.is_open, f"job {self._keys.job} to be open")
        except TimeoutError as error:
            msg = f"job {self._keys.job} could not be read within {timeout_s:g} s: {self._view!r}"
            raise DeadlineExceeded(
                msg, hint="is its etcd reachable, and has a trainer opened the job?"
            ) from error

    async def get_job(self, _: str) -> JobView:
        """The record of a master's `GET /v1/jobs/{job}`; `master` is the trainer that sweeps."""
        job, now = self._view.job, clock.monotonic()
        stalled = await self._stall.look(job, sum(report.records for report in self._view.progress.values()))
        view = render.job(job, self._metrics(), await self._sweeper(), stalled)
        progress = view.progress
        self._done.append((now, progress.records_done))
        while self._done[0][0] < now - WINDOW_S:
            self._done.popleft()
        seconds, records = now - self._done[0][0], progress.records_done - self._done[0][1]
        if seconds <= 0 or records <= 0 or stalled or Phase(view.phase).final:
            return view
        left = progress.records_total - progress.records_done
        rate, eta_s = round(records / seconds, 3), round(left * seconds / records, 3)
        return view.with_fields(progress=progress.with_fields(records_per_s=rate, eta_s=eta_s))

    async def explain_job(self, _: str) -> Explanation:
        """Does what AsyncClient does. The job is watched for WATCHED_S, because nobody else knows when it
        last made progress."""
        job, began, moved_at = self._view.job, clock.monotonic(), float("-inf")
        first = before = job.records_done
        while clock.monotonic() - began < WATCHED_S and not self._view.job.state.phase.final:
            await asyncio.sleep(LOOK_S)
            job = self._view.job
            if job.records_done != before:
                before, moved_at = job.records_done, clock.monotonic()
        rate = max(0, before - first) / max(LOOK_S, clock.monotonic() - began)
        movement = Movement(moved_at, rate, self._metrics().step)
        return explain(await self._observer.observe(job, movement))

    async def get_task_summary(self, _: str) -> TaskSummary:
        return self._view.job.summary()

    async def list_tasks(self, _: str, *, state: str | None = None) -> AsyncIterator[TaskView]:
        token = ""
        while True:
            page = render.tasks(self._view.job, TaskKind.TRAIN, state, PAGE, token)
            for task in page.tasks:
                yield task
            token = page.next_page_token
            if not token:
                return

    async def list_metrics(self, _: str, *, metric: str) -> AsyncIterator[MetricPoint]:
        for point in metrics(self._metrics(), metric, PAGE, "").points:
            yield point

    async def list_members(self, _: str) -> AsyncIterator[MemberView]:
        for member in render.members(self._view.job, MANY, "").members:
            yield member

    async def list_checkpoints(self, _: str) -> AsyncIterator[CheckpointView]:
        for checkpoint in render.checkpoints(self._view.job, MANY, "").checkpoints:
            yield checkpoint

    async def create_checkpoint(
        self, _: str, *, key: str, cause: str = "", limit_s: float = 600.0
    ) -> Operation:
        """Does what AsyncClient does. Raises Conflict."""
        return await self._operations().create_checkpoint(key, cause or "requested through etcd", limit_s)

    async def restore_checkpoint(self, _: str, checkpoint_id: str, *, key: str) -> Operation:
        """Does what AsyncClient does. Raises Conflict, NotFound."""
        return await self._operations().restore_checkpoint(
            key, "restore requested through etcd", checkpoint_id
        )

    async def create_resize(self, job: str, **_: Any) -> NoReturn:
        """Raises Conflict: nobody leads a resize."""
        msg = f"job {job} is masterless: nobody leads a resize of it"
        raise Conflict(
            msg, hint="end it and start it again with other numbers; it goes on from its newest checkpoint"
        )

    predict_resize = create_resize

    async def get_resize(self, job: str, resize_id: str, **_: Any) -> NoReturn:
        """Raises NotFound: there is none."""
        raise NotFound(f"job {job} is masterless: it has no resize {resize_id}")

    async def get_operation(self, _: str, operation_id: str, *, wait_s: float = 0.0) -> Operation:
        """Does what AsyncClient does. Raises NotFound."""
        deadline = clock.monotonic() + wait_s
        while True:
            found = self._operations().get(operation_id)
            if found.running and self._view.job.state.phase.final:  # no trainer sweeps any more
                await self._writer.decide(lambda job, _: operations.advance(job, clock.timestamp()))
                found = self._operations().get(operation_id)
            if not found.running or clock.monotonic() > deadline:
                return found
            await asyncio.sleep(LOOK_S)

    def _operations(self) -> OperationRunner:
        return OperationRunner(self._writer, self._storage(self._view.job.spec), EventFeed())

    async def list_events(self, _: str, *, after: int = 0, wait_s: float = 0.0) -> EventPage:
        """A page of the job's log of events, as etcd holds it. Raises CursorExpired."""
        deadline = clock.monotonic() + wait_s
        while True:
            page = render.events(self._view.job.events, after, PAGE)
            if page.events or clock.monotonic() >= deadline:
                return page
            await asyncio.sleep(LOOK_S)

    async def _sweeper(self) -> MasterView:
        lock = await self._etcd.get(self._keys.sweep_lock)
        holder = read_record(MasterLock, self._keys.sweep_lock, lock.value if lock else None)
        if lock is None or holder is None:
            return MasterView(master_id="nobody", url="", term=0)
        return MasterView(master_id=holder.master, url=holder.url, term=lock.create_revision)

    def _metrics(self) -> Metrics:
        """The trainers' sums of the newest epoch. Of trainers that are gone, the last known values."""
        reports = list(self._view.progress.values())
        epoch = max([report.epoch for report in reports], default=0)
        of_epoch = [report for report in reports if report.epoch == epoch]
        sums = Sums(sum(report.loss_sum for report in of_epoch), sum(report.records for report in of_epoch))
        if sums.records and epoch >= self._loss[0]:
            self._loss = epoch, sums
        steps = [report.step + 1 for report in reports if report.step is not None]
        self._step = max(steps, default=self._step)
        metrics = Metrics()
        if self._step is not None:
            metrics.step = self._step
            metrics.steps[self._step] = self._loss[1]
            metrics.epochs[self._loss[0]] = self._loss[1]
        return metrics
