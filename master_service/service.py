"""The master below REST: `Master` leads, or stands by until it may; what its methods promise holds across masters.

run(): lease -> campaign -> take over -> reign ... deposed or lease lost -> again, as a candidate with nothing in memory
methods: NotLeader on a standby (with the leader's url), NotReady while taking over, else the answer once etcd has it
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from master_service.core import books as decisions
from master_service.core import job
from master_service.core.books import Books
from master_service.core.changes import Event
from master_service.core.metrics import Metrics
from master_service.events import EventRing
from master_service.leader import Probe, campaign, take_over
from master_service.manifests import Manifests, StoredManifests
from master_service.reign import Reign
from master_service.tables import StoredTables, Tables
from shared import clock, http, ids, telemetry
from shared.errors import NotFound, NotLeader, NotReady, PeerError, TriremeError
from shared.etcd import Etcd, Lease, LeaseLost
from shared.keys import Keys
from shared.records import (
    AcquireTask,
    CompleteTask,
    FailTask,
    JobSpec,
    MasterLock,
    MetricBatch,
    PserverMember,
    TaskAnswer,
    TaskKind,
    TaskProgress,
    TrainerMember,
    UserFailure,
)

PAUSE_S = 0.5
REVOKE_S = 3.0

log = telemetry.logger("master")


def stored_tables(spec: JobSpec) -> Tables:
    return StoredTables(spec.storage)


def stored_manifests(spec: JobSpec) -> Manifests:
    return StoredManifests(spec.storage, spec.job)


class Master:
    """`url` is where its REST is served; `spec` is needed for a job's first master only. Run `run()`."""

    def __init__(
        self,
        etcd: Etcd,
        keys: Keys,
        *,
        name: str,
        url: str,
        spec: JobSpec | None = None,
        ttl_s: float = 3.0,
        tables: Callable[[JobSpec], Tables] = stored_tables,
        manifests: Callable[[JobSpec], Manifests] = stored_manifests,
        probe: Probe = http.refuses_connections,
    ) -> None:
        self.name, self.url = name, url
        self.keys = keys
        self.events = EventRing()
        self.metrics = Metrics()
        self._etcd, self._spec, self._ttl_s, self._tables, self._probe = etcd, spec, ttl_s, tables, probe
        self._manifests = manifests
        self._reign: Reign | None = None
        self._leader = ""
        self._leading = False
        self._probing: set[str] = set()

    def __repr__(self) -> str:
        role = f"term {self._reign.term}, {self._reign.books}" if self._reign else "standing by"
        return f"<Master {self.name} at {self.url}: {role}>"

    # ---------------------------------------------------------------- life

    async def run(self, stopping: asyncio.Event) -> None:
        """Lead or stand by until `stopping`; then hand over at once. Raises what no later reign could mend."""
        while not stopping.is_set():
            try:
                await self._candidacy(stopping)
            except (PeerError, LeaseLost) as error:
                log.warning("stepped_down", cause=error.message)
                await asyncio.sleep(ids.jitter(PAUSE_S))

    async def _candidacy(self, stopping: asyncio.Event) -> None:
        """One lease: from its grant until it is lost, revoked, or the process is asked to stop."""
        lease = await self._etcd.grant(self._ttl_s)
        me = MasterLock(master=self.name, url=self.url, lease=lease.id)
        try:
            async with asyncio.TaskGroup() as group:
                keeper = group.create_task(lease.keep_alive())
                ends = [group.create_task(stopping.wait()), group.create_task(lease.lost.wait())]
                work = group.create_task(self._lead(lease, me))
                await asyncio.wait([work, *ends], return_when=asyncio.FIRST_COMPLETED)
                for task in (work, keeper, *ends):
                    task.cancel()
        except* TriremeError as group_of_errors:
            raise _first(group_of_errors) from group_of_errors
        finally:
            self._reign, self._leading = None, False
            await _revoke(lease)

    async def _lead(self, lease: Lease, me: MasterLock) -> None:
        term = await campaign(self._etcd, self.keys, me, lease, self._probe, self._see_leader)
        self._leading, self._leader = True, self.url
        start = await take_over(self._etcd, self.keys, self.url, lease, term, self._spec, self._tables)
        manifests = self._manifests(start.books.spec)
        self._reign = Reign(self._etcd, self.keys, lease, start, self.events.add, manifests, self.metrics)
        self.events.begin_term(term)
        self.events.add([Event("master_elected", f"{self.name} leads in term {term}", {"term": term, "url": self.url})])
        done = start.books.training
        start.books.budget.started = done.epoch > 0 or done.counts[2] > 0
        await self._reign.run()

    def _see_leader(self, holder: MasterLock) -> None:
        self._leader = holder.url

    # ---------------------------------------------------------------- state

    @property
    def reign(self) -> Reign:
        """Raises NotLeader (also from the moment the lease is over by the local clock) or NotReady."""
        if self._reign is not None:
            if self._reign.lease.alive:
                return self._reign
            msg = f"{self.name} lost its lease; ask its successor"
            raise NotLeader(msg)
        if self._leading:
            msg = f"{self.name} is taking over the job (counting the dataset, reading the queues); ask again"
            raise NotReady(msg)
        msg = f"{self.name} stands by; the leader is {self._leader or 'not known yet'}"
        raise NotLeader(msg, leader=self._leader)

    @property
    def books(self) -> Books:
        """To read. Raises NotLeader or NotReady."""
        return self.reign.books

    # ---------------------------------------------------------------- tasks

    async def acquire_task(self, ask: AcquireTask) -> TaskAnswer:
        """The same `request` asked twice gets the same pending task. Raises StaleGeneration, Conflict, InvalidArgument."""
        writer = self.reign.writer
        if ask.stream is not None and ask.epoch > self.books.training.epoch:
            await writer.decide(lambda books, _: decisions.close_epoch(books, ask))
        if ask.index > 0:
            self.books.budget.started = True
        return await writer.decide(lambda books, _: decisions.acquire(books, ask))

    async def report_progress(self, task_id: str, report: TaskProgress) -> None:
        """Nothing is written: it only moves the deadline. Raises StaleAttempt, NotFound."""
        queue = decisions.report_progress(self.books, task_id, report).answer
        queue.sign_of_life(task_id, report.minibatches, clock.monotonic())

    async def complete_task(self, task_id: str, report: CompleteTask) -> None:
        """A doubled report changes nothing. Raises StaleAttempt, NotFound."""
        reign = self.reign
        queue = reign.books.queue_of(task_id)
        held = queue.pending.get(task_id)
        await reign.writer.decide(lambda books, _: decisions.complete(books, task_id, report))
        if held is not None:
            queue.pace.observe(clock.monotonic() - held.last_sign)
        if queue.kind is TaskKind.TRAIN:
            reign.books.budget.started = True

    async def fail_task(self, task_id: str, report: FailTask) -> None:
        """Counts against the task, and before the first step against the job. Raises StaleAttempt, NotFound."""
        reign = self.reign
        failure = await reign.writer.decide(lambda books, _: decisions.fail_task(books, task_id, report))
        if failure is not None:
            await self._count_failure(reign, failure, in_task=True)

    async def report_failure(self, member_id: str, failure: UserFailure) -> None:
        """The user's code failed outside a task (building the model, say)."""
        reign = self.reign
        named = failure.model_copy(update={"trainer": failure.trainer or member_id})
        fields: dict[str, str | int | float | bool] = {"member": member_id, "error_type": failure.error_type}
        self.events.add([Event("user_failure", f"{member_id}: {failure.error_type}: {failure.message}", fields)])
        await self._count_failure(reign, named, in_task=False)

    async def _count_failure(self, reign: Reign, failure: UserFailure, *, in_task: bool) -> None:
        reason = reign.books.budget.count(failure, in_task=in_task)
        if reason:
            await reign.writer.decide(lambda books, _: job.fail(books.state, reason, failure))

    # ---------------------------------------------------------------- members

    async def report_suspect(self, member_id: str) -> bool:
        """Somebody believes the member (or all of that name) dead: probe, and revoke its lease if nothing listens.

        Whether one was found dead. A member that listens, or does not answer, is left to its lease. Raises NotFound.
        """
        suspects = self.find_members(member_id)
        dead = False
        for suspect in suspects:
            if suspect.url in self._probing:
                continue
            self._probing.add(suspect.url)
            try:
                refused = await self._probe(suspect.url)
            finally:
                self._probing.discard(suspect.url)
            if refused and suspect.lease:
                message = f"{member_id} refuses connections at {suspect.url}: its lease is revoked"
                self.events.add([Event("member_dead", message, {"member": member_id, "url": suspect.url})])
                await self._etcd.revoke(suspect.lease)
                dead = True
        return dead

    def find_members(self, member_id: str) -> list[TrainerMember | PserverMember]:
        """By id (`trainer-0-9f2c51ab03de`, `pserver-1`, a pserver's incarnation) or by the name before it. Raises NotFound."""
        members = self.books.members
        found: list[TrainerMember | PserverMember] = [
            m for m in members.trainers.values() if m.trainer == member_id or m.trainer.rpartition("-")[0] == member_id
        ]
        found += [
            m
            for m in members.pservers.values()
            if member_id in (f"pserver-{m.index}", f"ps-{m.index}", m.incarnation, m.incarnation.rpartition("-")[0])
        ]
        if not found:
            msg = f"no member {member_id} is registered in job {self.keys.job}"
            raise NotFound(msg)
        return found

    # ---------------------------------------------------------------- metrics

    async def report_metrics(self, batch: MetricBatch) -> None:
        """In memory of the leader only."""
        if batch.steps:
            self.books.budget.started = True
        self.metrics.add(batch, clock.monotonic())


async def _revoke(lease: Lease) -> None:
    """So that a standby need not wait for the TTL; best effort, bounded, also while being cancelled."""
    revoking = asyncio.ensure_future(lease.revoke())
    try:
        async with asyncio.timeout(REVOKE_S):
            await asyncio.shield(revoking)
    except (TimeoutError, TriremeError) as error:
        log.warning("lease_not_revoked", cause=str(error))
        revoking.cancel()


def _first(group: BaseExceptionGroup[TriremeError]) -> TriremeError:
    """The one that is no mere consequence: a caller's error before a peer's."""
    leaves: list[TriremeError] = []
    todo: Sequence[BaseException] = [group]
    while todo:
        todo, taken = [], todo
        for error in taken:
            if isinstance(error, BaseExceptionGroup):
                todo = [*todo, *error.exceptions]
            elif isinstance(error, TriremeError):
                leaves.append(error)
    return min(leaves, key=lambda error: error.retryable)
