"""What people and machines ask of a running job: a checkpoint now, the way back to one, a member to leave (SIGTERM).

Drawn beside the faults, from a generator of their own. The promise: the operation is carried out, or says why not; and
whatever is asked, the trained parameters are those of the undisturbed run.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from shared.errors import CallerError, Conflict, NotFound, PeerError
from shared.records import Dispatch, Mode, Stage
from shared.records.checkpoints import CheckpointLatest
from shared.records.operations import Operation, OperationKind, OperationState
from shared.runtime import ids

if TYPE_CHECKING:
    from tests.simulation.cluster import World

LIMIT_S = 60.0
ASKING_S = 20.0
ENDING_S = 30.0


class Want(StrEnum):
    CHECKPOINT = "checkpoint"
    GO_BACK = "go back"
    TRAINER_LEAVES = "trainer leaves"
    PSERVER_LEAVES = "pserver leaves"


@dataclass(frozen=True)
class Wish:
    """`pick` in [0, 1) chooses among the checkpoints or members there are."""

    at_s: float
    want: Want
    pick: float = 0.0

    def __str__(self) -> str:
        return f"{self.at_s:7.3f} wish: {self.want}"


@dataclass(frozen=True)
class Granted:
    """An operation that a master has begun. `version`, `timeline`: the job's when it was asked for."""

    operation: Operation
    version: int
    timeline: int


def wishes_of(seed: int, mode: Mode, window_s: float) -> tuple[Wish, ...]:
    """At most one way back: each is all the work once more."""
    rng = random.Random(f"wishes-{mode}-{seed}")
    count = rng.choice([0, 0, 1, 2, 4])
    wants = [Want.CHECKPOINT, Want.CHECKPOINT, Want.TRAINER_LEAVES, Want.PSERVER_LEAVES]
    found = [Wish(rng.uniform(0.5, window_s), rng.choice(wants), rng.random()) for _ in range(count)]
    if rng.random() < 0.25:
        found.append(Wish(rng.uniform(1.0, window_s), Want.GO_BACK, rng.random()))
    return tuple(sorted(found, key=lambda wish: wish.at_s))


def may_lose_pserver(world: World) -> bool:
    """Whether a parameter server may die: before an asynchronous job's first checkpoint that ends the job, and after
    training independent checkpoints would change what is evaluated."""
    if world.plan.job.mode is Mode.SYNC:
        return True
    if not world.plan.independent:
        return world.etcd.value(world.keys.latest) is not None
    indexes = [index for index, store in world.stores() if store.blocks]
    own = all(world.etcd.value(world.keys.own_checkpoints(index)) for index in indexes)
    return bool(indexes) and own and world.state.stage is Stage.TRAIN


async def grant(world: World, wish: Wish) -> None:
    """Ask for it."""
    world.say(f"wish: {wish.want}")
    match wish.want:
        case Want.TRAINER_LEAVES | Want.PSERVER_LEAVES:
            kind = wish.want.split()[0]
            alive = [seat for seat in world.seats.values() if seat.kind == kind and seat.alive]
            if alive and (kind != "pserver" or may_lose_pserver(world)):
                world.say(f"terminate {alive[int(wish.pick * len(alive))].process.name}")
                alive[int(wish.pick * len(alive))].stopping.set()
        case Want.CHECKPOINT | Want.GO_BACK:
            await _ask(world, wish)


async def _ask(world: World, wish: Wish) -> None:
    """Until a master has taken it; a refusal must name a reason that is true."""
    loop, key = asyncio.get_running_loop(), ids.new_id("wish")
    limit = loop.time() + ASKING_S
    while loop.time() < limit and not world.over:
        value = world.etcd.value(world.keys.latest)
        latest = CheckpointLatest.model_validate_json(value) if value else None
        version = min((state.version for _, store in world.stores() for state in store.blocks.values()), default=0)
        timeline = world.state.timeline
        try:
            if wish.want is Want.CHECKPOINT:
                begun = await _create(world, key)
            elif latest is None:
                await asyncio.sleep(1.0)
                continue
            else:
                begun = await _restore(world, key, latest.kept[int(wish.pick * len(latest.kept))].uuid)
        except (PeerError, TimeoutError):
            await asyncio.sleep(0.5)
            continue
        except (Conflict, NotFound) as error:
            world.say(f"refused: {error}")
            rightly = "about to go back" in error.message or world.plan.independent or world.over
            if isinstance(error, Conflict) and not rightly:
                world.failures.append(f"refused while the job is {world.state.phase}: {error}")
            return
        except CallerError as error:
            world.failures.append(f"{wish}: {error!r}")
            return
        world.say(f"granted: {begun.operation_id} ({begun.reason})")
        world.granted.append(Granted(begun, version, timeline))
        return


async def _create(world: World, key: str) -> Operation:
    if world.plan.dispatch is Dispatch.MASTER:
        return await world.call_master(lambda m: m.reign.operating.create_checkpoint(key, "a wish", LIMIT_S))
    async with asyncio.timeout(ASKING_S):
        return Operation.model_validate(await world.spectator.create_checkpoint(key, cause="a wish", limit_s=LIMIT_S))


async def _restore(world: World, key: str, which: str) -> Operation:
    if world.plan.dispatch is Dispatch.MASTER:
        return await world.call_master(lambda m: m.reign.operating.restore_checkpoint(key, "a wish", which))
    async with asyncio.timeout(ASKING_S):
        return Operation.model_validate(await world.spectator.restore_checkpoint(which, key))


async def settle(world: World) -> None:
    """The job is over: whatever was granted ends, for one reason or another."""
    loop = asyncio.get_running_loop()
    limit = loop.time() + ENDING_S
    while loop.time() < limit and (
        left := [o for o in map(world.operation, world.granted) if o is not None and o.running]
    ):
        if world.plan.dispatch is Dispatch.ETCD:  # nobody sweeps: whoever asks how it ended finds out
            await world.spectator.operation(left[0].operation_id)
        elif not any(seat.alive for seat in world.seats.values() if seat.kind == "master"):
            return
        await asyncio.sleep(0.5)


def broken(world: World) -> list[str]:
    """Operations that did not keep their promise."""
    found: list[str] = []
    led = world.plan.dispatch is Dispatch.ETCD or any(
        seat.alive for seat in world.seats.values() if seat.kind == "master"
    )
    for granted in world.granted:
        operation = world.operation(granted)
        if operation is None:
            found.append(f"{granted.operation.operation_id} is forgotten")
        elif operation.running and led:
            found.append(f"still under way after the end: {operation}")
        elif operation.state is OperationState.FAILED and not operation.reason:
            found.append(f"failed without a reason: {operation}")
        elif operation.state is OperationState.DONE and operation.kind is OperationKind.CREATE_CHECKPOINT:
            found += _too_old(world, granted, operation)
    return found


def _too_old(world: World, granted: Granted, operation: Operation) -> list[str]:
    """A checkpoint on demand is of a version that was not there yet when it was asked for."""
    made = world.etcd.checkpoints_seen.get(operation.checkpoint_id)
    if made is None:
        return [f"{operation} names a checkpoint that was never the latest"]
    comparable = world.plan.job.mode is Mode.SYNC and made.timeline == granted.timeline
    if comparable and made.step < granted.version:
        return [f"{operation} is older than the asking, at version {granted.version}"]
    return []
