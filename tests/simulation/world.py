"""One simulated cluster: etcd, masters, pservers and trainers as processes on the virtual loop, run by the product's code.

A *seat* is what the launcher supervises: it starts a process in it, and a new incarnation after a death.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import signal
import traceback
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from pserver_service.core.store import Store
from shared.directory import Directory
from shared.errors import TriremeError
from shared.etcd import Etcd
from shared.keys import Keys
from shared.records import JobState, MasterLock, Mode, Phase
from tests.simulation import mains
from tests.simulation.compute import Notes
from tests.simulation.etcd import WitnessedEtcd
from tests.simulation.faults import Plan
from tests.simulation.network import CALM, Network, Weather
from tests.simulation.ports import SimulatedMaster
from tests.simulation.virtual_loop import Process
from trireme.restarts import RestartPolicy

LEAVE_S = 60.0
UNWINDING_ROUNDS = 8


def described(error: BaseException) -> str:
    """With the place where it was raised; groups are unfolded."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(described(inner) for inner in error.exceptions)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else ""
    return f"{error!r}{where}"


def _expected(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(_expected(inner) for inner in error.exceptions)
    return isinstance(error, TriremeError)


@dataclass
class Seat:
    """`service` is what the current process serves: a Master, a Pserver or nothing."""

    name: str
    kind: str
    url: str = ""
    process: Process = field(default_factory=lambda: Process("nobody"))
    service: Any = None
    incarnations: int = 0
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    exits: list[int] = field(default_factory=list)
    restarts: RestartPolicy = field(default_factory=RestartPolicy)
    started_s: float = 0.0
    due_s: float | None = None
    wanted: bool = True

    @property
    def alive(self) -> bool:
        return self.incarnations > 0 and not self.process.dead


class World:
    """`run()` plays the plan to the end of the job."""

    def __init__(self, plan: Plan, rng: random.Random, say: Callable[[str], None] = lambda _: None) -> None:
        self.plan = plan
        self.spec = mains.spec_of(plan)
        self.keys = Keys(self.spec.job)
        self.rng = rng
        self.notes = Notes()
        self.network = Network(rng)
        self.etcd = WitnessedEtcd(self.keys, self.network, self._url_of)
        self.seats: dict[str, Seat] = {}
        self.processes: dict[str, Process] = {}
        self.urls: dict[str, str] = {}
        self.failures: list[str] = []
        self.ended_s, self.ended_callbacks = 0.0, 0
        self.inflicted = 0
        self._launcher = self.processes["launcher"] = Process("launcher")
        self._say = say

    # ------------------------------------------------------------ processes

    def say(self, text: str) -> None:
        self._say(f"{asyncio.get_running_loop().time():9.3f} {text}")

    def start(self, name: str, kind: str) -> Seat:
        """A new incarnation in the seat of that name."""
        seat = self.seats.setdefault(name, Seat(name, kind))
        seat.incarnations += 1
        seat.started_s, seat.due_s = asyncio.get_running_loop().time(), None
        process = Process(f"{name}#{seat.incarnations}")
        seat.process, seat.stopping = process, asyncio.Event()
        seat.url = f"http://{name}.{seat.incarnations}:1"
        self.processes[process.name] = process
        self.urls[process.name] = seat.url
        self.say(f"start {process.name}")
        main: dict[str, Callable[[World, Seat], Coroutine[Any, Any, Any]]] = {
            "master": mains.master,
            "pserver": mains.pserver,
            "trainer": mains.trainer,
        }
        process.spawn(self._watched(seat, process, main[kind](self, seat)))
        return seat

    async def _watched(self, seat: Seat, process: Process, main: Coroutine[Any, Any, Any]) -> None:
        """The process itself: its end, by whatever cause, ends its connections."""
        outcome: int
        try:
            outcome = await main
        except Exception as error:  # what shared/service.py makes of it: exit code 1, or a traceback
            outcome = 1
            self.say(f"{process.name} ends: {described(error)}")
            if not _expected(error):
                self.failures.append(f"{process.name} crashed: {described(error)}")
        except asyncio.CancelledError:
            return
        self.say(f"exit {process.name}: {outcome!r}")
        seat.exits.append(outcome)
        self.bury(seat)
        self._plan_restart(seat, outcome)

    def _plan_restart(self, seat: Seat, code: int) -> None:
        now = asyncio.get_running_loop().time()
        if code == 0 and (seat.kind != "master" or not seat.stopping.is_set()):
            return
        delay_s = seat.restarts.delay_s(-signal.SIGTERM if code == 0 else code, now - seat.started_s)
        if delay_s is None:
            self.failures.append(f"{seat.name} ended by itself too often, at last with {code}: the launcher gives up")
        else:
            seat.due_s = now + delay_s

    def bury(self, seat: Seat) -> None:
        seat.process.kill()
        self.network.killed(seat.process)
        self.etcd.disconnect(seat.process.name)
        self.etcd.forget(seat.process.name)

    def kill(self, seat: Seat) -> None:
        self.say(f"kill {seat.process.name}")
        self.bury(seat)

    def etcd_of(self, process: Process) -> Etcd:
        return Etcd(self.etcd.transport(process.name))

    def _url_of(self, client: str) -> str:
        return self.urls.get(client, client)

    # ------------------------------------------------------------ mains

    # ------------------------------------------------------------ the launcher

    def open(self) -> None:
        """Start everybody and the launcher's own view of the job."""
        plan = self.plan
        for kind, count in (("master", plan.masters), ("pserver", plan.pservers), ("trainer", plan.trainers)):
            for number in range(count):
                self.start(f"{kind}-{number}", kind)
        self._directory = Directory(self.etcd_of(self._launcher), self.keys)
        self._launcher.spawn(self._directory.run())

    async def supervise(self) -> None:
        """Restart what ended by itself, as the launcher would."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(0.25)
            self._check_books()
            for seat in list(self.seats.values()):
                due = seat.due_s is not None and loop.time() >= seat.due_s
                if due and not seat.alive and seat.wanted and not self.over:
                    self.start(seat.name, seat.kind)

    def leads(self, seat: Seat) -> bool:
        lock = self.etcd.value(self.keys.master_lock)
        return lock is not None and MasterLock.model_validate_json(lock).url == seat.url

    def _check_books(self) -> None:
        """Each task is in exactly one place."""
        for seat in self.seats.values():
            if seat.kind == "master" and seat.alive and self.leads(seat):
                try:
                    queues = seat.service.books.queues
                except TriremeError:
                    continue
                self.failures += [f"{kind}: {line}" for kind, queue in queues.items() for line in queue.violations()][
                    :3
                ]

    def report_dead(self, name: str) -> None:
        """The launcher saw its child exit and tells the master, once."""

        async def tell() -> None:
            try:
                await SimulatedMaster(self.network, self._directory).report_suspect(name)
            except TriremeError as error:
                self.say(f"report about {name} failed: {error}")

        self._launcher.spawn(tell())

    def weather(self, weather: Weather) -> None:
        self.say(f"weather: {weather}")
        self.network.weather = weather
        self.etcd.delay_s = (weather.low_s, weather.high_s)
        self.etcd.unknown_rate = weather.lose_reply

    def heal(self) -> None:
        """The end of all faults that last."""
        for process in self.processes.values():
            if process.frozen:
                process.thaw()
            self.etcd.mend(process.name)
        self.network.mend_all()
        if self.etcd.stopped:
            self.etcd.start()
        self.weather(CALM)

    async def linger(self) -> None:
        """The job is over: trainers leave by themselves, masters and pservers when told."""
        loop = asyncio.get_running_loop()
        limit = loop.time() + LEAVE_S
        while any(seat.alive for seat in self.seats.values() if seat.kind == "trainer"):
            if loop.time() > limit:
                left = [seat.process.name for seat in self.seats.values() if seat.kind == "trainer" and seat.alive]
                self.failures.append(f"{left} did not leave within {LEAVE_S:g} s after the end of the job")
                return
            await asyncio.sleep(0.25)

    # ------------------------------------------------------------ state

    def stores(self) -> list[tuple[int, Store]]:
        """Of all parameter servers that are alive and initialised, by index."""
        found = [seat.service for seat in self.seats.values() if seat.kind == "pserver" and seat.service is not None]
        return sorted((pserver.index, pserver.store) for pserver in found if pserver.store is not None)

    def final_parameters(self) -> bytes:
        blocks = {number: state for _, store in self.stores() for number, state in store.blocks.items()}
        return b"".join(bytes(blocks[number].current.view) for number in sorted(blocks))

    def final_digest(self) -> str:
        return hashlib.sha256(self.final_parameters()).hexdigest()

    def check_versions(self) -> None:
        """Block versions differ by at most one, at every moment."""
        if self.plan.job.mode is not Mode.SYNC:
            return
        versions = [state.version for _, store in self.stores() for state in store.blocks.values()]
        if max(versions) - min(versions) > 1 and len(self.failures) < 5:
            self.failures.append(f"block versions are {sorted(versions)}: more than one apart")

    def digest(self) -> str:
        """Of the whole history of etcd and the final parameters."""
        history = hashlib.sha256(repr(self.etcd.store.history).encode())
        history.update(self.final_parameters())
        return history.hexdigest()

    def describe(self) -> str:
        """For people: who is alive and what is waited for."""
        seats = [f"{seat.process!r} {seat.service!r}" for seat in self.seats.values()]
        return "; ".join([f"{self.state.phase} {self.state.stage}: {self.state.reason}", *seats])

    @property
    def state(self) -> JobState:
        return self.etcd.state

    @property
    def over(self) -> bool:
        return self.state.phase in {Phase.COMPLETED, Phase.FAILED}

    async def end(self) -> None:
        """Everybody is dead; then their coroutines are unwound where nothing can be heard of it any more."""
        for process in self.processes.values():
            process.kill()
        self.etcd.stop()
        self.network.close()
        for process in self.processes.values():
            process.dead = process.frozen = False
            process.release()
        for _ in range(UNWINDING_ROUNDS):
            left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            if not left:
                return
            for task in left:
                task.cancel()
            await asyncio.wait(left, timeout=10.0)
        self.failures.append(f"tasks that resist being cancelled: {left}")
