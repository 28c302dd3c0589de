"""A whole job on this machine: etcd, master(s), parameter servers and trainers as supervised child processes.

    async with LocalCluster(spec, run_dir) as cluster:       starts everything
        state = await cluster.wait()                         COMPLETED or FAILED; dead children are started again meanwhile
                                                             leaving stops everything: trainers first, etcd last

No child outlives the cluster, however it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

from master_service.store.start_again import start_again
from shared import etcd as etcd_client
from shared.errors import DeadlineExceeded, TriremeError
from shared.etcd import Fatal
from shared.etcd.embedded import EmbeddedEtcd
from shared.etcd.reading import must_read
from shared.keys import Keys
from shared.membership.directory import Directory
from shared.records import Dispatch, JobSpec, JobState
from shared.records.checkpoints import CheckpointLatest
from shared.runtime import clock
from shared.runtime.service import READY_FILE
from trireme.launch.child import Child, ClusterError, Exit, tail_of
from trireme.launch.disk_space import DiskFull, etcd_lacks_space, is_full
from trireme.launch.leases import LostLeases, revoke_all_leases, revoke_leases_of
from trireme.launch.processes import PYTHON_MODULE, ForkServer, inherited_environment
from trireme.launch.pserver_count import cores, threads_for
from trireme.launch.restarts import RestartPolicy, death_event
from trireme.launch.run_folder import sockets
from trireme.view.child_events import ChildEvent, EventFile
from trireme.view.client import Client
from trireme.view.job_address import AnyClient, masterless_address
from trireme.view.masterless_client import MasterlessClient

HOST = "127.0.0.1"
# in stopping order: masters stop before parameter servers, or a master would roll the job back
MODULES = {"trainer": "trainer_agent", "master": "master_service", "pserver": "pserver_service"}
MASTERLESS_TRAINER = "trireme.masterless"
GRACE_S = 5.0
PSERVER_GRACE_S = 15.0  # it may be writing its part of a checkpoint
START_TIMEOUT_S = 60.0
FINAL_TIMEOUT_S = 1.0
FOLLOW_S = 5.0
PASSED_ON = ("TRIREME_TRANSPORT",)  # from our own environment; all other settings are in the spec
SPARE_WAIT_S = 365 * 24 * 3600.0  # a parameter server that finds no free index waits as a spare


class LocalCluster:
    """`run_dir` gets spec.json, logs/<child>.log, children.jsonl and etcd/ (an earlier run's etcd data is used again).
    `port`: the first master's (0: any free port). Spare parameter servers are loaded and wait; the first that sees a free index
    takes it. `forks` starts the children (None: the cluster makes its own fork server and ends it).

    `on_event` gets every start and death. Children by name: `trainer-0`, `pserver-0`, `master-0`, `etcd`.
    """

    def __init__(
        self,
        spec: JobSpec,
        run_dir: Path,
        *,
        port: int = 0,
        standbys: int = 0,
        spare_pservers: int = 0,
        environment: Mapping[str, str] | None = None,
        forks: ForkServer | None = None,
        on_event: Callable[[ChildEvent], None] = lambda _: None,
    ) -> None:
        self.spec = spec
        self.run_dir = run_dir
        self.children: dict[str, Child] = {}
        self.embedded = EmbeddedEtcd(run_dir / "etcd", log_path=run_dir / "logs" / "etcd.log")
        self._port = port
        self._standbys = standbys
        self._spare_pservers = spare_pservers
        self._extra = dict(environment or {})
        self._forks = forks or ForkServer()
        self._own_forks = forks is None
        self._on_event = on_event
        self._keys = Keys(spec.job)
        self.lost_leases = LostLeases(spec.lease_ttl_s)
        self._events = EventFile(run_dir)
        self._stopping = self._events_lost = False
        self._opened = contextlib.AsyncExitStack()
        self._tasks = asyncio.TaskGroup()
        self._running: list[asyncio.Task[None]] = []
        self.final: asyncio.Future[JobState]
        self._masterless_client: MasterlessClient | None = None
        self.masterless = spec.dispatch is Dispatch.ETCD
        self.etcd: etcd_client.Etcd
        self.directory: Directory

    def __repr__(self) -> str:
        alive = sum(child.alive for child in self.children.values())
        return f"<LocalCluster {self.spec.job}: {alive} of {len(self.children)} children alive, {self.embedded!r}>"

    # ------------------------------------------------------------ for tests and the command line

    async def wait(self, timeout_s: float | None = None) -> JobState:
        """The job's last state, COMPLETED or FAILED. Raises ClusterError if the job can never end, DeadlineExceeded."""
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(self.final)
        except TimeoutError as error:
            msg = f"job {self.spec.job} is not over after {timeout_s:g} s: {self.directory.state!r}"
            raise DeadlineExceeded(msg) from error

    @property
    def url(self) -> str:
        """The leading master's, "" while there is none; for a masterless job its address in etcd."""
        if self.masterless:
            return masterless_address(self.embedded.url, self.spec.job)
        return self.directory.master.url if self.directory.master else ""

    @asynccontextmanager
    async def client(self, timeout_s: float) -> AsyncIterator[AnyClient]:
        """A client of the leading master, or of etcd in a masterless job. Raises DeadlineExceeded."""
        if self._masterless_client is not None:
            yield self._masterless_client
            return
        async with Client(await self.master_url(timeout_s), timeout_s=timeout_s) as client:
            yield client

    async def master_url(self, timeout_s: float = START_TIMEOUT_S) -> str:
        """Raises DeadlineExceeded if no master leads within `timeout_s`, ClusterError if the job can never end."""
        deadline = clock.monotonic() + timeout_s
        while self.directory.master is None:  # also after the wait: it may be gone again by then
            left_s = deadline - clock.monotonic()
            waiting = asyncio.ensure_future(
                self.directory.wait_for(lambda view: view.master is not None, left_s, "a master")
            )
            try:
                either: list[asyncio.Future[Any]] = [waiting, self.final]
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if self.final.done() and not waiting.done():
                    self.final.result()
                await waiting
            finally:
                waiting.cancel()
        return self.directory.master.url

    async def saved_step(self) -> int | None:
        """Of the newest checkpoint, 0 if only its number in the job is known; None if there is none. Raises PeerError."""
        latest = await self.etcd.get(self._keys.latest)
        if latest is not None:
            return must_read(CheckpointLatest, latest.key, latest.value).step
        return 0 if (await self.etcd.range(self._keys.own_prefix, prefix=True, keys_only=True)).kvs else None

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
        """SIGKILL every child."""
        self._stopping = True
        for child in self.children.values():
            child.send(signal.SIGKILL)
        self.embedded.send(signal.SIGKILL)

    # ------------------------------------------------------------ children

    def _of(self, role: str) -> list[Child]:
        return [child for child in self.children.values() if child.name.startswith(f"{role}-")]

    async def _add(self, role: str, settings: Mapping[str, str] | None = None) -> Child:
        name = f"{role}-{len(self._of(role))}"
        ready = (self.run_dir / "logs" / f"{name}.ready").absolute()
        ready.unlink(missing_ok=True)  # of an earlier run
        variables = inherited_environment() | {
            "TRIREME_JOB": self.spec.job,
            "TRIREME_ETCD": self.embedded.url,
            "TRIREME_HOST": HOST,
            "TRIREME_NAME": name,
            READY_FILE: str(ready),
            "TRIREME_SPEC": str(self.run_dir / "spec.json"),
            **{name: os.environ[name] for name in PASSED_ON if name in os.environ},
            **self._extra,
            **(settings or {}),
        }
        module = MASTERLESS_TRAINER if self.masterless and role == "trainer" else MODULES[role]
        log = self.run_dir / "logs" / f"{name}.log"
        child = self.children[name] = Child(name, [*PYTHON_MODULE, module], variables, log, self._forks.start)
        await child.start()
        self._record(ChildEvent(name, "started", pid=child.pid))
        self.run_beside(self._supervise(child))
        return child

    def _record(self, event: ChildEvent) -> None:
        """Into the run's folder for other commands, and to `on_event`."""
        try:
            self._events.append(event)
        except OSError as error:  # a full disk; it is written once there is room
            if not self._events_lost:
                self._events_lost = True
                self._on_event(ChildEvent("launcher", "unrecorded", str(error)))
        self._on_event(event)

    async def _supervise(self, child: Child) -> None:
        policy = RestartPolicy()
        while True:
            end = await child.wait()
            silent_s = self.lost_leases.ended(end.pid)
            if self._stopping:
                return
            if _is_final(self.directory.state) or (end.code == 0 and await self._is_final()):
                self._record(ChildEvent(child.name, "finished", pid=end.pid))
                return
            delay_s = policy.delay_s(end.code, end.lived_s, was_ready=child.was_ready)
            self._record(death_event(child.name, end, silent_s, given_up=delay_s is None))
            await self._revoke_leases(child, end)
            if delay_s is None:
                when = "right after its start" if child.was_ready else "before it was ready"
                message = f"{child.name} ended {policy.deaths} times {when}, the last time with {end}"
                self._fail(child.name, message, child.log)
                return
            await asyncio.sleep(delay_s)
            if self._stopping or _is_final(self.directory.state):
                return
            await child.start()
            self._record(ChildEvent(child.name, "restarted", str(end), child.pid))

    async def _end_the_silent(self) -> None:
        """Kill children that have lost their lease and do not end by themselves; they are started again as any other."""

        def alive() -> dict[str, int]:
            over = _is_final(self.directory.state)
            return {name: child.pid for name, child in self.children.items() if child.alive and not over}

        await self.lost_leases.follow(self.etcd, self._keys, alive, self.kill)

    async def _supervise_etcd(self) -> None:
        policy = RestartPolicy()
        while True:
            since = clock.monotonic()
            pid, code = self.embedded.pid or 0, await self.embedded.wait()
            end = Exit(pid, code or 0, clock.monotonic() - since)
            while not self.embedded.running:
                if self._stopping:
                    return
                self._record(ChildEvent("etcd", "died", str(end), end.pid))
                # etcd may end of a full disk when there is room again: it notices at the next file of its log
                full = end.code >= 0 and is_full(self.embedded.data_dir)
                delay_s = None if full else policy.delay_s(end.code, end.lived_s)
                if full or (delay_s is None and etcd_lacks_space(self.embedded)):
                    self._end_with(DiskFull.under(self.run_dir, f"etcd ended ({end})"))
                    return
                if delay_s is None:
                    message = f"etcd ended again and again, the last time with {end}"
                    self._fail("etcd", message, self.embedded.log_path)
                    return
                await asyncio.sleep(delay_s)
                with contextlib.suppress(Fatal):  # the next round reports this death
                    await self.embedded.start()
            self._record(ChildEvent("etcd", "restarted", str(end), self.embedded.pid or 0))

    async def _is_final(self) -> bool:
        """Whether the job is over. Waits a moment for the news: a trainer may leave before it arrives here."""
        with contextlib.suppress(DeadlineExceeded):
            await self.directory.wait_for(lambda view: _is_final(view.state), FINAL_TIMEOUT_S, "the end of the job")
        return _is_final(self.directory.state)

    def _fail(self, name: str, message: str, log: Path) -> None:
        details = {"child": name, "log": str(log), "tail": tail_of(log)}
        self._end_with(ClusterError(f"{message}; its log is {log}", **details))

    def _end_with(self, error: Exception) -> None:
        """`wait` raises it, if nothing else has ended the job before."""
        if not self.final.done():
            self.final.set_exception(error)

    async def _revoke_leases(self, child: Child, end: Exit) -> None:
        """Of a child that died, so that no member waits until they expire. The launcher saw the death, so no master needs to
        confirm it by a probe."""
        try:
            await revoke_leases_of(self.etcd, self._keys, child.name, end.pid)
        except (TriremeError, TimeoutError) as error:  # etcd is away: the leases expire by themselves
            self._record(ChildEvent(child.name, "lease_left", f"{type(error).__name__}: {error}", end.pid))

    # ------------------------------------------------------------ start and stop

    async def __aenter__(self) -> Self:
        self.final = asyncio.get_running_loop().create_future()
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
        if self._own_forks:
            self._opened.enter_context(self._forks)
        self._opened.push_async_callback(self.embedded.stop)
        try:
            await self.embedded.start()
        except Fatal as error:
            if etcd_lacks_space(self.embedded):
                raise DiskFull.under(self.run_dir, "etcd cannot start") from error
            raise
        self.etcd = etcd_client.connect([self.embedded.url])
        self._opened.push_async_callback(self.etcd.close)
        await revoke_all_leases(self.etcd, self._keys)
        await start_again(self.etcd, self._keys)
        self._record(ChildEvent("etcd", "started", pid=self.embedded.pid or 0))
        self.directory = Directory(self.etcd, self._keys)
        self.run_beside(self._supervise_etcd())
        self.run_beside(self.directory.run())
        self.run_beside(self._follow_state())
        self.run_beside(self._end_the_silent())
        if self.masterless:
            self._masterless_client = MasterlessClient(self.etcd, self._keys)
            self.run_beside(self._masterless_client.run())
        for index in range(0 if self.masterless else 1 + self._standbys):
            await self._add("master", {"TRIREME_PORT": str(self._port if index == 0 else 0)})
        threads = os.environ.get("TRIREME_THREADS") or str(threads_for(self.spec, cores()))
        uds = str(self._opened.enter_context(sockets(self.run_dir)))
        settings = {"TRIREME_UDS": uds, "TRIREME_THREADS": threads}
        if self._spare_pservers:
            settings["TRIREME_CLAIM_WAIT_S"] = str(SPARE_WAIT_S)
        for _ in range(self.spec.pservers + self._spare_pservers):
            await self._add("pserver", settings)
        for _ in range(self.spec.trainers):
            await self._add("trainer")

    def run_beside(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` until the cluster ends; `wait` raises what it raises."""
        self._running.append(self._tasks.create_task(self._guarded(work)))

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001  wait() raises it
            self._end_with(error)

    async def _follow_state(self) -> None:
        revision = 0
        while not _is_final(self.directory.state):
            await self.directory.changed(revision, FOLLOW_S)
            revision = self.directory.revision
            with contextlib.suppress(OSError):
                self._events.write_waiting()
        if self.directory.state is not None and not self.final.done():
            self.final.set_result(self.directory.state)

    async def _end(self) -> None:
        """Stop everything. A caller that is cancelled meanwhile still waits: no child may be left running."""
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
        """End all children in order: trainers, masters, parameter servers, etcd. Each kind takes at most GRACE_S
        (parameter servers PSERVER_GRACE_S)."""
        self._stopping = True
        if not self.final.done() or self.final.exception() is None:  # reading it prevents a warning about it
            self.final.cancel()
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running, timeout=GRACE_S)  # from here on no child is started again
        for role in MODULES:
            async with asyncio.TaskGroup() as group:
                for child in self._of(role):
                    group.create_task(child.end(PSERVER_GRACE_S if role == "pserver" else GRACE_S))
        await self._opened.aclose()


def _is_final(state: JobState | None) -> bool:
    return state is not None and state.phase.final
