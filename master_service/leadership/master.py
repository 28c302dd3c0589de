"""The master without REST: `Master` leads, or stands by until it may lead. What its methods promise holds across masters.

run(): lease -> campaign -> take over -> term ... lock or lease lost -> again, as a candidate with nothing in memory
methods: NotLeader on a standby (with the leader's url), NotReady while taking over, else the answer once etcd has it
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from master_service.control.evictions import Evictions
from master_service.control.task_service import TaskService
from master_service.core.changes import Event
from master_service.core.decisions.once import Once
from master_service.core.decisions.reports import current_metrics
from master_service.leadership.candidate import Candidate
from master_service.leadership.election import stand
from master_service.leadership.term import Term
from master_service.store.takeover import take_over
from master_service.store.writer import Writer
from trireme_shared.platform.etcd import Lease, LeaseLost, Put
from trireme_shared.platform.runtime import clock, telemetry
from trireme_shared.protocol.errors import NotFound, PeerError
from trireme_shared.protocol.metrics import LOSS
from trireme_shared.protocol.records import AcquireTask, MasterAddress, MetricBatch, MetricsTaken, TaskAnswer

log = telemetry.logger("master")


@dataclass(eq=False, repr=False)
class Master(TaskService):
    """`url` is where its REST API is served."""

    candidate: Candidate[Term] = field(init=False)
    #: Why it stepped down, until it leads again.
    setback: PeerError | LeaseLost | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.candidate = Candidate(self.name, "taking over the job (counting the dataset, reading the queues)")

    @property
    def current_term(self) -> Term | None:
        """None on a standby."""
        return self.candidate.current

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
        election = self.candidate.elected(
            self.etcd, self.keys.master_lock, lease, self.probe, url=self.url, network=self.network
        )
        async with election as lock:
            try:
                address = MasterAddress(url=self.url, term=lock.term)
                first = Put(self.keys.master_address, address.to_bytes(), lease.id)
                start = await take_over(self.etcd, self.keys, lock, self.spec, self.storage, first)
                term = self.candidate.current = Term(self, lock, start)
                self.setback = None
                self.events.begin(lambda: term.job.events, term.writer.tell)
                elected = f"{self.name} leads in term {lock.term}"
                told = Event("master_elected", elected, {"term": lock.term, "url": self.url})
                self.events.add([told, *start.news])
                await term.run()
            finally:
                self.events.end()

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
        """The term that this process leads. Raises as Candidate.term."""
        return self.candidate.check_ready()

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
        """Raises NotLeader, NotReady, as Candidate's."""
        return self.candidate.term

    @property
    def writer(self) -> Writer:
        return self.term.writer

    @property
    def evictions(self) -> Evictions:
        return self.term.evictions
