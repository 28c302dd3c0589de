"""One run: a world, its plan's faults, the quiet time after them, and the verdict."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass

from shared.records import Dispatch, Mode
from shared.records.operations import Operation
from tests.equipment import logs
from tests.equipment.cluster.network import CALM
from tests.equipment.virtual_loop import Process, VirtualLoop, run
from tests.simulation import operator_requests as wishes
from tests.simulation.cluster import Seat, World
from tests.simulation.invariants import violations
from tests.simulation.plans import Fault, Kind, Peer, Plan
from tests.simulation.plans import plan as plan_of

MAX_CALLBACKS = 1_500_000


@dataclass
class Outcome:
    """`broken`: promises not kept. `digest`: the whole history, the same for the same seed."""

    plan: Plan
    broken: list[str]
    digest: str
    seconds: float
    callbacks: int
    counts: dict[str, int]
    inflicted: int
    operations: tuple[Operation, ...] = ()

    def __str__(self) -> str:
        mode = self.plan.job.mode.value
        lines = "\n  ".join(self.broken[:12])
        dispatch = f" --dispatch {self.plan.dispatch}" if self.plan.dispatch is not Dispatch.MASTER else ""
        return f"{lines}\nreplay: python -m tests.simulation --mode {mode}{dispatch} --seed {self.plan.seed}"


def play(
    seed: int,
    mode: Mode,
    say: Callable[[str], None] | None = None,
    plan: Plan | None = None,
    dispatch: Dispatch = Dispatch.MASTER,
) -> Outcome:
    """Run one seed. Raises nothing for what goes wrong inside: that is in `broken`."""
    plan, say = plan or plan_of(seed, mode, dispatch), say or logs.nobody
    rng = random.Random(f"play-{mode}-{seed}")
    loop = VirtualLoop(rng, max_seconds=3600.0, max_callbacks=MAX_CALLBACKS)
    world = World(plan, rng, say)
    broken: list[str] = []
    with logs.configured(say):
        try:
            run(loop, _play(world), rng)
        except AssertionError as error:
            broken.append(f"{type(error).__name__}: {error}")
    broken += violations(world)
    broken += [
        f"loop: {context.get('message')}: {context.get('exception') or context.get('task')!r}"
        for context in loop.errors
    ]
    return Outcome(
        plan,
        broken,
        world.digest(),
        world.ended_s,
        world.ended_callbacks,
        world.network.counts,
        world.inflicted,
        tuple(found for found in map(world.operation, world.granted) if found is not None),
    )


async def _play(world: World) -> None:
    plan, loop = world.plan, asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    supervisor = world.processes["supervisor"] = Process("supervisor")
    world.open()
    faults = supervisor.spawn(_faults(world))
    supervisor.spawn(_wishes(world))
    supervisor.spawn(world.supervise())
    try:
        ends = [fault.at_s + (fault.lasts_s or 0.0) for fault in plan.faults]
        last = max([*ends, *(wish.at_s for wish in plan.wishes)], default=0.0)
        while loop.time() < last + plan.bound_s and not world.over:
            await asyncio.sleep(0.25)
        if not faults.done():
            faults.cancel()
        elif not faults.cancelled() and (error := faults.exception()) is not None:
            raise AssertionError(f"the schedule crashed: {error!r}") from error
        world.ended_s, world.ended_callbacks = loop.time(), loop.callbacks
        if not world.over:
            world.failures.append(f"not over {plan.bound_s:.0f} s after the last fault: {world.describe()}")
        else:
            world.heal()
            await world.linger()
            await wishes.settle(world)
            world.failures += wishes.broken(world)
    finally:
        await world.end()


async def _faults(world: World) -> None:
    loop = asyncio.get_running_loop()
    world.weather(world.plan.weather)
    async with asyncio.TaskGroup() as group:
        for fault in world.plan.faults:
            await asyncio.sleep(max(0.0, fault.at_s - loop.time()))
            if world.over:
                break
            world.inflicted += 1
            group.create_task(_inflict(world, fault))
        await asyncio.sleep(max(0.0, world.plan.window_s - loop.time()))
        world.weather(CALM)


async def _wishes(world: World) -> None:
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as group:
        for wish in world.plan.wishes:
            await asyncio.sleep(max(0.0, wish.at_s - loop.time()))
            if world.over:
                break
            group.create_task(wishes.grant(world, wish))


async def _inflict(world: World, fault: Fault) -> None:
    match fault.kind:
        case Kind.JOIN_TRAINER:
            world.start(f"trainer-{sum(seat.kind == 'trainer' for seat in world.seats.values())}", "trainer")
        case Kind.RESTART_ETCD:
            await _restart_etcd(world, fault)
        case Kind.RESTART_ALL:
            if wishes.may_lose_pserver(world):
                pservers, trainers = fault.members
                # independent checkpoints load with as many parameter servers as before
                same = world.spec.pservers if world.plan.independent else pservers
                await world.restart(same, trainers, fault.lasts_s or 0.0)
        case Kind.KILL_TRAINER | Kind.KILL_MASTER:
            if seat := _pick(world, fault):
                await _kill(world, seat, fault)
        case Kind.KILL_TRAINERS:
            async with asyncio.TaskGroup() as group:
                for seat in [seat for seat in world.seats.values() if seat.kind == "trainer" and seat.alive]:
                    group.create_task(_kill(world, seat, fault))
        case Kind.KILL_PSERVER:
            seat = _pick(world, fault)
            empty = seat is not None and (seat.service is None or seat.service.store is None)
            if seat and (empty or wishes.may_lose_pserver(world)):
                await _kill(world, seat, fault)
        case Kind.KILL_EVERYBODY:
            if world.plan.job.mode is Mode.ASYNC and wishes.may_lose_pserver(world):
                async with asyncio.TaskGroup() as group:
                    for seat in [seat for seat in world.seats.values() if seat.alive]:
                        group.create_task(_kill(world, seat, fault))
        case Kind.HAND_OVER:
            if seat := _pick(world, fault):
                world.say(f"terminate {seat.process.name}")
                seat.stopping.set()
        case Kind.FREEZE_TRAINER | Kind.FREEZE_MASTER | Kind.FREEZE_PSERVER:
            if seat := _pick(world, fault):
                await _freeze(world, seat.process, fault.lasts_s or 0.0)
        case Kind.CUT_TRAINER | Kind.CUT_MASTER:
            if seat := _pick(world, fault):
                await _cut(world, seat.process, fault)


def _pick(world: World, fault: Fault) -> Seat | None:
    """Of the masters (without: of the trainers) mostly the one that leads (sweeps)."""
    alive = [seat for seat in world.seats.values() if seat.kind == fault.kind.victim and seat.alive]
    leading = [seat for seat in alive if world.leads(seat)]
    if leading and fault.pick < 0.8:
        return leading[0]
    return alive[int(fault.pick * len(alive))] if alive else None


async def _kill(world: World, seat: Seat, fault: Fault) -> None:
    name = seat.process.name
    seat.wanted = False
    world.kill(seat)
    if fault.noticed:
        world.report_dead(seat.name)
    if fault.lasts_s is not None:
        await asyncio.sleep(fault.lasts_s)
        if seat.process.name == name and world.seats.get(seat.name) is seat:
            seat.wanted = True
            world.start(seat.name, seat.kind)


async def _freeze(world: World, process: Process, seconds: float) -> None:
    if process.frozen:
        return
    world.say(f"freeze {process.name} for {seconds:g} s")
    process.freeze()
    await asyncio.sleep(seconds)
    world.say(f"thaw {process.name}")
    process.thaw()


async def _cut(world: World, process: Process, fault: Fault) -> None:
    others = [
        seat.process
        for seat in world.seats.values()
        if seat.process is not process and (fault.peer is Peer.ALL or f"{seat.kind}s".startswith(fault.peer))
    ]
    world.say(f"cut {process.name} from {fault.peer} for {fault.lasts_s:g} s")
    for other in others:
        world.network.cut(process, other)
    if fault.peer in {Peer.ETCD, Peer.ALL}:
        world.etcd.cut(process.name)
    await asyncio.sleep(fault.lasts_s or 0.0)
    world.say(f"mend {process.name}")
    for other in others:
        world.network.mend(process, other)
    world.etcd.mend(process.name)


async def _restart_etcd(world: World, fault: Fault) -> None:
    if world.etcd.stopped:
        return
    world.say(f"stop etcd for {fault.lasts_s:g} s")
    world.etcd.stop()
    await asyncio.sleep(fault.lasts_s or 0.0)
    if world.etcd.stopped:
        world.say("start etcd")
        world.etcd.start()
