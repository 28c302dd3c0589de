"""A masterless job at one trainer: it decides about its own tasks, and one trainer at a time also sweeps.

    always:  one watch keeps the job current
             ─► acquire, complete, fail: decided here, written by compare-and-set
    lease ─► sweep/lock ─► open the job (spec, dataset counted, tasks/meta)
             ─► Supervisor: members, phases, late and lost tasks, rollbacks ...
             lock or lease lost ─► candidate again; another trainer sweeps

A candidate that finds the sweeper's port closed revokes its lease, as master candidates do (election.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from master_service.control.evictions import Evictions
from master_service.control.supervisor import Supervisor
from master_service.control.task_service import TaskService
from master_service.core.changes import Event
from master_service.core.decisions import tasks
from master_service.core.decisions.requests import Once
from master_service.core.decisions.tasks import current_metrics
from master_service.leadership.election import campaign, stand
from master_service.leadership.master import take_over
from master_service.masterless.shared_job import SharedWriter, WatchedJob
from master_service.store.writer import HeldLock, LeaderWriter
from trireme_shared.platform.etcd import Lease, LeaseLost
from trireme_shared.platform.runtime import clock, telemetry
from trireme_shared.protocol.errors import PeerError
from trireme_shared.protocol.records import (
    AcquireTask,
    MasterLock,
    MetricBatch,
    MetricsTaken,
    TaskAnswer,
    TaskProgress,
)
from trireme_shared.protocol.records.tasks import HeldTask, TrainerProgress

WRITE_S = 3.0
REMEMBERED_S = 30.0

log = telemetry.logger("dispatcher")


@dataclass(eq=False, repr=False)
class Dispatcher(TaskService):
    """`name`: the trainer's. `url`: answers as long as the trainer lives.

    It is the trainer's MasterPort, in the same process; NotReady until the job is open. Run `run()`.
    """

    def __post_init__(self) -> None:
        self.view = WatchedJob(self.etcd, self.keys, self.storage, self._on_members)
        self._writer = SharedWriter(self.etcd, self.keys, self.view, self.events.announce)
        self._supervisor: Supervisor | None = None
        self._lease: Lease | None = None
        self._progress = TrainerProgress(trainer=self.name)

    def __repr__(self) -> str:
        return f"<Dispatcher {self.name}: {'sweeper' if self.sweeps else 'candidate'}, {self.view!r}>"

    @property
    def writer(self) -> SharedWriter:
        return self._writer

    @property
    def evictions(self) -> Evictions:
        return (
            self._supervisor.evictions
            if self._supervisor is not None
            else Evictions(self.etcd, self.keys, None)
        )

    @property
    def sweeps(self) -> bool:
        """Whether this trainer believes that it holds the sweep lock, with the job open."""
        return self._supervisor is not None and self._lease is not None and self._lease.alive

    # ---------------------------------------------------------------- life

    async def run(self, stopping: asyncio.Event) -> None:
        """Until `stopping`; then the sweep lock is released at once. Raises errors that a new term would meet
        again."""
        async with asyncio.TaskGroup() as group:
            working = [group.create_task(work) for work in (self.view.run(), self._writer.run())]
            leaving = asyncio.Event()
            candidate = group.create_task(stand(self.etcd, self.ttl_s, leaving, self._under_lease))
            await stopping.wait()
            await self._keep_progress()
            leaving.set()
            await candidate
            for task in working:
                task.cancel()

    async def _under_lease(self, lease: Lease) -> None:
        try:
            await self._sweep(lease)
        finally:
            self._supervisor = self._lease = None
            self.events.end()

    async def _sweep(self, lease: Lease) -> None:
        """Wait for the lock, then do what its holder has to do."""
        self._lease = lease
        if self.spec is None:
            await self.view.until(
                lambda view: view.spec is not None, "the job's spec (TRIREME_SPEC at some trainer)"
            )
        me = MasterLock(master=self.name, url=self.url, lease=lease.id, network=self.network)
        term = await campaign(self.etcd, self.keys.sweep_lock, me, lease, self.probe, lambda _: None)
        lock = HeldLock(self.keys.sweep_lock, term, lease)
        start = await take_over(self.etcd, self.keys, lock, self.spec, self.storage)
        await self.view.until(lambda view: view.is_open or start.job.state.phase.final, "the job to open")
        if not self.view.is_open:  # the dataset cannot be read: the job has failed
            await lease.lost.wait()
            return
        for queue in self.view.job.queues.values():
            queue.grant_again(clock.monotonic())
        writer = LeaderWriter(self.etcd, self.keys, self._writer, lock)
        self._supervisor = Supervisor(self, writer, lock, self.storage(start.job.spec))
        self.events.begin(lambda: self.view.job.events, self._writer.tell)
        elected = Event("sweeper_elected", f"{self.name} sweeps in term {term}", {"term": term})
        self.events.add([elected, *start.news])
        self._on_members()
        await self._supervisor.run()

    def _on_members(self) -> None:
        if self._supervisor is not None:
            self._supervisor.take_members(self.view.job.members)

    async def acquire_task(self, ask: AcquireTask) -> TaskAnswer:
        """Each trainer finds late tasks for itself, by how long its own took."""
        tasks.find_late(self.job, clock.monotonic())
        return await super().acquire_task(ask)

    # ---------------------------------------------------------------- reports for other processes

    async def report_progress(
        self, task_id: str, report: TaskProgress, once: Once[None] | None = None
    ) -> None:
        """Written to the trainer's key, where the sweeper's watch finds it. Raises StaleAttempt, NotFound,
        PeerError."""
        assert once is None, "a trainer asks itself without a key"
        held = tasks.report_progress(self.job, task_id, report).pending[task_id]
        mine = HeldTask(
            task_id=task_id,
            attempt=report.attempt,
            epoch=held.record.epoch,
            minibatches=report.minibatches,
            work=report.work,
            waits_for=report.waits_for,
        )
        others = [task for task in self._progress.tasks if task.task_id != task_id and self._holds(task)]
        await self._publish(self._progress.with_fields(tasks=(*others, mine)))

    async def report_metrics(self, batch: MetricBatch, once: Once[None] | None = None) -> MetricsTaken:
        """Sums of the current epoch. Raises PeerError."""
        taken = await super().report_metrics(batch, once)
        batch = current_metrics(self.job, batch)
        before = self._progress
        epoch = max([share.epoch for share in batch.steps], default=before.epoch)
        loss_sum, records = (before.loss_sum, before.records) if epoch == before.epoch else (0.0, 0)
        shares = [share for share in batch.steps if share.epoch == epoch]
        await self._publish(
            before.with_fields(
                epoch=epoch,
                step=max([share.step for share in batch.steps], default=before.step),
                loss_sum=loss_sum + sum(share.loss_sum for share in shares),
                records=records + sum(share.records for share in shares),
                tasks=tuple(task for task in before.tasks if self._holds(task)),
                lane_s=batch.lane_s,
                least_lane_s=batch.least_lane_s,
            )
        )
        return taken

    async def _is_starting(self, member_id: str) -> bool:
        return member_id == self.name or await super()._is_starting(member_id)

    def _holds(self, task: HeldTask) -> bool:
        held = self.job.queue_of(task.task_id).pending.get(task.task_id)
        return held is not None and held.record.find(task.attempt, self.name) is not None

    async def _keep_progress(self) -> None:
        """What this trainer reported of the epoch is kept for REMEMBERED_S: others may not have read it
        yet."""
        if not self._progress.records:
            return
        self._progress = self._progress.with_fields(tasks=())
        with _best_effort():
            await self._put(await self.etcd.grant(REMEMBERED_S, timeout_s=WRITE_S))

    async def _publish(self, progress: TrainerProgress) -> None:
        self._progress = progress
        if self._lease is not None and self._lease.alive:
            with _best_effort():
                await self._put(self._lease)

    async def _put(self, lease: Lease) -> None:
        await self.etcd.put(
            self.keys.progress(self.name), self._progress.to_bytes(), lease.id, timeout_s=WRITE_S
        )


@contextmanager
def _best_effort() -> Iterator[None]:
    """A report that fails is not repeated: the next one holds everything."""
    try:
        yield
    except (PeerError, LeaseLost) as error:
        log.debug("progress_not_written", cause=error.message)
