"""One simulated cluster: etcd, masters, pservers and trainers as processes on the virtual loop, run by the
product's code.

A *node* is a name that the launcher supervises: it starts a process for it, and a new incarnation after a
death.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import signal
from collections.abc import Awaitable, Callable, Coroutine
from functools import lru_cache, partial
from typing import Any

from tests.equipment.cluster.cluster import Cluster
from tests.equipment.cluster.network import STEADY, Conditions, Network
from tests.equipment.cluster.network_ports import SimulatedHandoff, SimulatedMaster
from tests.equipment.queue_violations import violations
from tests.equipment.virtual_loop import Process
from tests.simulation import collective
from tests.simulation.block_versions import versions_apart
from tests.simulation.checked_etcd import CheckedEtcd
from tests.simulation.compute import Trace
from tests.simulation.job_spec import spec_of
from tests.simulation.longer import give_numbers, train_longer
from tests.simulation.memory_storage import MemorySeries, MemoryStorage
from tests.simulation.nodes import Node, described, expected
from tests.simulation.plans import Plan
from tests.simulation.rows import records_of
from trireme.view.masterless_client import MasterlessClient
from trireme_shared.platform.membership.directory import Directory
from trireme_shared.platform.storage import files
from trireme_shared.protocol.errors import TriremeError
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import (
    Dispatch,
    JobState,
    MasterLock,
    Mode,
    Phase,
    PserverMember,
    SlotMap,
    Strategy,
)
from trireme_shared.protocol.records.operations import Operation
from trireme_shared.serving.core.store import Store
from trireme_shared.serving.pserver import Pserver

LEAVE_S = 60.0
UNWINDING_ROUNDS = 8
MASTER_TTL_S = 3.0


@lru_cache(maxsize=64)
def _incarnation(value: bytes) -> str:
    """Of a parameter server's key; asked after every block that is pushed."""
    return PserverMember.model_validate_json(value).incarnation


@lru_cache(maxsize=8)
def _owners(value: bytes) -> tuple[int, ...]:
    return SlotMap.model_validate_json(value).owners


Main = Callable[["SimulatedCluster", Node], Coroutine[Any, Any, int]]
"""What runs in a process; its exit code."""


class SimulatedCluster(Cluster):
    """`mains`: what runs in the processes of each kind."""

    simulated: CheckedEtcd

    def __init__(
        self, plan: Plan, rng: random.Random, mains: dict[str, Main], say: Callable[[str], None]
    ) -> None:
        spec = spec_of(plan)
        self.network = Network(rng)
        super().__init__(
            spec, CheckedEtcd(Keys(spec.job), self.network, self._url_of, self.lowest_version, spec)
        )
        self.plan = plan
        self.rng = rng
        self.trace = Trace()
        self.series = MemorySeries()
        self._mains = mains
        self.nodes: dict[str, Node] = {}
        self.processes: dict[str, Process] = {}
        self._born: dict[str, int] = {}
        self.urls: dict[str, str] = {}
        self.failures: list[str] = []
        self.ended_s, self.ended_callbacks, self.last_fault_s, self.injected = 0.0, 0, 0.0, 0
        self.accepted: list[Operation] = []
        self._launcher = self._process("launcher")
        self._say = say
        self.is_surplus: Callable[[SimulatedCluster, Node, int], bool] = lambda *_: False
        self.every_look: Callable[[SimulatedCluster], None] = lambda _: None
        files.remove_tree(self.spec.storage)

    # ------------------------------------------------------------ processes

    def say(self, text: str) -> None:
        self._say(f"{asyncio.get_running_loop().time():9.3f} {text}")

    def start(self, name: str, kind: str) -> Node:
        """Start a new incarnation of the node of that name."""
        node = self.nodes.setdefault(name, Node(name, kind))
        node.incarnations += 1
        node.started_s, node.due_s = asyncio.get_running_loop().time(), None
        process, node.dispatcher = self._process(name), None
        node.process, node.stopping = process, asyncio.Event()
        node.url = f"http://{process.name.replace('#', '.')}:1"
        self.urls[process.name] = node.url
        self.say(f"start {process.name}")
        process.spawn(self._watched(node, process, self._mains[kind](self, node)))
        return node

    def _process(self, name: str) -> Process:
        """Names are unique."""
        self._born[name] = self._born.get(name, 0) + 1
        process = Process(f"{name}#{self._born[name]}")
        self.processes[process.name] = process
        return process

    async def _watched(self, node: Node, process: Process, main: Coroutine[Any, Any, Any]) -> None:
        """The process itself: however it ends, its connections end too."""
        outcome: int
        try:
            outcome = await main
        # what shared/trireme_shared/platform/runtime/service.py makes of it: exit code 1, or a traceback
        except Exception as error:
            outcome = 1
            self.say(f"{process.name} ends: {described(error)}")
            if not expected(error):
                self.failures.append(f"{process.name} crashed: {described(error)}")
        except asyncio.CancelledError:
            return
        self.say(f"exit {process.name}: {outcome!r}")
        if node.process is not process:  # unwound at the end, long after its death
            return
        node.exits.append(outcome)
        self.end_process(node)
        self._plan_restart(node, outcome)

    def _plan_restart(self, node: Node, code: int) -> None:
        now = asyncio.get_running_loop().time()
        if (code == 0 and not node.stopping.is_set()) or not node.wanted:
            return
        if self.is_surplus(self, node, code):
            node.wanted = False  # the job was resized
            return
        delay_s = node.restarts.delay_s(-signal.SIGTERM if code == 0 else code, now - node.started_s)
        if delay_s is None:
            self.failures.append(
                f"{node.name} ended by itself too often, at last with {code}: the launcher gives up"
            )
        else:
            node.due_s = now + delay_s

    def end_process(self, node: Node) -> None:
        node.process.kill()
        self.network.killed(node.process)
        self.simulated.disconnect(node.process.name)
        self.simulated.forget(node.process.name)

    def kill(self, node: Node) -> None:
        self.say(f"kill {node.process.name}")
        self.end_process(node)

    def connect_pservers(self, member: PserverMember) -> SimulatedHandoff:
        return SimulatedHandoff(self.network, member)

    def master_options(self) -> dict[str, Any]:
        return {
            "ttl_s": MASTER_TTL_S,
            "storage": partial(MemoryStorage, self.plan, self.series),
            "probe": self.network.refuses,
        }

    def _url_of(self, client: str) -> str:
        return self.urls.get(client, client)

    # ------------------------------------------------------------ the launcher

    def open(self) -> None:
        """Start all processes and the launcher's own view of the job."""
        for kind, count in (
            ("master", self.plan.masters),
            ("pserver", self.spec.pservers),
            ("trainer", self.spec.trainers),
        ):
            for number in range(count):
                self.start(f"{kind}-{number}", kind)
        self._directory = Directory(self.etcd_of(self._launcher.name), self.keys)
        self._launcher.spawn(self._directory.run())
        if self.plan.dispatch is Dispatch.ETCD:
            self.spectator = MasterlessClient(
                self.etcd_of(self._launcher.name),
                self.keys,
                storage=partial(MemoryStorage, self.plan, self.series),
            )
            self._launcher.spawn(self.spectator.run())

    async def restart(self, pservers: int, trainers: int, after_s: float) -> None:
        """A machine restarts: all processes die at once, also etcd and the launcher. The same command is
        given again with other numbers of members. Only what etcd and the storage hold is left."""
        self.say(f"kill everything; then {pservers} pservers and {trainers} trainers")
        for node in self.nodes.values():
            self.end_process(node)
        self._launcher.kill()
        self.simulated.disconnect(self._launcher.name)
        if not self.simulated.stopped:
            self.simulated.stop()
        await asyncio.sleep(after_s)
        for node in self.nodes.values():  # a fault may have started a process meanwhile
            self.end_process(node)
        self.nodes = {}
        if self.simulated.stopped:
            self.simulated.start()
        give_numbers(self, pservers, trainers)
        self._launcher = self._process("launcher")
        await train_longer(self)
        self.open()

    async def supervise(self) -> None:
        """Restart processes that ended by themselves, as the launcher would."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(0.25)
            self._check_queues()
            self.every_look(self)
            for node in list(self.nodes.values()):
                due = node.due_s is not None and loop.time() >= node.due_s
                if due and not node.alive and node.wanted and not self.over:
                    self.start(node.name, node.kind)

    @property
    def launcher(self) -> Process:
        """Of the command that was given last."""
        return self._launcher

    def leads(self, node: Node) -> bool:
        lock = self.simulated.value(self.simulated.leader_lock)
        return lock is not None and MasterLock.model_validate_json(lock).url == node.url

    def _check_queues(self) -> None:
        """Each task is in exactly one place."""
        for node in self.nodes.values():
            dispatcher = node.service if node.kind == "master" and self.leads(node) else node.dispatcher
            if dispatcher is not None and node.alive:
                try:
                    queues = dispatcher.job.queues
                except TriremeError:
                    continue
                self.failures += [
                    f"{kind}: {line}" for kind, queue in queues.items() for line in violations(queue)
                ][:3]

    def report_dead(self, name: str) -> None:
        """The launcher saw its child exit and tells the master, once; without a master it revokes the leases
        itself."""

        async def tell() -> None:
            try:
                if self.plan.dispatch is Dispatch.ETCD:
                    await self._revoke_leases_of(url)
                else:
                    await self.call_master(lambda master: master.report_suspect(name))
            except TriremeError as error:
                self.say(f"report about {name} failed: {error}")

        url = self.nodes[name].url
        self._launcher.spawn(tell())

    async def _revoke_leases_of(self, url: str) -> None:
        etcd = self.etcd_of(self._launcher.name)
        found = await etcd.range(self.keys.prefix, prefix=True)
        for lease in sorted({kv.lease for kv in found.kvs if kv.lease and f'"{url}"'.encode() in kv.value}):
            await etcd.revoke(lease)

    async def call_master(self, invoke: Callable[[Any], Awaitable[Any]]) -> Any:
        """Call the master as a client outside the job. Raises TriremeError."""
        return await SimulatedMaster(self.network, self._directory).call(invoke)

    def operation(self, accepted: Operation) -> Operation | None:
        """As etcd has it now."""
        value = self.simulated.value(self.keys.operation(accepted.operation_id))
        return Operation.model_validate_json(value) if value is not None else None

    def set_conditions(self, conditions: Conditions) -> None:
        self.say(f"conditions: {conditions}")
        self.network.conditions = conditions
        self.simulated.delay_s = (conditions.low_s, conditions.high_s)
        self.simulated.unknown_rate = conditions.lose_reply

    def end_faults(self) -> None:
        """End all faults that last."""
        for process in self.processes.values():
            if process.frozen:
                process.thaw()
            self.simulated.mend(process.name)
        self.network.mend_all()
        (self.simulated.start if self.simulated.stopped else self.simulated.thaw)()
        self.set_conditions(STEADY)

    async def wait_for_trainers_to_leave(self) -> None:
        """The job is over: trainers exit by themselves; masters and pservers exit when told."""
        loop = asyncio.get_running_loop()
        limit = loop.time() + LEAVE_S
        while any(node.alive for node in self.nodes.values() if node.kind == "trainer"):
            if loop.time() > limit:
                left = [
                    node.process.name for node in self.nodes.values() if node.kind == "trainer" and node.alive
                ]
                self.failures.append(f"{left} did not leave within {LEAVE_S:g} s after the end of the job")
                return
            await asyncio.sleep(0.25)

    # ------------------------------------------------------------ state

    def stores(self) -> list[tuple[int, Store]]:
        """Of the registered parameter servers that have parameters of the job's timeline, by index."""
        services = [node.service for node in self.nodes.values() if node.kind == "pserver" and node.alive]
        found = {
            pserver.index: pserver.store
            for pserver in services
            if pserver is not None
            and pserver.timeline == self.state.timeline
            and self._is_registered(pserver)
        }
        return [(index, found[index]) for index in sorted(found) if found[index] is not None]

    def lowest_version(self) -> int:
        """Of all blocks there are; 0 without one. Collective: the lowest that a trainer has."""
        if self.plan.strategy is Strategy.COLLECTIVE:
            return collective.lowest_version(self)
        return min(
            (state.version for _, store in self.stores() for state in store.blocks.values()), default=0
        )

    def _is_registered(self, pserver: Pserver) -> bool:
        value = self.simulated.value(self.keys.pserver(pserver.index))
        return value is not None and _incarnation(value) == pserver.incarnation

    def final_parameters(self) -> bytes:
        if self.plan.strategy is Strategy.COLLECTIVE:
            return self.trace.exported[-1] if self.trace.exported else b""
        blocks = {
            number: state
            for index, store in self.stores()
            for number, state in store.blocks.items()
            if self.owner_of(number) == index
        }
        return b"".join(bytes(blocks[number].current.view) for number in sorted(blocks))

    def final_rows(self) -> bytes | None:
        """Of the embedding table. None: an owner of slots has died since."""
        value, stores = self.simulated.value(self.keys.slots), dict(self.stores())
        if value is None or not set(_owners(value)) <= stores.keys():
            return None
        return records_of([store.rows.tables[0] for store in stores.values() if store.rows is not None])

    def final_digest(self) -> str:
        return hashlib.sha256(self.final_parameters()).hexdigest()

    def owner_of(self, block: int) -> int | None:
        """By the slot map that etcd has now."""
        value = self.simulated.value(self.keys.slots)
        owners = _owners(value) if value is not None else ()
        return owners[block % len(owners)] if owners else None

    def check_versions(self) -> None:
        """Block versions differ by at most one, and no block can be changed at two parameter servers, at
        every moment."""
        serving = [
            number for _, store in self.stores() for number, state in store.blocks.items() if not state.frozen
        ]
        if len(serving) > len(set(serving)) and len(self.failures) < 5:
            twice = {number for number in serving if serving.count(number) > 1}
            self.failures.append(f"blocks {sorted(twice)} are served by two parameter servers")
        if self.plan.job.mode is not Mode.SYNC or self.plan.strategy is Strategy.COLLECTIVE:
            return
        if (versions := versions_apart(tuple(self.stores()), self.owner_of)) and len(self.failures) < 5:
            self.failures.append(f"block versions are {versions}: more than one apart")

    def digest(self) -> str:
        """Of the whole history of etcd and the final parameters."""
        history = hashlib.sha256(repr(self.simulated.store.history).encode())
        history.update(self.final_parameters())
        return history.hexdigest()

    def describe(self) -> str:
        """For messages: which processes live, and what the job waits for."""
        nodes = [f"{node.process!r} {node.service!r}" for node in self.nodes.values()]
        return "; ".join([f"{self.state.phase} {self.state.stage}: {self.state.reason}", *nodes])

    @property
    def state(self) -> JobState:
        return self.simulated.state

    @property
    def over(self) -> bool:
        longer = self.spec.epochs != self.plan.job.epochs  # it is to get more epochs
        return self.state.phase is Phase.FAILED or (self.state.phase is Phase.COMPLETED and not longer)

    async def end(self) -> None:
        """Kill all processes, then unwind their coroutines where it can have no effect any more."""
        for process in self.processes.values():
            process.kill()
        self.simulated.stop()
        self.network.close()
        for process in self.processes.values():
            process.dead = process.frozen = False
            process.release()
        for _ in range(UNWINDING_ROUNDS):
            await asyncio.sleep(0)
            left = _others()
            # dropping the first list may end a generator: a task closes it
            if not left and not (left := _others()):
                return
            for task in left:
                task.cancel()
            await asyncio.wait(left, timeout=10.0)
        self.failures.append(f"tasks that resist being cancelled: {left}")


def _others() -> list[asyncio.Task[Any]]:
    return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
