"""One place of a host: the process that runs there, and what it tells of it.

A place runs the process that the leader has assigned to it, or none:

    idle ─ assigned ─► runs ─ killed or failed ─► runs again, after a pause
      ▲                 │ └─ job is over ─► ended      `─ failed again and again ─► trouble
      └── drained ◄─────┴── assigned to another job or epoch, or to none: SIGTERM, SIGKILL after the grace

A place that ended or is in trouble waits for another assignment. A process never serves two jobs, nor two
epochs of one. An attempt of a pre- or post-task is run once: `ended` tells its exit code, and it is the
leader who tries again.

An error that one place meets ends no other: it ends its process, tells its trouble and tries again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
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
from trireme.pool.registration import HostFolder
from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.etcd.errors import UNUSABLE
from trireme_shared.platform.etcd.reading import read_record
from trireme_shared.platform.membership import life_sign
from trireme_shared.platform.runtime import begun, telemetry
from trireme_shared.platform.runtime.clock import event_within
from trireme_shared.platform.runtime.containment import Containment, Failed, Failures
from trireme_shared.platform.runtime.service import READY_FILE
from trireme_shared.protocol.errors import PeerError, TriremeError
from trireme_shared.protocol.keys import ClusterKeys, Keys
from trireme_shared.protocol.records import JobSpec, JobState
from trireme_shared.protocol.records.cluster import Assignment, PoolMember
from trireme_shared.protocol.records.job_choices import RestartPolicy as PolicyKind
from trireme_shared.protocol.records.record import shortened

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
