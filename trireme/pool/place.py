"""One place of a host: it runs the process that the leader has assigned to it, or none. Its keys in the pool, and the host's folder.

    idle ─ assigned ─► runs ─ killed or failed ─► runs again, after a pause
      ▲                 │ └─ job is over ─► ended      `─ failed again and again ─► trouble
      └── drained ◄─────┴── assigned to another job or epoch, or to none: SIGTERM, SIGKILL after the grace

A place that ended or is in trouble waits for another assignment. A process never serves two jobs, nor two epochs of one. An attempt of
a pre- or post-task is run once: `ended` tells its exit code, and it is the leader who tries again.

PlaceKeys keeps the keys of a host's places, `pool/<kind>/<member>`, under one lease and equal to the wanted records:
    claim (create = 0) ─► hold: renew the lease, write what was `set` ─► another agent has a key: lost
                           └─ lease over ─► a new one as soon as etcd answers, and every key is written again
Unlike a member of a job an agent needs no fence: what its children may do is decided by their own keys. So while etcd is silent, or
has lost the lease, nothing is stopped here.

HostFolder is DATA_DIR/{agent.lock, agent.json, logs/<job>/<member>-<epoch>.log, sources/, sockets}. One agent at a time: it holds a
flock while it lives. So whoever gets the lock knows that the agent before is dead, and may revoke the lease that agent.json names
instead of waiting until it runs out.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trireme.launch.processes import (
    PYTHON_MODULE,
    Child,
    Exit,
    RestartPolicy,
    Start,
    death_event,
    revoke_leases_of,
    tail_of,
)
from trireme.launch.run_folder import read_json, write_json
from trireme_shared.platform.etcd import Compare, Etcd, Get, KeyValue, Lease, LeaseLost, OutcomeUnknown, Put
from trireme_shared.platform.etcd.reading import read_record
from trireme_shared.platform.membership import life_sign
from trireme_shared.platform.runtime import begun, clock, ids, telemetry
from trireme_shared.platform.runtime.clock import event_within
from trireme_shared.platform.runtime.service import READY_FILE
from trireme_shared.platform.security import private_files
from trireme_shared.protocol.errors import Conflict, InvalidArgument, PeerError, TriremeError
from trireme_shared.protocol.keys import ClusterKeys, Keys
from trireme_shared.protocol.records import JobSpec, JobState
from trireme_shared.protocol.records.cluster import Assignment, PoolMember
from trireme_shared.protocol.records.job_choices import RestartPolicy as Kind
from trireme_shared.protocol.records.record import shortened

MODULES = {"trainer": "trainer_agent", "pserver": "pserver_service"}
START_AGAIN_S = 3.0  # after a start that the system refused
LOOK_S = 2.0
TROUBLE_CHARACTERS = 1500
TASK_MODULE = "trireme.pool.task_process"
NOT_STARTED, TIMED_OUT = 126, 124  # exit codes of tasks, as a shell and `timeout` give them
OUTPUT_LINES, OUTPUT_CHARACTERS = 200, 3900
IDLE: dict[str, Any] = {"running": "", "epoch": 0, "ended": False, "trouble": ""}
IDLE |= {"task": "", "attempt": 0, "exit_code": None, "output": ""}
LEAVE_S = 5.0  # beyond its own limit
BATCH = 100  # keys of one transaction
PAUSE_S = 0.5
RELEASE_S = 2.0
LOCK, AGENT_FILE = "agent.lock", "agent.json"

log = telemetry.logger("place")


@dataclass(frozen=True, slots=True)
class Host:
    """What the places of a host share. `environment`: of all children; `start`: starts them. `drain_seconds`: for a child to leave."""

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
        return f"<Place {self.member}: {f'{work.job} epoch {work.epoch}, {self.child!r}' if work else 'idle'}>"

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
        while not self._closed or self._assignment is not None:
            self._changed.clear()
            if self._assignment is None:
                self._report(**IDLE)
                await self._changed.wait()
            elif self._assignment.task:
                await self._run_task(self._assignment)
                self.child = None
            else:
                await self._serve(self._assignment)
                self._forget_child()

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
                self._report(trouble=f"{child.name} cannot be started on {self._host.name}: {error}; it is tried again")
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
            delay_s = policy.delay_s(end.code, end.lived_s, was_ready=child.was_ready, at_work=left is not None)
            self.deaths += 1
            cause = death_event(child.name, end, given_up=False, left=left).cause
            log.warning("child_died", member=self.member, job=work.job, pid=end.pid, cause=cause)
            await self._revoke_leases(work.job, end)
            if not policy.starts_again(end.code):
                await self._give_up(
                    f"{child.name} ended on {self._host.name} with {end}, and restart_policy is {policy.when}"
                )
                return
            if delay_s is None:
                when = "right after its start" if child.was_ready else "before it was ready"
                message = (
                    f"{child.name} ended {policy.deaths} times {when} on {self._host.name}, the last time with {end}"
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
            code = end.code
        except TimeoutError:
            await child.end(self._host.grace_s)
            code, trouble = TIMED_OUT, f"it ran over its time limit of {work.limit_s:g} s"
        except OSError as error:
            trouble = f"{child.name} cannot be started on {self._host.name}: {error}"
        log.info("task_ended", member=self.member, job=work.job, task=work.task, code=code, cause=trouble)
        self._report(**told | {"ended": True, "exit_code": code, "trouble": trouble, "output": _output(child.log)})
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
        return Child(work.task, [*PYTHON_MODULE, TASK_MODULE], environment, path, self._host.start, group=True)

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
            found = await self._host.etcd.get(key, timeout_s=LOOK_S)
        except PeerError:
            return False
        state = read_record(JobState, key, found.value) if found is not None else None
        return state is not None and state.phase.final

    async def _restarts_of(self, job: str) -> tuple[Kind, float]:
        """The job's restart_policy and restart_delay_s; the defaults if etcd does not say."""
        key = Keys(job, self._host.keys.root).spec
        with contextlib.suppress(PeerError):
            found = await self._host.etcd.get(key, timeout_s=LOOK_S)
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
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text[-OUTPUT_CHARACTERS:])


def _may_be_a_job(name: str) -> bool:
    """As part of a path."""
    return name.replace("-", "").isalnum() and name.isascii()


class PlaceKeys:
    """`records`: the wanted values by key; their lease is filled in. `on_lease` is called with the id of each new lease."""

    def __init__(
        self,
        etcd: Etcd,
        keys: ClusterKeys,
        members: Iterable[PoolMember],
        ttl_s: float,
        on_lease: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.records = {keys.member(member.kind, member.member): member for member in members}
        self._etcd, self._keys, self._ttl_s, self._on_lease = etcd, keys, ttl_s, on_lease
        self._lease: Lease | None = None
        self._dirty: set[str] = set()
        self._changed = asyncio.Event()
        self._lost = self._released = False

    def __repr__(self) -> str:
        return f"<PlaceKeys: {len(self.records)} places, {self._lease!r}>"

    @property
    def alive(self) -> bool:
        """Whether the keys are there and their lease is not over, by the local clock."""
        return self._lease is not None and self._lease.alive

    async def claim(self, limit_s: float) -> None:
        """Create all keys. Waits for those of an agent whose lease has to run out. Raises Conflict if another agent still has one
        after `limit_s`, PeerError if etcd does not answer for so long."""
        deadline = clock.monotonic() + limit_s
        while True:
            try:
                await self._new_lease()
                taken = await self._write(self.records)
            except (PeerError, LeaseLost) as error:
                log.warning("etcd_away", doing="registering the places", cause=str(error))
                if clock.monotonic() > deadline:
                    raise
                taken = None
            if taken == "":
                return
            if taken is not None and clock.monotonic() > deadline:
                await self.release()
                msg = f"{taken} is another agent's, and was for {limit_s:g} s"
                raise Conflict(msg, hint="give each host a name of its own (TRIREME_NAME)")
            await asyncio.sleep(ids.jitter(PAUSE_S))

    async def hold(self) -> None:
        """Keep the lease and the values; returns when the keys are released, or another agent has one of them."""
        async with asyncio.TaskGroup() as group:
            writing = group.create_task(self._keep_values())
            while not (self._lost or self._released):
                assert self._lease is not None
                await self._lease.keep_alive()
                if not (self._lost or self._released):
                    await self._renew()
            if not self._lost:  # else it releases the other keys and ends
                writing.cancel()

    def set(self, key: str, **fields: Any) -> None:
        """Change a wanted record; `hold` writes it, again while etcd is away. Nothing is written if it is equal."""
        record = self.records[key].model_copy(update=fields)
        if record != self.records[key]:
            self.records[key] = record
            self._dirty.add(key)
            self._changed.set()

    async def release(self) -> None:
        """Give the keys up at once; if etcd is away, their lease runs out by itself."""
        self._released = True
        if self._lease is not None:
            with contextlib.suppress(TriremeError, TimeoutError):
                async with asyncio.timeout(RELEASE_S):
                    await self._lease.revoke()

    # ------------------------------------------------------------ parts

    async def _new_lease(self) -> None:
        """If there is none, or it is over."""
        if self._lease is None or not self._lease.alive:
            self._lease = await self._etcd.grant(self._ttl_s)
            self._on_lease(self._lease.id)

    async def _renew(self) -> None:
        """Wait until etcd gives a new lease; all keys are written again with it."""
        while not self._released:
            try:
                await self._new_lease()
            except (PeerError, LeaseLost) as error:
                log.warning("etcd_away", doing="asking for a new lease", cause=str(error))
                await asyncio.sleep(ids.jitter(PAUSE_S))
                continue
            self._dirty |= self.records.keys()
            self._changed.set()
            return

    async def _keep_values(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            dirty, self._dirty = self._dirty, set()
            try:
                taken = await self._write(dirty)
            except (PeerError, LeaseLost) as error:
                log.warning("etcd_away", doing="writing the places", cause=str(error))
                self._dirty |= dirty
                await asyncio.sleep(ids.jitter(PAUSE_S))
                self._changed.set()
                continue
            if taken:
                log.error("place_lost", key=taken, cause="another agent has registered it")
                self._lost = True
                await self.release()
                return

    async def _write(self, keys: Iterable[str]) -> str:
        """Make etcd's values of these keys equal to the records; the key that another agent has, "": none. Raises PeerError,
        LeaseLost: not all may be written."""
        assert self._lease is not None
        for batch in _batches(sorted(keys)):
            while True:
                self._lease.check()
                found = await self._etcd.txn([], [Get(key) for key in batch])
                held = {key: found.range(place).first for place, key in enumerate(batch)}
                if taken := next((key for key, kv in held.items() if kv is not None and not self._is_mine(kv)), ""):
                    return taken
                # mod, not create: a write whose answer was lost must not arrive late and put an old value back
                proofs = [Compare.mod(key, "==", 0 if kv is None else kv.mod_revision) for key, kv in held.items()]
                with contextlib.suppress(OutcomeUnknown):
                    if (await self._etcd.txn(proofs, [self._put(key) for key in batch])).succeeded:
                        break
                await asyncio.sleep(ids.jitter(PAUSE_S))
        return ""

    def _put(self, key: str) -> Put:
        assert self._lease is not None
        record = self.records[key] = self.records[key].with_fields(lease=self._lease.id)
        return Put(key, record.to_bytes(), self._lease.id)

    def _is_mine(self, found: KeyValue) -> bool:
        record = read_record(PoolMember, found.key, found.value)
        return record is not None and record.incarnation == self.records[found.key].incarnation


def _batches(keys: Sequence[str]) -> Iterator[Sequence[str]]:
    for first in range(0, len(keys), BATCH):
        yield keys[first : first + BATCH]


class HostFolder:
    """Made by `opened_folder`."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.sources = place / "sources"

    def __repr__(self) -> str:
        return f"<HostFolder {self.place}>"

    @property
    def last_lease(self) -> int:
        """Of the agent before; 0: it had none."""
        lease = (read_json(self.place / AGENT_FILE) or {}).get("lease", 0)
        return lease if isinstance(lease, int) else 0

    def note_lease(self, lease: int) -> None:
        """If it cannot be written, the next agent waits until the lease has run out."""
        with contextlib.suppress(OSError):
            write_json(self.place / AGENT_FILE, {"pid": os.getpid(), "lease": lease})

    def log_of(self, job: str, member: str, epoch: int) -> Path:
        return self.place / "logs" / job / f"{member}-{epoch}.log"


@contextlib.contextmanager
def opened_folder(place: Path) -> Iterator[HostFolder]:
    """Raises InvalidArgument if it cannot be written, Conflict if another agent has it."""
    place = place.absolute()
    try:
        private_files.make_folder(place)
        lock = private_files.open_private(place / LOCK, "a")
    except OSError as error:
        msg = f"the data directory {place} cannot be written: {error.strerror}"
        raise InvalidArgument(msg, hint="choose another in TRIREME_DATA_DIR") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = (read_json(place / AGENT_FILE) or {}).get("pid", "unknown")
            msg = f"another host agent (process {owner}) uses {place}"
            raise Conflict(msg, hint="give each agent a TRIREME_DATA_DIR and a TRIREME_NAME of its own") from error
        yield HostFolder(place)
