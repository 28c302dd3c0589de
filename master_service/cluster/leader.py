"""The master of a cluster without REST: it leads every ACTIVE job, or stands by until it may.

run(): lease -> campaign for cluster/lock -> take over -> ClusterTerm ... lock or lease lost
    -> again, with nothing in memory
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import TypeVar

from master_service.cluster.ended_jobs import EndedTrackers, Retention
from master_service.cluster.store import LAST_BYTES, MAX_BYTES, RestingEvents, take_over
from master_service.cluster.term import ClusterTerm
from master_service.cluster.unreadable import news_of
from master_service.control.events import EventFeed
from master_service.control.task_service import Probe
from master_service.core.changes import Decision, Event
from master_service.core.decisions import cluster_jobs, job_operations, job_schedules
from master_service.core.decisions.requests import ANY, Decide, Expected, Once
from master_service.core.decisions.scheduling.schedule import who_has
from master_service.core.state.cluster import ClusterDecision, ClusterState, Place, failed_tasks
from master_service.core.state.kept import EventLog
from master_service.leadership.election import Candidate, Leads, stand
from master_service.leadership.master import Master
from master_service.storage.job_storage import FileStorage, JobStorage, remove_files
from master_service.storage.places import check_place
from master_service.storage.series_files import SeriesReader, StoredMetrics
from master_service.store.between_runs import start_again
from trireme_shared.platform.etcd import Etcd, Get, Lease
from trireme_shared.platform.etcd.reading import must_read, read_record
from trireme_shared.platform.membership.names import NameUse, check_free, forget_communicator, uses_of
from trireme_shared.platform.runtime import clock, http, ids, telemetry
from trireme_shared.platform.runtime.containment import Containment, Failed, Failures, LongLivedGroup
from trireme_shared.platform.runtime.http import own_network
from trireme_shared.platform.runtime.service import open_files
from trireme_shared.platform.security.access import CALLER
from trireme_shared.platform.storage import files
from trireme_shared.protocol.errors import (
    Conflict,
    NotFound,
    NotReady,
    PeerError,
    ResourceExhausted,
    TriremeError,
)
from trireme_shared.protocol.evaluations import Evaluation, EvaluationStatus
from trireme_shared.protocol.keys import ClusterKeys
from trireme_shared.protocol.records import JobSpec, JobState, Phase
from trireme_shared.protocol.records.cluster import ClusterJob, JobSchedule, Kind, Source, Standing
from trireme_shared.protocol.records.operations import Operation, OperationKind
from trireme_shared.protocol.times import rfc3339

STEP_DOWN_S, LONGEST_REST_S = 1.0, 30.0  # after a term that failed
OPERATION_LOOK_S = (
    1.0  # how often an operation is looked at that somebody waits for, if no event tells its end
)

A = TypeVar("A")

FILES_OF_JOB = 32  # a connection of each member that asks for tasks, and what taking it over opens

log = telemetry.logger("cluster")


@dataclass(eq=False, repr=False)
class ClusterMaster(Leads[ClusterTerm]):
    """`url` is where its REST API is served. `storage_url`: below it lie the files of jobs that name no place
    of their own; `storage_allowed`: further places that jobs may name. `job_retention_s`: so long after its
    end a job is deleted; None: never."""

    etcd: Etcd
    keys: ClusterKeys
    _: KW_ONLY
    name: str
    url: str
    storage_url: str
    storage_allowed: tuple[str, ...] = ()
    ttl_s: float = 3.0
    rebalance_s: float = 30.0
    job_retention_s: float | None = None
    storage: Callable[[JobSpec], JobStorage] = FileStorage
    series: SeriesReader = field(default_factory=SeriesReader)
    remove_files: Callable[[JobSpec], Awaitable[None]] = remove_files
    probe: Probe = http.refuses_connections
    network: str = field(default_factory=own_network)
    events: EventFeed = field(init=False, default_factory=EventFeed)
    candidate: Candidate[ClusterTerm] = field(init=False)
    _deletions: dict[str, asyncio.Task[ClusterJob]] = field(init=False, default_factory=dict)
    _contained: Containment = field(init=False, default_factory=lambda: Containment((TriremeError,)))
    _failures: Failures = field(init=False, default_factory=Failures)
    _rests_until: float = field(init=False, default=0.0)
    _resting: RestingEvents = field(init=False)

    def __post_init__(self) -> None:
        self._resting = RestingEvents(self.etcd, self.keys)
        self.candidate = Candidate(self.name, "taking the cluster over")

    def __repr__(self) -> str:
        return f"<ClusterMaster {self.name} at {self.url}: {self.current_term or 'standing by'}>"

    # ---------------------------------------------------------------- life

    async def run(self, stopping: asyncio.Event) -> None:
        """Lead or stand by until `stopping`, then give up the lease at once. Raises errors that a new term
        would meet again."""
        await stand(self.etcd, self.ttl_s, stopping, self._lead)

    async def _lead(self, lease: Lease) -> None:
        """One term. After a bug in it this process steps down for a while: another one may do better, and the
        jobs' members go on meanwhile. Raises TriremeError."""
        await asyncio.sleep(self._rests_until - clock.monotonic())
        led = await self._contained.once(partial(self._lead_under, lease), "leading the cluster")
        if isinstance(led, Failed):
            self._rests_until = clock.monotonic() + self._failures.add(STEP_DOWN_S, LONGEST_REST_S)
            raise PeerError(f"{self.name} could not lead the cluster: {led.cause}")

    async def _lead_under(self, lease: Lease) -> None:
        election = self.candidate.elected(
            self.etcd, self.keys.lock, lease, self.probe, url=self.url, network=self.network
        )
        async with election as lock:
            try:
                start = await take_over(self.etcd, self.keys, lock, self.url)
                term = self.candidate.current = ClusterTerm(
                    self.etcd,
                    self.keys,
                    lock,
                    start,
                    self._master_of,
                    self.events.announce,
                    rebalance_s=self.rebalance_s,
                )
                self.events.begin(lambda: start.state.events, term.writer.tell)
                elected = f"{self.name} leads the cluster in term {lock.term}"
                self.events.add([Event("leader_elected", elected, {"term": lock.term, "url": self.url})])
                self.events.add(news_of(start.state))
                retention = Retention(self, self.job_retention_s, self.events.add)
                trackers = EndedTrackers(self, self.events.add)
                async with LongLivedGroup() as group:
                    group.create_task(term.contained.keep(retention.run, "deleting jobs"))
                    group.create_task(term.contained.keep(trackers.run, "telling trackers of ended jobs"))
                    group.create_task(term.run())
            finally:
                self.events.end()

    def _master_of(self, job: ClusterJob) -> Master:
        return Master(
            self.etcd,
            self.keys.keys_of(job.job),
            name=self.name,
            url=self.url,
            spec=job.spec,
            ttl_s=self.ttl_s,
            storage=self.storage,
            probe=self.probe,
            network=self.network,
            why_fewer=partial(self._why_fewer, job.job),
        )

    def _why_fewer(self, job: str, kind: Kind) -> str:
        return who_has(self.current_term.state, job, kind) if self.current_term else ""

    # ---------------------------------------------------------------- which jobs it leads

    @property
    def state(self) -> ClusterState:
        """To read. Raises NotLeader, NotReady."""
        return self.term.state

    def leads(self, name: str) -> bool:
        """Whether a JobTerm of it has not ended yet. Raises NotLeader, NotReady."""
        return name in self.term.jobs

    def permitted_s(self) -> float:
        """So long it is certainly the only leader."""
        return self.current_term.lock.lease.remaining_s if self.current_term else 0.0

    def masters(self) -> Iterable[Master]:
        """Of the jobs that it leads now."""
        return [led.master for led in self.current_term.jobs.values()] if self.current_term else []

    def find(self, job: str | None) -> Master:
        """None: the only job. Raises NotFound; Conflict if there are several, or the job is not ACTIVE;
        NotLeader, NotReady."""
        term = self.term
        job = job or self.only_job()
        found = term.state.job(job)
        led = term.jobs.get(job)
        if led is not None:
            return led.master
        if found.standing is Standing.ACTIVE:
            raise NotReady(f"job {job} begins; ask again")
        raise Conflict(f"job {job} is {found.standing}: {found.reason}", hint=f"see GET /v1/jobs/{job}")

    def only_job(self) -> str:
        """Raises NotFound, Conflict, NotLeader, NotReady."""
        state = self.state
        if not state.jobs:
            raise NotFound("this cluster has no job yet", hint="`trireme submit SCRIPT` starts one")
        if len(state.jobs) > 1:
            names = ", ".join(sorted(state.jobs)[:5])
            msg = (
                f"this cluster has {len(state.jobs)} jobs ({names}, ...): say which, as /v1/jobs/{{job}}/..."
            )
            raise Conflict(msg)
        return next(iter(state.jobs))

    # ---------------------------------------------------------------- what users ask for

    # `once`: of a request with an Idempotency-Key; all raise AnsweredBefore, IdempotencyKeyReused then.
    # `expected`: the version of what it changes; all raise PreconditionFailed if it has another one.
    # `cause`: of the operation, for people: who asks.

    def check_open_files(self) -> None:
        """Raises ResourceExhausted if this process may not open what another job needs of it."""
        found, most = open_files()
        if most - found < FILES_OF_JOB:
            msg = (
                f"this master has {found} of {most} files and sockets open that it may have: too few are "
                f"left for the members of another job ({FILES_OF_JOB})"
            )
            hint = "start masters with a higher hard limit: ulimit -Hn 65536, LimitNOFILE= of the service"
            raise ResourceExhausted(msg, hint=hint)

    async def check_storage(self, url: str) -> None:
        """`url`: what a user names for a job's files; "" is the cluster's own place. Raises
        InvalidArgument."""
        if url:
            await asyncio.to_thread(check_place, url, (self.storage_url, *self.storage_allowed))

    async def create_job(
        self, job: ClusterJob, source: Source | None, once: Once[ClusterJob] | None = None
    ) -> ClusterJob:
        """Raises Conflict, InvalidArgument, NotFound, ResourceExhausted."""
        self.check_open_files()
        if job.job not in self.state.jobs:
            uses = await uses_of(self.etcd, self.keys.keys_of(job.job))
            check_free(job.job, uses, NameUse.CLUSTER, "choose another name")
        return await self._decide(
            lambda state, _: cluster_jobs.create(state, job, source, clock.timestamp()), once
        )

    async def pause_job(
        self, name: str, once: Once[Operation] | None = None, expected: Expected = ANY, cause: str = ""
    ) -> Operation:
        """With a checkpoint; its members become free. Raises Conflict, NotFound."""
        pause: Decide[ClusterJob] = expected.job(name, lambda state, _: cluster_jobs.pause(state, name))
        return await self._begin(OperationKind.PAUSE, cause, pause, once)

    async def resume_job(
        self, name: str, once: Once[Operation] | None = None, expected: Expected = ANY, cause: str = ""
    ) -> Operation:
        """PAUSED, or FAILED but not by its script: it is QUEUED again. Raises Conflict, NotFound,
        PeerError."""
        if once is not None:
            await self._decide(once.check)
        if expected is not ANY:  # before anything that precedes the decision
            await self._decide(expected.job(name, lambda *_: Decision(None)))
        failed = self.state.job(name).standing is Standing.FAILED and self.state.job(name).wanted != "delete"
        if failed and name in self.term.jobs:
            raise NotReady(f"job {name} has failed, and its members are leaving; ask again")
        before = bool(failed_tasks(self.state.task_runs.get(name, {}), "pre"))  # then it never began
        if failed and not before and not await self._opened_again(name):
            msg = f"job {name} has FAILED for good: {self.state.job(name).reason}"
            raise Conflict(
                msg, hint="mend its script and submit it under another name, or delete this one first"
            )
        resume: Decide[ClusterJob] = expected.job(name, lambda state, _: cluster_jobs.resume(state, name))
        return await self._begin(OperationKind.RESUME, cause, resume, once)

    async def _opened_again(self, name: str) -> bool:
        """Also if a leader before this one has done it, and died before the job was QUEUED. Raises Conflict:
        a run has the name, and nothing here may change it."""
        if not await self._has_keys(self.state.job(name)):
            check_free(
                name, [NameUse.RUN], NameUse.CLUSTER, f"`trireme delete {name}` leaves the run as it is"
            )
        if await start_again(self.etcd, self.keys.keys_of(name)):
            return True
        return (await self.state_of(name)).phase is not Phase.FAILED

    async def cancel_job(
        self, name: str, once: Once[Operation] | None = None, expected: Expected = ANY, cause: str = ""
    ) -> Operation:
        """Without a checkpoint. Raises Conflict, NotFound."""
        stamp = rfc3339(clock.wall_time())
        cancel: Decide[ClusterJob] = expected.job(
            name, lambda state, _: cluster_jobs.cancel(state, name, stamp)
        )
        return await self._begin(OperationKind.CANCEL, cause, cancel, once)

    async def begin_delete(self, name: str, expected: Expected = ANY, cause: str = "") -> Operation:
        """As `delete_job`, which goes on when this has answered. Raises Conflict unless it has ended,
        NotFound."""
        begin = self._begin_delete(name, expected)
        operation = await self._begin(OperationKind.DELETE, cause, begin, None, LAST_BYTES)
        self._deletion(name)
        return operation

    async def delete_job(self, name: str, expected: Expected = ANY) -> ClusterJob:
        """Its keys, and its files if they lie below the cluster's own storage. Calls for one job are one
        deletion, which goes on when its callers leave. Raises Conflict unless it has ended, NotFound."""
        await self._decide(self._begin_delete(name, expected), most_bytes=LAST_BYTES)
        return await asyncio.shield(self._deletion(name))

    def _deletion(self, name: str) -> asyncio.Task[ClusterJob]:
        deletion = self._deletions.get(name)
        if deletion is None:
            deletion = self._deletions[name] = asyncio.ensure_future(self._delete_job(name))
            deletion.add_done_callback(partial(self._deletion_ended, name))
        return deletion

    def _deletion_ended(self, name: str, deletion: asyncio.Task[ClusterJob]) -> None:
        del self._deletions[name]
        # its callers may have left
        if not deletion.cancelled() and (error := deletion.exception()) is not None:
            log.info("deletion_ended", job=name, cause=str(error))

    def _begin_delete(self, name: str, expected: Expected) -> Decide[ClusterJob]:
        """Refused before any file is gone. A deletion that was begun is finished, whoever asks again. Raises
        Conflict, NotReady, NotFound."""
        job = self.state.job(name)
        begun = job.wanted == "delete"
        if name in self.term.jobs and not begun:
            what = (
                "has ended, and its members are leaving"
                if job.standing.final
                else f"is {job.standing}: cancel it first"
            )
            raise (NotReady if job.standing.final else Conflict)(f"job {name} {what}")
        return (ANY if begun else expected).job(name, lambda state, _: cluster_jobs.begin_delete(state, name))

    async def _delete_job(self, name: str) -> ClusterJob:
        job = self.state.job(name)
        try:
            if job.spec.storage == files.join(self.storage_url, name):
                await self.remove_files(job.spec)
        except Exception as error:
            stamp, why = clock.timestamp(), error
            await self._decide(lambda state, _: job_operations.not_deleted(state, name, why, stamp))
            raise
        has_keys = await self._has_keys(job)
        await forget_communicator(self.etcd, self.keys.keys_of(name))
        stamp = clock.timestamp()
        return await self._decide(lambda state, _: cluster_jobs.delete(state, name, stamp, has_keys=has_keys))

    async def _has_keys(self, job: ClusterJob) -> bool:
        """Whether the keys below its name are its own. A run may have begun under that name, where an earlier
        version did not refuse it: its files lie elsewhere. Raises PeerError."""
        keys = self.keys.keys_of(job.job)
        found = await self.etcd.get(keys.spec)
        known = read_record(JobSpec, keys.spec, found.value) if found is not None else None
        storage = job.spec.storage or files.join(self.storage_url, job.job)
        return known is None or known.storage == storage

    async def operation(self, job: str, operation_id: str, wait_s: float = 0.0) -> Operation:
        """What was asked of a whole job, also of one that is deleted: once it has ended, or after `wait_s`.
        Raises NotFound, NotLeader, NotReady."""
        deadline = clock.monotonic() + wait_s
        while True:
            found = self.state.operation(job, operation_id)
            if found is None:
                raise NotFound(f"job {job} has no operation {operation_id}", operation=operation_id)
            left_s = deadline - clock.monotonic()
            if not found.running or left_s <= 0:
                return found
            await self.events.next(min(left_s, OPERATION_LOOK_S))

    async def create_schedule(
        self, schedule: JobSchedule, source: Source | None, once: Once[JobSchedule] | None = None
    ) -> JobSchedule:
        """Raises Conflict, InvalidArgument."""
        now = clock.wall_time()
        return await self._decide(
            lambda state, _: job_schedules.create_schedule(state, schedule, source, now), once
        )

    async def delete_schedule(self, name: str, expected: Expected = ANY) -> JobSchedule:
        """Its jobs stay. Raises NotFound."""
        return await self._decide(
            expected.schedule(name, lambda state, _: job_schedules.delete_schedule(state, name))
        )

    async def drain_member(
        self, member: str, once: Once[Place] | None = None, expected: Expected = ANY
    ) -> Place:
        """It gets no work any more, and what it runs leaves in order. Raises NotFound."""
        stamp = clock.timestamp()
        return await self._decide(
            expected.place(member, lambda state, _: cluster_jobs.drain(state, member, stamp)), once
        )

    async def undrain_member(
        self, member: str, once: Once[Place] | None = None, expected: Expected = ANY
    ) -> Place:
        """It may get work again. Raises NotFound."""
        return await self._decide(
            expected.place(member, lambda state, _: cluster_jobs.undrain(state, member)), once
        )

    async def source_of(self, name: str) -> Source:
        """The script that the job runs. Raises NotFound, also for a job whose script was a path."""
        job = self.state.job(name)
        if not job.source_digest:
            raise NotFound(f"job {name} runs {job.spec.script}, which was not submitted with it")
        found = await self.etcd.get(self.keys.source(job.source_digest))
        if found is None:
            raise NotFound(f"the script of job {name} is gone from etcd")
        return must_read(Source, found.key, found.value)

    async def events_of(self, name: str) -> EventLog:
        """Of a job that nobody leads now. Raises NotFound, PeerError."""
        return await self._resting.of(self.state.job(name))

    async def state_of(self, name: str) -> JobState:
        """Of a job that nobody leads now, as its last term left it. Raises NotFound, PeerError."""
        self.state.job(name)
        found = await self.etcd.get(self.keys.keys_of(name).state)
        return must_read(JobState, found.key, found.value) if found else JobState()

    async def series_of(self, name: str) -> StoredMetrics:
        """Of a job that nobody leads now, from its storage. Raises NotFound; as SeriesReader.read."""
        return await self.series.read(name, self.storage(self.state.job(name).spec).series)

    async def evaluations_of(self, name: str) -> list[Evaluation]:
        """Of a job that nobody leads now, those that were done while it trained, in their order. Raises
        NotFound, PeerError."""
        self.state.job(name)
        keys = self.keys.keys_of(name)
        read = await self.etcd.txn([], [Get(keys.evaluations, prefix=True), Get(keys.evaluation_status)])
        known = read.range(1).first
        settled = must_read(EvaluationStatus, known.key, known.value).settled if known is not None else 0
        found = [must_read(Evaluation, each.key, each.value) for each in read.range(0).kvs]
        return [each for each in found if each.number <= settled]

    async def _begin(
        self,
        kind: OperationKind,
        cause: str,
        decide: Decide[ClusterJob],
        once: Once[Operation] | None,
        most_bytes: int = MAX_BYTES,
    ) -> Operation:
        asked = Operation(
            operation_id=ids.new_id("op"), kind=kind, cause=cause, limit_s=0.0, create_time=clock.timestamp()
        )
        return await self._decide(
            lambda state, now: job_operations.begin(state, asked, decide(state, now)), once, most_bytes
        )

    async def _decide(
        self,
        decision: Callable[[ClusterState, float], ClusterDecision[A]],
        once: Once[A] | None = None,
        most_bytes: int = MAX_BYTES,
    ) -> A:
        term = self.term
        asked = _signed(once.decide(decision) if once is not None else decision)
        answer = await term.writer.decide(asked, most_bytes)
        term.look_again()
        return answer


def _signed(
    decision: Callable[[ClusterState, float], ClusterDecision[A]],
) -> Callable[[ClusterState, float], ClusterDecision[A]]:
    """Its events name the token of the request that this task serves."""
    caller = CALLER.get()
    if caller is None or not caller.token:
        return decision

    def signed(state: ClusterState, now: float) -> ClusterDecision[A]:
        decided = decision(state, now)
        told = tuple(
            Event(each.name, f"{each.message}; asked by {caller}", {**each.fields, "token": caller.token})
            for each in decided.events
        )
        return replace(decided, events=told)

    return signed


#: What a process leads, and REST serves: one job, or those of a cluster.
JobsLed = Master | ClusterMaster
