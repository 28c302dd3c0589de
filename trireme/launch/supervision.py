"""Supervised child processes and an etcd of their own, in one folder: started, started again when they die,
stopped in order.

    async with SomeProcesses(...) as processes:        starts everything
        await processes.final                          what it ends with, or the error because of which it
                                                       never can
                                                       leaving stops everything: role by role, etcd last

No child outlives this, however it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import glob
import json
import os
import signal
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from trireme.launch.bounded_logs import keep_bounded
from trireme.launch.leases import LostLease
from trireme.launch.processes import (
    PYTHON_MODULE,
    Child,
    ClusterError,
    Exit,
    RestartPolicy,
    Start,
    death_event,
    inherited_environment,
    revoke_all_leases,
    tail_of,
)
from trireme.launch.run_folder import DiskFull, EtcdDamaged, etcd_lacks_space, is_full
from trireme.view.child_events import ChildEvent, EventFile
from trireme_shared.platform.etcd import Etcd, Fatal
from trireme_shared.platform.etcd.embedded import EmbeddedEtcd
from trireme_shared.platform.etcd.errors import UNUSABLE, Damaged
from trireme_shared.platform.membership import life_sign
from trireme_shared.platform.membership.etcd_access import EtcdAccess
from trireme_shared.platform.runtime import begun, clock
from trireme_shared.platform.runtime.containment import Containment
from trireme_shared.platform.runtime.service import READY_FILE
from trireme_shared.platform.security import private_files
from trireme_shared.platform.security.tls import VARIABLES
from trireme_shared.platform.security.tokens import Role, TokenFolder
from trireme_shared.protocol.errors import DeadlineExceeded

HOST = "127.0.0.1"
GRACE_S = 5.0
LOOK_S = 0.1
# from our own environment to all processes
PASSED_ON = ("TRIREME_TRANSPORT", "TRIREME_ALLOWED_HOSTS", *VARIABLES)

Ended = TypeVar("Ended")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """What all processes of a run or a cluster have in common, and how many masters there are."""

    #: Of the first master; 0: any free port.
    port: int = 0
    #: Masters beside the first.
    standbys: int = 0
    #: Where members and masters listen.
    host: str = HOST
    #: What they tell others instead of `host`, if it is given.
    advertise: str = ""
    #: An etcd that is there already; None: one of its own is started.
    etcd: EtcdAccess | None = None
    #: Of admins, members and viewers; None: nobody is asked for one.
    tokens: TokenFolder | None = None
    #: Variables for all processes, over the rest.
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def token(self) -> str:
        """An admin's, as it is now. Raises InvalidArgument."""
        return self.tokens.token(Role.ADMIN) if self.tokens is not None else ""


class SupervisedProcesses(ABC, Generic[Ended]):
    """`folder` gets logs/<child>.log, children.jsonl and etcd/ (an earlier start's etcd data is used again).
    `start` starts a child. `on_event` gets every start and death. Children by name: `trainer-0`, `etcd`,
    ..."""

    grace_s: Mapping[str, float]  # by role, in stopping order
    passed_on: Sequence[str] = PASSED_ON
    ends_with: tuple[type[Exception], ...] = UNUSABLE  # errors of what runs beside that nothing survives

    def __init__(
        self,
        folder: Path,
        settings: ClusterSettings,
        start: Start,
        on_event: Callable[[ChildEvent], None] = lambda _: None,
    ) -> None:
        self.folder, self.settings = folder, settings
        self.etcd: Etcd
        self.children: dict[str, Child] = {}
        self.embedded = EmbeddedEtcd(folder / "etcd", log_path=folder / "logs" / "etcd.log")
        self._start_child = start
        self._on_event = on_event
        self._events = EventFile(folder)
        self._numbers: Counter[str] = Counter()  # of the children of each role
        self._removed: set[str] = set()
        self._supervised: set[str] = set()
        self._not_again: set[str] = set()  # children that have ended and are not started again
        self._stopping = self._events_lost = False
        self._contained = Containment(self.ends_with, self._tell_failure)
        self._opened = contextlib.AsyncExitStack()
        self._tasks = asyncio.TaskGroup()
        self._running: list[asyncio.Task[None]] = []
        self.final: asyncio.Future[Ended]

    # ------------------------------------------------------------ what differs

    @property
    @abstractmethod
    def url(self) -> str:
        """Of the leading master; "" while there is none."""

    @property
    @abstractmethod
    def way_without_etcd(self) -> str:
        """What the user can do if the files of our own etcd are damaged."""

    @abstractmethod
    async def _start(self) -> None:
        """Start everything."""

    @abstractmethod
    async def _is_over(self, child: Child, end: Exit) -> bool:
        """Whether a child that ended so is not needed any more."""

    @abstractmethod
    async def _mourn(self, child: Child, end: Exit) -> None:
        """A child is dead: free what it held."""

    @property
    def _all_over(self) -> bool:
        """Whether no child is needed any more."""
        return self.final.done()

    def _lost_lease(self, end: Exit) -> LostLease | None:
        """Of the process that has ended; None: it had not lost it."""
        del end
        return None

    # ------------------------------------------------------------ children

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

    def _of(self, role: str) -> list[Child]:
        return [child for child in self.children.values() if child.name.startswith(f"{role}-")]

    async def _add(self, role: str, module: str, settings: Mapping[str, str]) -> Child:
        """Start a child. `settings`: TRIREME_* variables beside those that all have."""
        name = f"{role}-{self._numbers[role]}"
        self._numbers[role] += 1
        ready = (self.folder / "logs" / f"{name}.ready").absolute()
        journal, life = ready.with_suffix(".begun"), ready.with_suffix(".life")
        for file in (ready, journal, life):
            file.unlink(missing_ok=True)  # of an earlier run
        told = {
            "TRIREME_NAME": name,
            READY_FILE: str(ready),
            begun.FILE: str(journal),
            life_sign.FILE: str(life),
        }
        variables = {
            **inherited_environment(),
            **told,
            **self._common(),
            **settings,
            **self.settings.environment,
        }
        log = self.folder / "logs" / f"{name}.log"
        child = self.children[name] = Child(name, [*PYTHON_MODULE, module], variables, log, self._start_child)
        await child.start()
        self._record(ChildEvent(name, "started", pid=child.pid))
        self._supervise_beside(child)
        return child

    def _supervise_beside(self, child: Child) -> None:
        self.run_beside(partial(self._supervise, child), f"supervising {child.name}")

    def _tell_failure(self, sentence: str) -> None:
        self._record(ChildEvent("launcher", "waiting", sentence))

    def _common(self) -> dict[str, str]:
        """The settings that all processes share."""
        return {
            **self.etcd_access.environment(),
            "TRIREME_HOST": self.settings.host,
            "TRIREME_ADVERTISE": self.settings.advertise,
            **self._token_settings(),
            **{name: os.environ[name] for name in self.passed_on if name in os.environ},
        }

    def _token_settings(self) -> dict[str, str]:
        return self.settings.tokens.environment() if self.settings.tokens is not None else {}

    async def _add_masters(self, settings: Mapping[str, str], *logs: str) -> None:
        """`logs`: patterns of the folders, below this one, where members' logs are. A master that is started
        again listens where it did before."""
        place = self.folder.absolute()
        folders = json.dumps([f"{glob.escape(str(place))}/{pattern}" for pattern in logs])
        for number in range(1 + self.settings.standbys):
            listens = {"TRIREME_PORT": str(self.settings.port if number == 0 else 0)}
            listens["TRIREME_PORT_FILE"] = str(place / "logs" / f"master-{number}.port")
            await self._add("master", "master_service", {**settings, **listens, "TRIREME_LOGS": folders})

    async def publish(self, write: Callable[[str], None]) -> None:
        """Until cancelled: `write(url)` whenever another master leads, so that other commands find it."""
        published = ""
        while True:
            if (url := self.url or published) != published:
                write(url)
                published = url
            await self._news()

    async def _news(self) -> None:
        """Wait until another master may lead."""
        await asyncio.sleep(LOOK_S)

    async def _unless_over(self, waiting: Coroutine[Any, Any, T]) -> T:
        """What `waiting` gives. Raises the error of `final` if that comes first."""
        answer = asyncio.ensure_future(waiting)
        try:
            either: list[asyncio.Future[Any]] = [answer, self.final]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self.final.done() and not answer.done():
                self.final.result()
            return await answer
        finally:
            answer.cancel()

    async def _remove_child(self, name: str, grace_s: float) -> None:
        """It is not needed any more: SIGTERM, SIGKILL after the grace."""
        self._removed.add(name)
        child = self.children[name]
        await child.end(grace_s)
        del self.children[name]

    def _record(self, event: ChildEvent) -> None:
        """Into the folder for other commands, and to `on_event`."""
        try:
            self._events.append(event)
        except OSError as error:  # a full disk; it is written once there is room
            if not self._events_lost:
                self._events_lost = True
                self._on_event(ChildEvent("launcher", "unrecorded", str(error)))
        self._on_event(event)

    def _restarts(self, child: Child) -> RestartPolicy:
        """When that child is started again."""
        del child
        return RestartPolicy()

    def _why_not_without(self, child: Child) -> str:
        """A child has ended and is not started again, as its policy says: why the others cannot go on without
        it, or ""."""
        del child
        return ""

    def _is_unwanted(self, child: Child) -> bool:
        """Whether a child that has ended is not to be started again after all."""
        del child
        return False

    async def _supervise(self, child: Child) -> None:
        self._supervised.add(child.name)
        try:
            await self._until_it_stays_away(child)
        finally:
            self._supervised.discard(child.name)

    async def _until_it_stays_away(self, child: Child) -> None:
        policy = self._restarts(child)
        while True:
            end = await child.wait()
            lost = self._lost_lease(end)
            if self._stopping:
                return
            if child.name in self._removed or await self._is_over(child, end):
                self._record(ChildEvent(child.name, "finished", pid=end.pid))
                return
            if lost is not None and lost.stopped:
                child.pardon()
            left, again = child.left, policy.starts_again(end.code)
            delay_s = policy.delay_after(end, was_ready=child.was_ready, at_work=left is not None)
            gone = str(lost) if lost is not None else ""
            self._record(death_event(child.name, end, gone, given_up=delay_s is None or not again, left=left))
            await self._mourn(child, end)
            if not again:
                self._not_again.add(child.name)
                if why := self._why_not_without(child):
                    self._fail(
                        child.name,
                        f"{child.name} ended ({end}), and restart_policy is {policy.when}: {why}",
                        child.log,
                    )
                return
            if delay_s is None:
                when = "right after its start" if child.was_ready else "before it was ready"
                message = f"{child.name} ended {policy.deaths} times {when}, the last time with {end}"
                self._fail(child.name, message, child.log)
                return
            await asyncio.sleep(delay_s)
            if self._stopping or self._all_over or child.name in self._removed or self._is_unwanted(child):
                return
            await child.start()
            self._record(ChildEvent(child.name, "restarted", str(end), child.pid))

    # ------------------------------------------------------------ etcd

    @property
    def etcd_access(self) -> EtcdAccess:
        """How etcd is reached."""
        if self.settings.etcd is not None:
            return self.settings.etcd
        etcd = self.embedded
        file = str(etcd.password_file) if etcd.user else ""
        return EtcdAccess((etcd.url,), user=etcd.user, password=etcd.password, password_file=file)

    async def _connect(self, prefix: str) -> None:
        """Start etcd, if it is our own, and connect to it. What an earlier start left below `prefix` in our
        own is dead. Raises DiskFull, Fatal, PeerError."""
        if self.settings.etcd is None:
            await self._start_etcd()
        self.etcd = self.etcd_access.connect()
        self._opened.push_async_callback(self.etcd.close)
        # leases in another one are not all of processes that were started here
        if self.settings.etcd is None:
            await revoke_all_leases(self.etcd, prefix)

    async def _start_etcd(self) -> None:
        """Raises DiskFull, Fatal."""
        self._opened.push_async_callback(self.embedded.stop)
        try:
            await self.embedded.start()
        except Fatal as error:
            if etcd_lacks_space(self.embedded):
                raise DiskFull.under(self.folder, "etcd cannot start") from error
            if isinstance(error, Damaged):
                raise self._damaged(error) from error
            raise
        self._record(ChildEvent("etcd", "started", pid=self.embedded.pid or 0))
        self.run_beside(self._supervise_etcd, "supervising etcd")

    def _damaged(self, error: Damaged) -> EtcdDamaged:
        data = self.embedded.data_dir
        msg = f"etcd cannot read its files in {data}, which are damaged: {error.message}"
        return EtcdDamaged(msg, hint=f"{self.way_without_etcd}; {error.hint}", folder=str(data))

    async def _supervise_etcd(self) -> None:
        policy = RestartPolicy()
        while True:
            since, pid = clock.monotonic(), self.embedded.pid or 0
            deleted = await self.embedded.until_end()
            end = Exit(pid, await self.embedded.wait() or 0, clock.monotonic() - since)
            while not self.embedded.running:
                if self._stopping:
                    return
                self._record(ChildEvent("etcd", "died", deleted or str(end), end.pid))
                # etcd may end of a full disk when there is room again: it notices at the next file of its log
                full = end.code >= 0 and is_full(self.embedded.data_dir)
                delay_s = None if full else policy.delay_s(end.code, end.lived_s)
                if full or (delay_s is None and etcd_lacks_space(self.embedded)):
                    self._end_with(DiskFull.under(self.folder, f"etcd ended ({end})"))
                    return
                if delay_s is None:
                    message = f"etcd ended again and again, the last time with {end}"
                    self._fail("etcd", message, self.embedded.log_path, self.embedded.last_words())
                    return
                await asyncio.sleep(delay_s)
                try:
                    await self.embedded.start()
                except Damaged as error:
                    self._end_with(self._damaged(error))
                    return
                except Fatal:  # the next round reports this death
                    pass
            self._record(ChildEvent("etcd", "restarted", str(end), self.embedded.pid or 0))

    # ------------------------------------------------------------ the end

    def _fail(self, name: str, message: str, log: Path, tail: str = "") -> None:
        details = {"child": name, "log": str(log), "tail": tail or tail_of(log)}
        self._end_with(ClusterError(f"{message}; its log is {log}", **details))

    def _end_with(self, error: Exception) -> None:
        """`final` raises it, if nothing else has ended this before."""
        if not self.final.done():
            self.final.set_exception(error)

    async def _until_final(self, timeout_s: float | None, what: Callable[[], str]) -> Ended:
        """Raises DeadlineExceeded, which says `what()`."""
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(self.final)
        except TimeoutError as error:
            raise DeadlineExceeded(what()) from error

    async def __aenter__(self) -> Self:
        self.final = asyncio.get_running_loop().create_future()
        await self._tasks.__aenter__()
        try:
            private_files.make_folder(self.folder)
            private_files.make_folder(self.folder / "logs")
            self.run_beside(partial(keep_bounded, self.folder / "logs"), "keeping logs in bounds")
            await self._start()
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end()

    def run_beside(self, work: Callable[[], Coroutine[Any, Any, None]], what: str) -> None:
        """Run `work` until the end, again after an error; `final` raises errors of `ends_with`. `what`: see
        Containment."""
        self._running.append(self._tasks.create_task(self._guarded(work, what)))

    async def _guarded(self, work: Callable[[], Coroutine[Any, Any, None]], what: str) -> None:
        try:
            await self._contained.keep(work, what)
        except Exception as error:  # noqa: BLE001  `final` raises it
            self._end_with(error)

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
        """End all children, role by role in the order of `grace_s`, and etcd last. Each role takes at most
        its grace."""
        self._stopping = True
        # reading its error prevents a warning about it
        if not self.final.done() or self.final.cancelled() or self.final.exception() is None:
            self.final.cancel()
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running, timeout=GRACE_S)  # from here on no child is started again
        for role, grace_s in self.grace_s.items():
            async with asyncio.TaskGroup() as group:
                for child in self._of(role):
                    group.create_task(child.end(grace_s))
        await self._opened.aclose()
