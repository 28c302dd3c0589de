"""One run: a cluster, the faults and requests of its plan, the time after them, and the violations."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from tests.equipment import logs
from tests.equipment.cluster.network import STEADY
from tests.equipment.virtual_loop import Process, VirtualLoop, run
from tests.simulation import drawn, operator_requests
from tests.simulation.cluster import SimulatedCluster
from tests.simulation.invariants import violations
from tests.simulation.member_numbers import MemberNumbers
from tests.simulation.nodes import Node
from tests.simulation.plans import Fault, FaultKind, Peer, Plan, plan_of
from tests.simulation.processes import MAINS
from tests.simulation.resize_kills import kill_in
from trireme_shared.protocol.records import Dispatch, Mode, Strategy
from trireme_shared.protocol.records.job import Losses
from trireme_shared.protocol.records.operations import Operation

MAX_CALLBACKS = 1_500_000


@dataclass
class Outcome:
    """`violations`: rules that were broken. `digest`: the whole history, the same for the same seed.
    `timeline`: 0, or of the last rollback. `started`: processes, again after a death counts."""

    plan: Plan
    violations: list[str]
    digest: str
    seconds: float
    callbacks: int
    counts: dict[str, int]
    injected: int
    timeline: int
    started: int
    operations: tuple[Operation, ...] = ()
    losses: Losses = field(default_factory=Losses)

    def __str__(self) -> str:
        mode = self.plan.job.mode.value
        lines = "\n  ".join(self.violations[:12])
        dispatch = f" --dispatch {self.plan.dispatch}" if self.plan.dispatch is not Dispatch.MASTER else ""
        collective = "--collective --drawn" if self.plan.varied else "--collective"
        collective += " --failures" if self.plan.failing else " --moments" if self.plan.moments else ""
        kind = collective if self.plan.strategy is Strategy.COLLECTIVE else f"--mode {mode}"
        kind += " --restores" if self.plan.restored else ""
        return f"{lines}\nreplay: python -m tests.simulation {kind}{dispatch} --seed {self.plan.seed}"


def simulate(
    seed: int,
    mode: Mode,
    say: Callable[[str], None] | None = None,
    plan: Plan | None = None,
    dispatch: Dispatch = Dispatch.MASTER,
    prepare: Callable[[SimulatedCluster], None] = lambda _: None,
) -> Outcome:
    """Run one seed. Raises nothing for what goes wrong inside: that is in `violations`. `prepare` is called
    before the cluster is opened."""
    plan, say = plan or plan_of(seed, mode, dispatch), say or logs.discard
    rng = random.Random(f"play-{mode}-{seed}")
    loop = VirtualLoop(rng, max_seconds=3600.0, max_callbacks=MAX_CALLBACKS)
    cluster = SimulatedCluster(plan, rng, MAINS, say)
    MemberNumbers().attach(cluster)
    prepare(cluster)
    broken: list[str] = []
    with logs.configured(say):
        try:
            run(loop, _run_plan(cluster), rng)
        except AssertionError as error:
            broken.append(f"{type(error).__name__}: {error}")
    broken += violations(cluster)
    broken += [
        f"loop: {context.get('message')}: {context.get('exception') or context.get('task')!r}"
        for context in loop.errors
    ]
    return Outcome(
        plan,
        broken,
        cluster.digest(),
        cluster.ended_s,
        cluster.ended_callbacks,
        cluster.network.counts,
        cluster.injected,
        cluster.state.timeline,
        sum(node.incarnations for node in cluster.nodes.values()),
        tuple(found for found in map(cluster.operation, cluster.accepted) if found is not None),
        cluster.state.result.losses if cluster.state.result is not None else Losses(),
    )


async def _run_plan(cluster: SimulatedCluster) -> None:
    plan, loop = cluster.plan, asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    supervisor = cluster.processes["supervisor"] = Process("supervisor")
    cluster.open()
    faults = supervisor.spawn(_faults(cluster))
    supervisor.spawn(_send_requests(cluster))
    supervisor.spawn(cluster.supervise())
    for moment in plan.moments:
        supervisor.spawn(drawn.strike(cluster, moment, _inject))
    for kill in plan.kills:
        supervisor.spawn(kill_in(cluster, kill))
    try:
        ends = [fault.at_s + (fault.lasts_s or 0.0) for fault in plan.faults]
        ends += [fault.until_s for fault in plan.storage_faults]
        last = max([*ends, *(request.at_s for request in plan.requests)], default=0.0)
        while loop.time() < max(last, cluster.last_fault_s) + plan.bound_s and not cluster.over:
            await asyncio.sleep(0.25)
        if not faults.done():
            faults.cancel()
        elif not faults.cancelled() and (error := faults.exception()) is not None:
            raise AssertionError(f"the schedule crashed: {error!r}") from error
        cluster.ended_s, cluster.ended_callbacks = loop.time(), loop.callbacks
        if not cluster.over:
            cluster.failures.append(
                f"not over {plan.bound_s:.0f} s after the last fault: {cluster.describe()}"
            )
        else:
            cluster.end_faults()
            await cluster.wait_for_trainers_to_leave()
            await operator_requests.wait_for_operations(cluster)
            cluster.failures += operator_requests.violations(cluster)
    finally:
        await cluster.end()


async def _faults(cluster: SimulatedCluster) -> None:
    loop = asyncio.get_running_loop()
    cluster.set_conditions(cluster.plan.conditions)
    async with asyncio.TaskGroup() as group:
        for fault in cluster.plan.faults:
            await asyncio.sleep(max(0.0, fault.at_s - loop.time()))
            if cluster.over:
                break
            cluster.injected += 1
            group.create_task(_inject(cluster, fault))
        await asyncio.sleep(max(0.0, cluster.plan.window_s - loop.time()))
        cluster.set_conditions(STEADY)


async def _send_requests(cluster: SimulatedCluster) -> None:
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as group:
        for request in cluster.plan.requests:
            await asyncio.sleep(max(0.0, request.at_s - loop.time()))
            if cluster.over:
                break
            group.create_task(operator_requests.send(cluster, request))


async def _inject(cluster: SimulatedCluster, fault: Fault) -> None:
    match fault.kind:
        case FaultKind.JOIN_TRAINER:
            cluster.start(
                f"trainer-{sum(node.kind == 'trainer' for node in cluster.nodes.values())}", "trainer"
            )
        case FaultKind.RESTART_ETCD:
            await _restart_etcd(cluster, fault)
        case FaultKind.SILENCE_ETCD:
            await _silence_etcd(cluster, fault)
        case FaultKind.RESTART_ALL:
            if operator_requests.may_lose_pserver(cluster):
                pservers, trainers = fault.members
                # independent checkpoints load with as many parameter servers as before
                same = cluster.spec.pservers if cluster.plan.independent else pservers
                await cluster.restart(same, trainers, fault.lasts_s or 0.0)
        case FaultKind.KILL_TRAINER | FaultKind.KILL_MASTER:
            if node := _pick(cluster, fault):
                await _kill(cluster, node, fault)
        case FaultKind.KILL_TRAINERS:
            async with asyncio.TaskGroup() as group:
                for node in [
                    node for node in cluster.nodes.values() if node.kind == "trainer" and node.alive
                ]:
                    group.create_task(_kill(cluster, node, fault))
        case FaultKind.TRAINERS_LEAVE:
            await _leave(cluster, ("trainer",), fault.lasts_s or 0.0)
        case FaultKind.PAUSE:
            await operator_requests.save(cluster)
            await _leave(cluster, ("master", "trainer"), fault.lasts_s or 0.0)
        case FaultKind.KILL_PSERVER:
            node = _pick(cluster, fault)
            empty = node is not None and (node.service is None or node.service.store is None)
            if node and (empty or operator_requests.may_lose_pserver(cluster)):
                await _kill(cluster, node, fault)
        case FaultKind.KILL_EVERYBODY:
            if cluster.plan.job.mode is Mode.ASYNC and operator_requests.may_lose_pserver(cluster):
                async with asyncio.TaskGroup() as group:
                    for node in [node for node in cluster.nodes.values() if node.alive]:
                        group.create_task(_kill(cluster, node, fault))
        case FaultKind.HAND_OVER:
            if node := _pick(cluster, fault):
                cluster.say(f"terminate {node.process.name}")
                node.stopping.set()
        case FaultKind.FREEZE_TRAINER | FaultKind.FREEZE_MASTER | FaultKind.FREEZE_PSERVER:
            if node := _pick(cluster, fault):
                await _freeze(cluster, node.process, fault.lasts_s or 0.0)
        case FaultKind.CUT_TRAINER | FaultKind.CUT_MASTER:
            if node := _pick(cluster, fault):
                await _cut(cluster, node.process, fault)


def _pick(cluster: SimulatedCluster, fault: Fault) -> Node | None:
    """Of the masters (without: of the trainers) mostly the one that leads (sweeps)."""
    alive = [node for node in cluster.nodes.values() if node.kind == fault.kind.victim and node.alive]
    leading = [node for node in alive if cluster.leads(node)]
    if leading and fault.pick < 0.8:
        return leading[0]
    return alive[int(fault.pick * len(alive))] if alive else None


async def _kill(cluster: SimulatedCluster, node: Node, fault: Fault) -> None:
    name = node.process.name
    node.wanted = False
    cluster.kill(node)
    if fault.noticed:
        cluster.report_dead(node.name)
    if fault.lasts_s is not None:
        await asyncio.sleep(fault.lasts_s)
        if node.process.name == name and cluster.nodes.get(node.name) is node:
            node.wanted = True
            cluster.start(node.name, node.kind)


async def _leave(cluster: SimulatedCluster, kinds: Collection[str], seconds: float) -> None:
    """All members of these kinds are terminated, and come back after that time."""
    nodes = [node for node in cluster.nodes.values() if node.kind in kinds and node.alive and node.wanted]
    cluster.say(f"terminate {[node.process.name for node in nodes]}")
    for node in nodes:
        node.wanted = False
        node.stopping.set()
    await asyncio.sleep(seconds)
    for node in nodes:
        if cluster.nodes.get(node.name) is node:
            node.wanted = True  # who is still leaving is started again when it has ended
            if not node.alive:
                cluster.start(node.name, node.kind)


async def _freeze(cluster: SimulatedCluster, process: Process, seconds: float) -> None:
    if process.frozen:
        return
    cluster.say(f"freeze {process.name} for {seconds:g} s")
    process.freeze()
    await asyncio.sleep(seconds)
    cluster.say(f"thaw {process.name}")
    process.thaw()


async def _cut(cluster: SimulatedCluster, process: Process, fault: Fault) -> None:
    others = [
        node.process
        for node in cluster.nodes.values()
        if node.process is not process and (fault.peer is Peer.ALL or f"{node.kind}s".startswith(fault.peer))
    ]
    cluster.say(f"cut {process.name} from {fault.peer} for {fault.lasts_s:g} s")
    for other in others:
        cluster.network.cut(process, other)
    if fault.peer in {Peer.ETCD, Peer.ALL}:
        cluster.simulated.cut(process.name)
    await asyncio.sleep(fault.lasts_s or 0.0)
    cluster.say(f"mend {process.name}")
    for other in others:
        cluster.network.mend(process, other)
    cluster.simulated.mend(process.name)


async def _restart_etcd(cluster: SimulatedCluster, fault: Fault) -> None:
    if cluster.simulated.stopped:
        return
    cluster.say(f"stop etcd for {fault.lasts_s:g} s")
    cluster.simulated.stop()
    await asyncio.sleep(fault.lasts_s or 0.0)
    if cluster.simulated.stopped:
        cluster.say("start etcd")
        cluster.simulated.start()


async def _silence_etcd(cluster: SimulatedCluster, fault: Fault) -> None:
    """SIGSTOP, or packets that are dropped: connections stay open, and nothing answers."""
    if cluster.simulated.stopped or cluster.simulated.frozen:
        return
    cluster.say(f"silence etcd for {fault.lasts_s:g} s")
    cluster.simulated.freeze()
    await asyncio.sleep(fault.lasts_s or 0.0)
    if cluster.simulated.frozen:
        cluster.say("etcd answers again")
        cluster.simulated.thaw()
