"""A host of the pool: registers its places, follows what the leader assigns to them, and runs the processes.

    pool/<kind>/<name>-<kind>-<n>              written here: what the place runs (PlaceKeys in
                                               registration.py)
    pool/<kind>/<name>-<kind>-<n>/assignment   followed here: what it shall run (Place)

A place runs the process that the leader has assigned to it, or none:

    idle ─ assigned ─► runs ─ killed or failed ─► runs again, after a pause
      ▲                 │ └─ job is over ─► ended      `─ failed again and again ─► trouble
      └── drained ◄─────┴── assigned to another job or epoch, or to none: SIGTERM, SIGKILL after the grace

A place that ended or is in trouble waits for another assignment. A process never serves two jobs, nor two
epochs of one. An attempt of a pre- or post-task is run once: `ended` tells its exit code, and it is the
leader who tries again.

All children are forked from one process that has loaded torch, and die with this one, which has not. While
etcd is silent they go on. A child that lives on without its lease for too long is ended, and its place starts
another process: one watch for each job that has children here (trireme/launch/leases.py says what counts).

An error that one place or one job meets ends no other: the place ends its process, tells its trouble and
tries again, and what watches and follows goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from trireme.launch.bounded_logs import HostLogs
from trireme.launch.leases import Vouching
from trireme.launch.processes import (
    PYTHON_MODULE,
    Child,
    Exit,
    ForkServer,
    RestartPolicy,
    Start,
    death_event,
    inherited_environment,
    revoke_leases_of,
    tail_of,
)
from trireme.launch.run_folder import sockets
from trireme.pool.frozen_children import FrozenChildren
from trireme.pool.host_status import HostMetrics, ProcessHealth
from trireme.pool.registration import HostFolder, PlaceKeys, opened_folder
from trireme.pool.settings import Settings, gpus, passed_on
from trireme_shared import __version__
from trireme_shared.platform.etcd import Etcd, KeyValue
from trireme_shared.platform.etcd.errors import UNUSABLE
from trireme_shared.platform.etcd.reading import read_record
from trireme_shared.platform.membership import life_sign
from trireme_shared.platform.membership.status_server import StatusServer
from trireme_shared.platform.runtime import begun, http, ids, service, telemetry
from trireme_shared.platform.runtime.clock import event_within
from trireme_shared.platform.runtime.containment import Containment, Failed, Failures, LongLivedGroup
from trireme_shared.platform.runtime.limits import cores, memory_bytes
from trireme_shared.platform.runtime.service import READY_FILE
from trireme_shared.platform.security.private_files import told_of_sockets
from trireme_shared.protocol.errors import InvalidArgument, PeerError, TriremeError
from trireme_shared.protocol.keys import ClusterKeys, Keys
from trireme_shared.protocol.records import JobSpec, JobState
from trireme_shared.protocol.records.cluster import Assignment, Kind, PoolMember
from trireme_shared.protocol.records.job_choices import RestartPolicy as PolicyKind
from trireme_shared.protocol.records.record import shortened

CLAIM_S = 60.0  # longer than the lease of a dead agent of this name
# in the order in which they leave: trainers make the checkpoint that pservers wait for
KINDS: tuple[Kind, ...] = ("pserver", "trainer")
MODULES = {"trainer": "trainer_agent", "pserver": "pserver_service"}
START_AGAIN_S, MOST_PAUSE_S = 3.0, 60.0  # after a start that the system refused
ASK_S = 2.0
TROUBLE_CHARACTERS = 1500
TASK_MODULE = "trireme.pool.task_process"
LEAVE_S = 5.0  # beyond its own limit
NOT_STARTED, TIMED_OUT = 126, 124  # exit codes of tasks, as a shell and `timeout` give them
OUTPUT_LINES, OUTPUT_CHARACTERS = 200, 3900
IDLE: dict[str, Any] = {"running": "", "epoch": 0, "ended": False, "trouble": ""}
IDLE |= {"task": "", "attempt": 0, "exit_code": None, "output": ""}

log = telemetry.logger("host_agent")


class HostAgent:
    """`run` it once."""

    def __init__(self, settings: Settings, etcd: Etcd) -> None:
        self.settings, self.etcd = settings, etcd
        self.keys = ClusterKeys(settings.root)
        self.places: list[Place] = []
        self.metrics = HostMetrics()
        self.url = ""  # of /healthz, /readyz and /metrics
        self._incarnation = ids.new_id(settings.name)

    def __repr__(self) -> str:
        return f"<HostAgent {self.settings.name}: {len(self.places)} places>"

    async def run(self, stopping: asyncio.Event) -> int:
        """Offer the places until `stopping`, then drain: 0. LEASE_LOST: another agent has taken a place.
        Raises Conflict, InvalidArgument, CallerError, PeerError."""
        settings = self.settings
        async with (
            http.session(tls=settings.tls.client()) as client,
            self._status(client).serving(settings.host, settings.port, settings.tls.server()) as port,
        ):
            self.url = f"{settings.tls.scheme}://{settings.advertised}:{port}"
            return await self._offer(stopping)

    def _status(self, client: aiohttp.ClientSession) -> StatusServer:
        processes = ProcessHealth(lambda: self.places, client)
        return StatusServer(self.settings.access, self.metrics, self.metrics.missing, processes.of_all)

    async def _offer(self, stopping: asyncio.Event) -> int:
        with contextlib.ExitStack() as opens:
            folder = opens.enter_context(opened_folder(self.settings.data_dir))
            forks = opens.enter_context(ForkServer())
            unix = opens.enter_context(sockets(folder.place))
            if told := told_of_sockets():
                log.info("sockets_elsewhere", told=told)
            await self._revoke(folder.last_lease)
            members = [self.member(kind, number) for kind in KINDS for number in range(self._count(kind))]
            if not members:
                raise InvalidArgument(
                    "a host without places is of no use: TRIREME_TRAINERS and TRIREME_PSERVERS are 0"
                )
            keys = PlaceKeys(self.etcd, self.keys, members, self.settings.agent_ttl_s, folder.note_lease)
            host = self._host(folder, forks, f"{unix.path}/")
            self.places = [Place(member, host, self.reporter(keys, member)) for member in members]
            self.metrics.places, self.metrics.members = self.places, keys.records.values()
            await keys.claim(CLAIM_S)
            self.metrics.registration = keys
            log.info(
                "registered",
                host=self.settings.name,
                url=self.url,
                **{kind: self._count(kind) for kind in KINDS},
            )
            service.ready()
            forks.prepare()
            service.settled()
            return await self.serve(host, keys, unix.keep, stopping)

    async def serve(
        self,
        host: Host,
        keys: PlaceKeys,
        keep_sockets: Callable[[], Awaitable[None]],
        stopping: asyncio.Event,
    ) -> int:
        """As `run`, from the registration on."""
        async with LongLivedGroup() as group:
            keep = Containment(UNUSABLE).keep
            parts: dict[str, Callable[[], Awaitable[None]]] = {
                f"following {kind}s": partial(self._follow, kind) for kind in KINDS if self._count(kind)
            }
            parts["watching leases"] = FrozenChildren(host, self.places).run
            parts["keeping sockets"] = keep_sockets
            parts["vouching for children"] = partial(Vouching(host.etcd).run, self._children)
            parts["keeping logs in bounds"] = self._logs(host).run
            beside = [group.create_task(keep(part, what)) for what, part in parts.items()]
            holding = group.create_task(keep(keys.hold, "keeping the places registered"))
            asked = group.create_task(stopping.wait())
            running = [(place.kind, group.create_task(place.run())) for place in self.places]
            await asyncio.wait((holding, asked), return_when=asyncio.FIRST_COMPLETED)
            for kind in KINDS:
                for place in self.places:
                    if place.kind == kind:
                        keys.set(self.keys.member(kind, place.member), draining=True)
                        place.close()
                await asyncio.gather(*(task for each, task in running if each == kind))
            await keys.release()
            for task in (*beside, holding, asked):
                task.cancel()
        return 0 if stopping.is_set() else service.LEASE_LOST

    # ------------------------------------------------------------ parts

    def _children(self) -> dict[str, Child]:
        """Of the members of jobs that run here."""
        children = {place.member: place.child for place in self.places if place.child is not None}
        return {member: child for member, child in children.items() if child.alive}

    def _logs(self, host: Host) -> HostLogs:
        async def exists(job: str) -> bool:
            return bool((await self.etcd.range(self.keys.job(job), count_only=True)).count)

        def written() -> list[Path]:
            return [place.child.log for place in self.places if place.child is not None]

        most = {"log_bytes": self.settings.log_bytes, "logs_bytes": self.settings.logs_bytes}
        return HostLogs(host.folder.logs, exists, written, **most)

    def _count(self, kind: Kind) -> int:
        return self.settings.trainers if kind == "trainer" else self.settings.pservers

    @property
    def _cores(self) -> int:
        return self.settings.cores or cores()

    def member(self, kind: Kind, number: int) -> PoolMember:
        places = self.settings.trainers + self.settings.pservers
        return PoolMember(
            member=f"{self.settings.name}-{kind}-{number}",
            kind=kind,
            host=self.settings.node or socket.gethostname(),
            agent=self.settings.name,
            pid=os.getpid(),
            url=self.url,
            incarnation=self._incarnation,
            cores=max(1, self._cores // places),
            memory_bytes=memory_bytes() // places,
            device="cuda" if kind == "trainer" and gpus() else "cpu",
            trireme_version=__version__,
        )

    def _host(self, folder: HostFolder, forks: ForkServer, uds: str) -> Host:
        places = self.settings.trainers + self.settings.pservers
        environment = {
            **inherited_environment(),
            "TRIREME_UDS": uds,
            "TRIREME_THREADS": str(max(1, self._cores // places)),
            **passed_on(os.environ),
            "TRIREME_DRAIN_SECONDS": str(self.settings.drain_seconds),
            "TRIREME_SOURCES": str(folder.sources),
        }
        return Host(
            self.settings.name,
            self.etcd,
            self.keys,
            folder,
            environment,
            forks.start,
            self.settings.drain_seconds,
        )

    def reporter(self, keys: PlaceKeys, member: PoolMember) -> Callable[..., None]:
        key = self.keys.member(member.kind, member.member)
        return lambda **fields: keys.set(key, **fields)

    async def _revoke(self, lease: int) -> None:
        """Of the agent before, which is dead."""
        if lease:
            with contextlib.suppress(PeerError):
                await self.etcd.revoke(lease)

    async def _follow(self, kind: Kind) -> None:
        """The assignments of the places of that kind."""
        places = {place.member: place for place in self.places if place.kind == kind}
        async for batch in self.etcd.watch(
            self.keys.member(kind, f"{self.settings.name}-{kind}-"), prefix=True
        ):
            if batch.reset:
                self._replace(places, batch.kvs)
            for event in batch.events:
                if (place := self._place_of(places, event.kv.key)) is not None:
                    place.assign(_assignment(event.kv) if event.type == "put" else None)

    def _replace(self, places: dict[str, Place], found: Sequence[KeyValue]) -> None:
        given = {
            place.member: _assignment(kv)
            for kv in found
            if (place := self._place_of(places, kv.key)) is not None
        }
        for member, place in places.items():
            place.assign(given.get(member))

    def _place_of(self, places: dict[str, Place], key: str) -> Place | None:
        """The place that a key is the assignment of."""
        found = self.keys.member_of(key)
        return places.get(found[1]) if found is not None and found[2] else None


def _assignment(kv: KeyValue) -> Assignment | None:
    return read_record(Assignment, kv.key, kv.value)


@dataclass(frozen=True, slots=True)
class Host:
    """What the places of a host share. `environment`: of all children; `start`: starts them. `drain_seconds`:
    for a child to leave."""

    name: str
    etcd: Etcd
    keys: ClusterKeys
    folder: HostFolder
    environment: Mapping[str, str]
    start: Start
    drain_seconds: float

    @property
    def grace_s(self) -> float:
        return self.drain_seconds + LEAVE_S


class Place:
    """`report` is called with the changed fields of the place's PoolMember."""

    def __init__(self, member: PoolMember, host: Host, report: Callable[..., None]) -> None:
        self.member, self.kind = member.member, member.kind
        self.child: Child | None = None
        self.deaths = 0  # of processes of members
        self._incarnation, self._host, self._report = member.incarnation, host, report
        self._assignment: Assignment | None = None
        self._closed = False
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        work = self._assignment
        return (
            f"<Place {self.member}: {f'{work.job} epoch {work.epoch}, {self.child!r}' if work else 'idle'}>"
        )

    @property
    def job(self) -> str:
        """That it is assigned to as a member; "": none."""
        work = self._assignment
        return work.job if work is not None and not work.task else ""

    @property
    def short_name(self) -> str:
        """`trainer-3`: without the host's name."""
        return self.member.removeprefix(f"{self._host.name}-")

    def assign(self, assignment: Assignment | None) -> None:
        """What etcd says now. An assignment of an earlier agent's place counts as none."""
        if assignment is not None and assignment.incarnation not in ("", self._incarnation):
            assignment = None
        if self._closed or _same(assignment, self._assignment):
            return
        self._assignment = assignment
        self._changed.set()

    def close(self) -> None:
        """Drain its process; `run` returns then."""
        self._assignment, self._closed = None, True
        self._changed.set()

    async def run(self) -> None:
        """Until `close`."""
        contained, failures = Containment(UNUSABLE), Failures()
        while not self._closed or self._assignment is not None:
            self._changed.clear()
            done = await contained.once(self._follow_assignment, f"running what {self.member} is assigned")
            if isinstance(done, Failed):
                pause_s = failures.add(START_AGAIN_S, MOST_PAUSE_S)
                await contained.once(partial(self._after, done, pause_s), f"ending what {self.member} ran")

    async def _follow_assignment(self) -> None:
        """Until it is another one."""
        if self._assignment is None:
            self._report(**IDLE)
            await self._changed.wait()
        elif self._assignment.task:
            await self._run_task(self._assignment)
            self.child = None
        else:
            await self._serve(self._assignment)
            self._forget_child()

    async def _after(self, failed: Failed, pause_s: float) -> None:
        """Its process ends, since nobody follows it. An attempt at a task is not run a second time."""
        work, child = self._assignment, self.child
        self._report(trouble=shortened(f"{self._host.name}: {failed.cause}", TROUBLE_CHARACTERS))
        if child is not None:
            await child.end(self._host.grace_s)
            self.child = None
        if work is not None and work.task:
            self._report(ended=True, exit_code=NOT_STARTED)
            await self._changed.wait()
        await event_within(self._changed, pause_s)

    def _forget_child(self) -> None:
        if self.child is not None:
            for name in (READY_FILE, begun.FILE, life_sign.FILE):
                Path(self.child.environment[name]).unlink(missing_ok=True)
        self.child = None

    # ------------------------------------------------------------ one assignment

    async def _serve(self, work: Assignment) -> None:
        """Until the assignment is another one; no process of it is left then."""
        self._report(**IDLE | {"running": work.job, "epoch": work.epoch})
        if not _may_be_a_job(work.job):
            await self._give_up(f"{work.job!r} is no name of a job")
            return
        child, policy = self._child_of(work), RestartPolicy()
        self.child = child
        while not self._changed.is_set():
            try:
                await child.start()
            except OSError as error:
                self._report(
                    trouble=f"{child.name} cannot be started on {self._host.name}: {error}; it is tried again"
                )
                log.warning("start_failed", member=self.member, job=work.job, cause=str(error))
                await event_within(self._changed, START_AGAIN_S)
                continue
            log.info("child_started", member=self.member, job=work.job, epoch=work.epoch, pid=child.pid)
            self._report(trouble="")
            end = await self._end_of(child)
            if end is None:
                log.info("child_drained", member=self.member, job=work.job, pid=child.pid)
                return
            if await self._is_over(work.job):
                log.info("child_ended", member=self.member, job=work.job, pid=end.pid, cause=str(end))
                self._report(ended=True)
                await self._changed.wait()
                return
            policy.when, policy.least_s = await self._restarts_of(work.job)
            left = child.left
            delay_s = policy.delay_after(end, was_ready=child.was_ready, at_work=left is not None)
            self.deaths += 1
            ended = death_event(child.name, end, given_up=False, left=left)
            what = "child_left" if ended.what == "left" else "child_died"
            log.warning(what, member=self.member, job=work.job, pid=end.pid, cause=ended.cause)
            await self._revoke_leases(work.job, end)
            if not policy.starts_again(end.code):
                await self._give_up(
                    f"{child.name} ended on {self._host.name} with {end}, and restart_policy is {policy.when}"
                )
                return
            if delay_s is None:
                when = "right after its start" if child.was_ready else "before it was ready"
                message = (
                    f"{child.name} ended {policy.deaths} times {when} on {self._host.name}, the last "
                    f"time with {end}"
                )
                await self._give_up(f"{message}; the end of its log {child.log}:\n{tail_of(child.log)}")
                return
            await event_within(self._changed, delay_s)

    async def _run_task(self, work: Assignment) -> None:
        """One attempt; until the assignment is another one. Nothing of it is left then."""
        if not _may_be_a_job(work.job) or not _may_be_a_job(work.task):
            await self._give_up(f"{work.job!r} or {work.task!r} is no name")
            return
        told = IDLE | {"running": work.job, "epoch": work.epoch, "task": work.task, "attempt": work.attempt}
        self._report(**told)
        child = self.child = self._task_child(work)
        code, trouble = NOT_STARTED, ""
        try:
            await child.start()
            log.info("task_started", member=self.member, job=work.job, task=work.task, pid=child.pid)
            async with asyncio.timeout(work.limit_s):
                end = await self._end_of(child)
            if end is None:
                return
            code, trouble = end.code, end.out_of_memory
        except TimeoutError:
            await child.end(self._host.grace_s)
            code, trouble = TIMED_OUT, f"it ran over its time limit of {work.limit_s:g} s"
        except OSError as error:
            trouble = f"{child.name} cannot be started on {self._host.name}: {error}"
        log.info("task_ended", member=self.member, job=work.job, task=work.task, code=code, cause=trouble)
        self._report(
            **told | {"ended": True, "exit_code": code, "trouble": trouble, "output": _output(child.log)}
        )
        await self._changed.wait()

    async def _give_up(self, trouble: str) -> None:
        log.error("given_up", member=self.member, cause=trouble)
        self._report(trouble=shortened(trouble, TROUBLE_CHARACTERS))
        await self._changed.wait()

    def _child_of(self, work: Assignment) -> Child:
        path = self._host.folder.log_of(work.job, self.member, work.epoch)
        ready = path.with_suffix(".ready")
        journal, life = path.with_suffix(".begun"), path.with_suffix(".life")
        for file in (ready, journal, life):
            file.unlink(missing_ok=True)  # of an earlier agent
        settings = {
            "TRIREME_JOB": work.job,
            "TRIREME_NAME": self.member,
            READY_FILE: str(ready),
            begun.FILE: str(journal),
            life_sign.FILE: str(life),
        }
        argv = [*PYTHON_MODULE, MODULES[self.kind]]
        return Child(self.short_name, argv, {**self._host.environment, **settings}, path, self._host.start)

    def _task_child(self, work: Assignment) -> Child:
        path = self._host.folder.log_of(work.job, f"{work.task}-{self.member}", work.attempt)
        settings = {
            "TRIREME_JOB": work.job,
            "TRIREME_NAME": self.member,
            "TRIREME_TASK": work.task,
            "TRIREME_ATTEMPT": str(work.attempt),
        }
        environment = {**self._host.environment, **settings}
        return Child(
            work.task, [*PYTHON_MODULE, TASK_MODULE], environment, path, self._host.start, group=True
        )

    async def _end_of(self, child: Child) -> Exit | None:
        """Of the process that runs; None if the assignment has changed, and the process was ended for it."""
        ended, asked = asyncio.ensure_future(child.wait()), asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait((ended, asked), return_when=asyncio.FIRST_COMPLETED)
            if not self._changed.is_set():
                return ended.result()
            await child.end(self._host.grace_s)
            return None
        finally:
            ended.cancel()
            asked.cancel()

    async def _is_over(self, job: str) -> bool:
        """Whether the job is COMPLETED or FAILED; False if etcd does not say."""
        key = Keys(job, self._host.keys.root).state
        try:
            found = await self._host.etcd.get(key, timeout_s=ASK_S)
        except PeerError:
            return False
        state = read_record(JobState, key, found.value) if found is not None else None
        return state is not None and state.phase.final

    async def _restarts_of(self, job: str) -> tuple[PolicyKind, float]:
        """The job's restart_policy and restart_delay_s; the defaults if etcd does not say."""
        key = Keys(job, self._host.keys.root).spec
        with contextlib.suppress(PeerError):
            found = await self._host.etcd.get(key, timeout_s=ASK_S)
            spec = read_record(JobSpec, key, found.value) if found is not None else None
            if spec is not None:
                return spec.restart_policy, spec.restart_delay_s
        return "always", 0.0

    async def _revoke_leases(self, job: str, end: Exit) -> None:
        """So that no member waits until they have run out."""
        keys = Keys(job, self._host.keys.root)
        with contextlib.suppress(TriremeError, TimeoutError):  # etcd is away: they run out by themselves
            await revoke_leases_of(self._host.etcd, keys, self.short_name, end.pid, f"{self.member}-")


def _same(one: Assignment | None, other: Assignment | None) -> bool:
    if one is None or other is None:
        return one is other
    return (one.job, one.epoch, one.task, one.attempt) == (other.job, other.epoch, other.task, other.attempt)


def _output(log_file: Path) -> str:
    """The end of a task's output; what does not belong into a text is replaced."""
    text = tail_of(log_file, OUTPUT_LINES)
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text[-OUTPUT_CHARACTERS:]
    )


def _may_be_a_job(name: str) -> bool:
    """As part of a path."""
    return name.replace("-", "").isalnum() and name.isascii()
