"""The master without REST: `Master` leads, or stands by until it may lead. What its methods promise holds across masters.

run(): lease -> campaign -> take over -> term ... lock or lease lost -> again, as a candidate with nothing in memory
methods: NotLeader on a standby (with the leader's url), NotReady while taking over, else the answer once etcd has it
"""

from __future__ import annotations

import asyncio

from master_service.control.evictions import Evictions
from master_service.control.task_service import TaskService
from master_service.core.changes import Event
from master_service.core.decisions.once import Once
from master_service.core.decisions.reports import current_metrics
from master_service.leadership.election import campaign, stand
from master_service.leadership.term import Term
from master_service.store.takeover import take_over
from master_service.store.writer import HeldLock, Writer
from shared.errors import NotFound, NotLeader, NotReady, PeerError
from shared.etcd import Lease, LeaseLost, Put
from shared.metric_names import LOSS
from shared.records import AcquireTask, MasterAddress, MasterLock, MetricBatch, MetricsTaken, TaskAnswer
from shared.runtime import clock, telemetry

log = telemetry.logger("master")


class Master(TaskService):
    """`url` is where its REST API is served. `current_term`: None on a standby."""

    current_term: Term | None = None
    leading_since = 0.0  # when it got the lock
    setback: PeerError | LeaseLost | None = None  # why it stepped down, until it leads again
    _leader = ""
    _leading = False

    def __repr__(self) -> str:
        role = f"term {self.current_term.number}, {self.current_term.job}" if self.current_term else "standing by"
        return f"<Master {self.name} at {self.url}: {role}>"

    # ---------------------------------------------------------------- life

    async def run(self, stopping: asyncio.Event) -> None:
        """Lead or stand by until `stopping`, then give up the lease at once. Raises errors that a new term would meet again."""
        await stand(self.etcd, self.ttl_s, stopping, self.lead, self._note_setback)

    def _note_setback(self, error: PeerError | LeaseLost) -> None:
        self.setback = error

    async def lead(self, lease: Lease) -> None:
        """Wait for the job's lock, take the job over and lead it until cancelled, or the lock is lost (raises LockLost, in an
        ExceptionGroup). Raises what `take_over` raises."""
        me = MasterLock(master=self.name, url=self.url, lease=lease.id, network=self.network)
        try:
            term = await campaign(self.etcd, self.keys.master_lock, me, lease, self.probe, self._note_leader)
            self._leading, self._leader, self.leading_since = True, self.url, clock.monotonic()
            lock = HeldLock(self.keys.master_lock, term, lease)
            address = Put(self.keys.master_address, MasterAddress(url=self.url, term=term).to_bytes(), lease.id)
            start = await take_over(self.etcd, self.keys, lock, self.spec, self.storage, address)
            self.current_term, self.setback = Term(self, lock, start), None
            leading = self.current_term
            self.events.begin(lambda: leading.job.events, leading.writer.tell)
            elected = f"{self.name} leads in term {term}"
            self.events.add([Event("master_elected", elected, {"term": term, "url": self.url}), *start.news])
            await leading.run()
        finally:
            self.current_term, self._leading, self._leader = None, False, ""
            self.events.end()

    def _note_leader(self, holder: MasterLock) -> None:
        self._leader = holder.url

    # ---------------------------------------------------------------- as the only job that the process leads

    def find(self, job: str | None) -> Master:
        """Itself. Raises NotFound for another job."""
        if job not in (None, self.keys.job):
            msg = f"there is no job {job} here: this master leads job {self.keys.job} only"
            raise NotFound(msg)
        return self

    def check_leading(self) -> None:
        """Raises NotLeader, NotReady."""
        self.term  # noqa: B018  raises

    def check_ready(self) -> bool:
        """Whether it leads; False: it stands by. Raises NotLeader: it has no lease, so it can do neither; NotReady."""
        if self._leader and not self._leading:
            return False
        self.check_leading()
        return True

    def masters(self) -> tuple[Master]:
        return (self,)

    async def report_metrics(self, batch: MetricBatch, once: Once[None] | None = None) -> MetricsTaken:
        """They are kept by step, too."""
        await super().report_metrics(batch, once)
        series = self.term.series
        before = series.timeline
        taken = series.note(current_metrics(self.job, batch))
        if batch.whole and taken.next is not None:
            losses = {number: epoch.sums.get(LOSS) for number, epoch in series.epochs.items()}
            self.metrics.know_epochs({number: (loss.total, loss.weight) for number, loss in losses.items() if loss})
            if series.timeline != before:
                self.metrics.know_steps(series.step_losses())
        if batch.store:
            await series.store()
            taken = series.taken
        return taken

    # ---------------------------------------------------------------- waiting for a task

    async def acquire_task(self, ask: AcquireTask) -> TaskAnswer:
        """As TaskService does; if there is no task, the answer comes when there may be one, at most `ask.wait_s` later."""
        deadline = clock.monotonic() + ask.wait_s
        woken = False
        while True:
            asks = self.term.asks
            changes = asks.changes
            try:
                answer = await super().acquire_task(ask)
            except BaseException:
                if woken:
                    asks.freed(1)
                raise
            left_s = deadline - clock.monotonic()
            if answer.answer != "wait" or left_s <= 0:
                return answer
            woken = await asks.next(changes, left_s)

    # ---------------------------------------------------------------- state

    @property
    def term(self) -> Term:
        """Raises NotLeader (also as soon as the lease is over by the local clock) or NotReady."""
        if self.current_term is not None:
            if self.current_term.lease.alive:
                return self.current_term
            msg = f"{self.name} lost its lease; ask its successor"
            raise NotLeader(msg, retry_after_s=round(self.current_term.lease.held_s, 3))
        if self._leading:
            msg = f"{self.name} is taking over the job (counting the dataset, reading the queues); ask again"
            raise NotReady(msg)
        if not self._leader:
            raise NotLeader(f"{self.name} stands by; the leader is not known yet", leader="")
        msg = f"{self.name} stands by; the leader is {self._leader}"
        raise NotLeader(msg, leader=self._leader, retry_after_s=0)  # there at once

    @property
    def writer(self) -> Writer:
        return self.term.writer

    @property
    def evictions(self) -> Evictions:
        return self.term.evictions
