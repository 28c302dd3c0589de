"""A whole job on this machine: etcd, master(s), parameter servers and trainers as supervised child processes.

    async with LocalCluster(spec, run_dir) as cluster:       starts everything
        state = await cluster.wait()                         COMPLETED or FAILED; a dead child is started again meanwhile
                                                             leaving stops everything: trainers first, etcd last

No child outlives the cluster, however it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from shared import clock
from shared import etcd as etcd_client
from shared.directory import Directory
from shared.errors import DeadlineExceeded, TriremeError
from shared.etcd import Fatal
from shared.etcd.embedded import EmbeddedEtcd
from shared.keys import Keys
from shared.records import JobSpec, JobState, MasterLock, PserverMember, TrainerMember
from trireme.children import TAIL_LINES, Child, Exit, tail_of
from trireme.restarts import RestartPolicy

HOST = "127.0.0.1"
MODULES = {"trainer": "trainer_agent", "pserver": "pserver_service", "master": "master_service"}  # in stopping order
GRACE_S = 5.0
START_TIMEOUT_S = 60.0
REVOKE_TIMEOUT_S = 2.0
FINAL_TIMEOUT_S = 1.0
FOLLOW_S = 5.0


class ClusterError(TriremeError):
    """The cluster cannot go on: a child that ends again and again, or no trainer left. `details`: child, log, tail."""

    code = "CLUSTER_FAILED"


@dataclass(frozen=True, slots=True)
class ChildEvent:
    """`what`: started, died, restarted, finished. `cause`: how it ended."""

    child: str
    what: str
    cause: str = ""
    pid: int = 0


class LocalCluster:
    """`run_dir` gets spec.json, logs/<child>.log and etcd/; `port` is the first master's (0: any free one).

    `on_event` hears of every start and death. Children by name: `trainer-0`, `pserver-0`, `master-0`, `etcd`.
    """

    def __init__(
        self,
        spec: JobSpec,
        run_dir: Path,
        *,
        port: int = 0,
        standbys: int = 0,
        environment: Mapping[str, str] | None = None,
        on_event: Callable[[ChildEvent], None] = lambda _: None,
    ) -> None:
        self.spec = spec
        self.run_dir = run_dir
        self.children: dict[str, Child] = {}
        self.embedded = EmbeddedEtcd(run_dir / "etcd", log_path=run_dir / "logs" / "etcd.log")
        self._port = port
        self._standbys = standbys
        self._extra = dict(environment or {})
        self._on_event = on_event
        self._keys = Keys(spec.job)
        self._stopping = False
        self._opened = contextlib.AsyncExitStack()
        self._tasks = asyncio.TaskGroup()
        self._running: list[asyncio.Task[None]] = []
        self._final: asyncio.Future[JobState]
        self.etcd: etcd_client.Etcd
        self.directory: Directory

    def __repr__(self) -> str:
        alive = sum(child.alive for child in self.children.values())
        return f"<LocalCluster {self.spec.job}: {alive} of {len(self.children)} children alive, {self.embedded!r}>"

    # ------------------------------------------------------------ what tests and the command line ask

    async def wait(self, timeout_s: float | None = None) -> JobState:
        """The job's last state, COMPLETED or FAILED. Raises ClusterError when it can never come, DeadlineExceeded."""
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(self._final)
        except TimeoutError as error:
            msg = f"job {self.spec.job} is not over after {timeout_s:g} s: {self.directory.state!r}"
            raise DeadlineExceeded(msg) from error

    async def master_url(self, timeout_s: float = START_TIMEOUT_S) -> str:
        """Where the leading master's REST is; raises DeadlineExceeded."""
        await self.directory.wait_for(lambda view: view.master is not None, timeout_s, "a master")
        assert self.directory.master is not None
        return self.directory.master.url

    async def add_trainer(self) -> Child:
        return await self._add("trainer")

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal to a child (it will be started again); returns its pid."""
        if name == "etcd":
            self.embedded.send(number)
            return self.embedded.pid or 0
        self.children[name].send(number)
        return self.children[name].pid

    def kill_all(self) -> None:
        """The impatient end: SIGKILL to every child, without a word."""
        self._stopping = True
        for child in self.children.values():
            child.send(signal.SIGKILL)
        self.embedded.send(signal.SIGKILL)

    # ------------------------------------------------------------ children

    def _of(self, role: str) -> list[Child]:
        return [child for child in self.children.values() if child.name.startswith(f"{role}-")]

    async def _add(self, role: str, settings: Mapping[str, str] | None = None) -> Child:
        name = f"{role}-{len(self._of(role))}"
        environment = {key: value for key, value in os.environ.items() if not key.startswith("TRIREME_")}
        environment |= {
            "PYTHONUNBUFFERED": "1",
            "TRIREME_JOB": self.spec.job,
            "TRIREME_ETCD": self.embedded.url,
            "TRIREME_HOST": HOST,
            "TRIREME_NAME": name,
            **self._extra,
            **(settings or {}),
        }
        # -P: the user's working directory must not shadow our packages
        argv = [sys.executable, "-P", "-m", MODULES[role]]
        child = self.children[name] = Child(name, argv, environment, self.run_dir / "logs" / f"{name}.log")
        await child.start()
        self._on_event(ChildEvent(name, "started", pid=child.pid))
        self.accompany(self._supervise(child))
        return child

    async def _supervise(self, child: Child) -> None:
        policy = RestartPolicy()
        while True:
            end = await child.wait()
            if self._stopping:
                return
            if end.code == 0 and await self._is_final():
                self._on_event(ChildEvent(child.name, "finished", pid=end.pid))
                return
            self._on_event(ChildEvent(child.name, "died", str(end), end.pid))
            await self._bury(child, end)
            delay_s = policy.delay_s(end.code, end.lived_s)
            if delay_s is None:
                message = f"{child.name} ended {policy.deaths} times right after its start, the last time with {end}"
                self._fail(child.name, message, child.log, child.tail())
                return
            await asyncio.sleep(delay_s)
            if self._stopping or _is_final(self.directory.state):
                return
            await child.start()
            self._on_event(ChildEvent(child.name, "restarted", str(end), child.pid))

    async def _supervise_etcd(self) -> None:
        policy = RestartPolicy()
        while True:
            since = clock.monotonic()
            pid, code = self.embedded.pid or 0, await self.embedded.wait()
            end = Exit(pid, code or 0, clock.monotonic() - since)
            while not self.embedded.running:
                if self._stopping:
                    return
                self._on_event(ChildEvent("etcd", "died", str(end), end.pid))
                delay_s = policy.delay_s(end.code, end.lived_s)
                if delay_s is None:
                    tail = tail_of(self.embedded.log_path, TAIL_LINES)
                    self._fail(
                        "etcd", f"etcd ended again and again, the last time with {end}", self.embedded.log_path, tail
                    )
                    return
                await asyncio.sleep(delay_s)
                with contextlib.suppress(Fatal):  # told by its next death
                    await self.embedded.start()
            self._on_event(ChildEvent("etcd", "restarted", str(end), self.embedded.pid or 0))

    async def _is_final(self) -> bool:
        """True if the job is over; a trainer may leave a moment before we hear of it."""
        with contextlib.suppress(DeadlineExceeded):
            await self.directory.wait_for(lambda view: _is_final(view.state), FINAL_TIMEOUT_S, "the end of the job")
        return _is_final(self.directory.state)

    def _fail(self, name: str, message: str, log: Path, tail: str) -> None:
        if not self._final.done():
            self._final.set_exception(ClusterError(f"{message}; its log is {log}", child=name, log=str(log), tail=tail))

    async def _bury(self, child: Child, end: Exit) -> None:
        """Revoke the lease of a process that we saw die, so that nobody waits for it to run out.

        The launcher knows the death for sure, hence it needs no master to confirm it by probing.
        """
        try:
            async with asyncio.timeout(REVOKE_TIMEOUT_S):
                for lease in await self._leases_of(child, end.pid):
                    await self.etcd.revoke(lease, timeout_s=REVOKE_TIMEOUT_S)
        except (TriremeError, TimeoutError) as error:  # etcd is away: the lease runs out by itself
            self._on_event(ChildEvent(child.name, "lease_left", f"{type(error).__name__}: {error}", end.pid))

    async def _leases_of(self, child: Child, pid: int) -> list[int]:
        if child.name.startswith("trainer-"):
            found = await self.etcd.range(self._keys.trainers, prefix=True)
            members = [TrainerMember.model_validate_json(item.value) for item in found.kvs]
            return [member.lease for member in members if member.pid == pid]
        if child.name.startswith("pserver-"):
            found = await self.etcd.range(self._keys.pservers, prefix=True)
            pservers = [PserverMember.model_validate_json(item.value) for item in found.kvs]
            return [member.lease for member in pservers if member.pid == pid]
        lock = await self.etcd.get(self._keys.master_lock)
        holder = MasterLock.model_validate_json(lock.value) if lock else None
        return [holder.lease] if holder and holder.master.startswith(f"{child.name}-") else []

    # ------------------------------------------------------------ start and stop

    async def __aenter__(self) -> Self:
        self._final = asyncio.get_running_loop().create_future()
        await self._tasks.__aenter__()
        try:
            await self._start()
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end()

    async def _start(self) -> None:
        self.run_dir.mkdir(parents=True, exist_ok=True)
        (self.run_dir / "logs").mkdir(exist_ok=True)
        (self.run_dir / "spec.json").write_bytes(self.spec.to_bytes())
        self._opened.push_async_callback(self.embedded.stop)
        await self.embedded.start()
        self.etcd = etcd_client.connect([self.embedded.url])
        self._opened.push_async_callback(self.etcd.close)
        self.directory = Directory(self.etcd, self._keys)
        self.accompany(self._supervise_etcd())
        self.accompany(self.directory.run())
        self.accompany(self._follow_state())
        for index in range(1 + self._standbys):
            port = self._port if index == 0 else 0
            await self._add("master", {"TRIREME_PORT": str(port), "TRIREME_SPEC": str(self.run_dir / "spec.json")})
        for _ in range(self.spec.pservers):
            await self._add("pserver")
        for _ in range(self.spec.trainers):
            await self._add("trainer")

    def accompany(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` beside the children until the cluster ends; what it raises comes out of `wait`."""
        self._running.append(self._tasks.create_task(self._guarded(work)))

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001  the caller of wait() hears of it
            if not self._final.done():
                self._final.set_exception(error)

    async def _follow_state(self) -> None:
        revision = 0
        while not _is_final(self.directory.state):
            await self.directory.changed(revision, FOLLOW_S)
            revision = self.directory.revision
        if self.directory.state is not None and not self._final.done():
            self._final.set_result(self.directory.state)

    async def _end(self) -> None:
        """Stop everything; a caller that is cancelled meanwhile waits all the same: no child may be left."""
        ending = self._tasks.create_task(self.stop())
        cancelled: asyncio.CancelledError | None = None
        while not ending.done():
            try:
                await asyncio.shield(ending)
            except asyncio.CancelledError as error:
                cancelled = error
        await self._tasks.__aexit__(None, None, None)
        if cancelled is not None:
            raise cancelled

    async def stop(self) -> None:
        """End all children in order: trainers, parameter servers, masters, etcd. Takes at most GRACE_S for each kind."""
        self._stopping = True
        if not self._final.done() or self._final.exception() is None:  # an exception nobody asked for is no warning
            self._final.cancel()
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running, timeout=GRACE_S)  # nobody starts a child again from here on
        for role in MODULES:
            async with asyncio.TaskGroup() as group:
                for child in self._of(role):
                    group.create_task(child.end(GRACE_S))
        await self._opened.aclose()


def _is_final(state: JobState | None) -> bool:
    return state is not None and state.phase.final
