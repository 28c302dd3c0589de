"""One simulated cluster: etcd, masters, pservers and trainers as processes on the virtual loop, run by the product's code.

A *seat* is what the launcher supervises: it starts a process in it, and a new incarnation after a death.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import signal
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from master_service.masterless.dispatcher import Dispatcher
from pserver_service.core.store import Store
from pserver_service.pserver import Pserver
from shared.errors import TriremeError
from shared.etcd import Etcd
from shared.keys import Keys
from shared.membership.directory import Directory
from shared.records import Dispatch, JobState, MasterLock, Mode, Phase, PserverMember
from shared.records.operations import Operation
from shared.storage import files
from tests.equipment.cluster.network import CALM, Network, Weather
from tests.equipment.cluster.network_ports import SimulatedMaster
from tests.equipment.virtual_loop import Process
from tests.simulation import processes as mains
from tests.simulation.checked_etcd import WitnessedEtcd
from tests.simulation.compute import Notes
from tests.simulation.operator_requests import Granted
from tests.simulation.plans import Plan
from trireme.launch.restarts import RestartPolicy

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
    """`service` is what the current process serves: a Master, a Pserver or nothing; a masterless trainer has a dispatcher."""

    name: str
    kind: str
    url: str = ""
    process: Process = field(default_factory=lambda: Process("nobody"))
    service: Any = None
    dispatcher: Dispatcher | None = None
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
        self.etcd = WitnessedEtcd(self.keys, self.network, self._url_of, self.spec)
        self.seats: dict[str, Seat] = {}
        self.processes: dict[str, Process] = {}
        self._born: dict[str, int] = {}
        self.urls: dict[str, str] = {}
        self.failures: list[str] = []
        self.ended_s, self.ended_callbacks = 0.0, 0
        self.inflicted = 0
        self.granted: list[Granted] = []
        self._launcher = self._process("launcher")
        self._say = say
        files.remove_tree(self.spec.storage)

    # ------------------------------------------------------------ processes

    def say(self, text: str) -> None:
        self._say(f"{asyncio.get_running_loop().time():9.3f} {text}")

    def start(self, name: str, kind: str) -> Seat:
        """A new incarnation in the seat of that name."""
        seat = self.seats.setdefault(name, Seat(name, kind))
        seat.incarnations += 1
        seat.started_s, seat.due_s = asyncio.get_running_loop().time(), None
        process, seat.dispatcher = self._process(name), None
        seat.process, seat.stopping = process, asyncio.Event()
        seat.url = f"http://{process.name.replace('#', '.')}:1"
        self.urls[process.name] = seat.url
        self.say(f"start {process.name}")
        main: dict[str, Callable[[World, Seat], Coroutine[Any, Any, Any]]] = {
            "master": mains.master,
            "pserver": mains.pserver,
            "trainer": mains.trainer,
        }
        process.spawn(self._watched(seat, process, main[kind](self, seat)))
        return seat

    def _process(self, name: str) -> Process:
        """No two have one name."""
        self._born[name] = self._born.get(name, 0) + 1
        process = Process(f"{name}#{self._born[name]}")
        self.processes[process.name] = process
        return process

    async def _watched(self, seat: Seat, process: Process, main: Coroutine[Any, Any, Any]) -> None:
        """The process itself: its end, by whatever cause, ends its connections."""
        outcome: int
        try:
            outcome = await main
        except Exception as error:  # what shared/runtime/service.py makes of it: exit code 1, or a traceback
            outcome = 1
            self.say(f"{process.name} ends: {described(error)}")
            if not _expected(error):
                self.failures.append(f"{process.name} crashed: {described(error)}")
        except asyncio.CancelledError:
            return
        self.say(f"exit {process.name}: {outcome!r}")
        if seat.process is not process:  # unwound at the end, long after its death
            return
        seat.exits.append(outcome)
        self.bury(seat)
        self._plan_restart(seat, outcome)

    def _plan_restart(self, seat: Seat, code: int) -> None:
        now = asyncio.get_running_loop().time()
        if code == 0 and not seat.stopping.is_set():
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
        for kind, count in (
            ("master", self.plan.masters),
            ("pserver", self.spec.pservers),
            ("trainer", self.spec.trainers),
        ):
            for number in range(count):
                self.start(f"{kind}-{number}", kind)
        self._directory = Directory(self.etcd_of(self._launcher), self.keys)
        self._launcher.spawn(self._directory.run())
        if self.plan.dispatch is Dispatch.ETCD:
            self.spectator = mains.spectator(self, self.etcd_of(self._launcher))
            self._launcher.spawn(self.spectator.run())

    async def restart(self, pservers: int, trainers: int, after_s: float) -> None:
        """A machine restarts: everybody dies at once, etcd and the launcher too, and the same command is given again with
        other numbers of members. What is left is what etcd and the storage hold."""
        self.say(f"kill everything; then {pservers} pservers and {trainers} trainers")
        for seat in self.seats.values():
            self.bury(seat)
        self._launcher.kill()
        self.etcd.disconnect(self._launcher.name)
        if not self.etcd.stopped:
            self.etcd.stop()
        await asyncio.sleep(after_s)
        for seat in self.seats.values():  # a fault may have started somebody meanwhile
            self.bury(seat)
        self.seats = {}
        if self.etcd.stopped:
            self.etcd.start()
        self.spec = self.spec.model_copy(update={"pservers": pservers, "trainers": trainers})
        self._launcher = self._process("launcher")
        self.open()

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
        lock = self.etcd.value(self.etcd.office)
        return lock is not None and MasterLock.model_validate_json(lock).url == seat.url

    def _check_books(self) -> None:
        """Each task is in exactly one place."""
        for seat in self.seats.values():
            desk = seat.service if seat.kind == "master" and self.leads(seat) else seat.dispatcher
            if desk is not None and seat.alive:
                try:
                    queues = desk.job.queues
                except TriremeError:
                    continue
                self.failures += [f"{kind}: {line}" for kind, queue in queues.items() for line in queue.violations()][
                    :3
                ]

    def report_dead(self, name: str) -> None:
        """The launcher saw its child exit and tells the master, once; without a master it revokes the leases itself."""

        async def tell() -> None:
            try:
                if self.plan.dispatch is Dispatch.ETCD:
                    await self._revoke_leases_of(url)
                else:
                    await self.call_master(lambda master: master.report_suspect(name))
            except TriremeError as error:
                self.say(f"report about {name} failed: {error}")

        url = self.seats[name].url
        self._launcher.spawn(tell())

    async def _revoke_leases_of(self, url: str) -> None:
        etcd = self.etcd_of(self._launcher)
        found = await etcd.range(self.keys.prefix, prefix=True)
        for lease in sorted({kv.lease for kv in found.kvs if kv.lease and f'"{url}"'.encode() in kv.value}):
            await etcd.revoke(lease)

    async def call_master(self, invoke: Callable[[Any], Awaitable[Any]]) -> Any:
        """As somebody outside. Raises TriremeError."""
        return await SimulatedMaster(self.network, self._directory).call(invoke)

    def operation(self, granted: Granted) -> Operation | None:
        """As etcd has it now."""
        value = self.etcd.value(self.keys.operation(granted.operation.operation_id))
        return Operation.model_validate_json(value) if value is not None else None

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
        """Of the registered parameter servers that have parameters of the job's timeline, by index."""
        services = [seat.service for seat in self.seats.values() if seat.kind == "pserver" and seat.alive]
        found = {
            pserver.index: pserver.store
            for pserver in services
            if pserver is not None and pserver.timeline == self.state.timeline and self._is_registered(pserver)
        }
        return [(index, found[index]) for index in sorted(found) if found[index] is not None]

    def _is_registered(self, pserver: Pserver) -> bool:
        kv = self.etcd.value(self.keys.pserver(pserver.index))
        return kv is not None and PserverMember.model_validate_json(kv).incarnation == pserver.incarnation

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
        if versions and max(versions) - min(versions) > 1 and len(self.failures) < 5:
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
            await asyncio.sleep(0)
            left = _others()
            if not left and not (
                left := _others()
            ):  # dropping the first list may end a generator, which a task then closes
                return
            for task in left:
                task.cancel()
            await asyncio.wait(left, timeout=10.0)
        self.failures.append(f"tasks that resist being cancelled: {left}")


def _others() -> list[asyncio.Task[Any]]:
    return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
