"""What operators ask of a running job: a checkpoint now, a restore of one, a member to leave (SIGTERM).

The rule checked: an operation is carried out or says why not, and the trained parameters are those of the
undisturbed run.
"""

from __future__ import annotations

import asyncio

from master_service.leadership.master import Master
from tests.simulation.cluster import SimulatedCluster
from tests.simulation.plans import OperatorRequest, RequestKind
from trireme_shared.platform.runtime import ids
from trireme_shared.protocol.errors import CallerError, Conflict, NotFound, PeerError, TriremeError
from trireme_shared.protocol.records import Dispatch, Stage
from trireme_shared.protocol.records.checkpoints import CheckpointLatest
from trireme_shared.protocol.records.operations import Operation, OperationKind, OperationState, Strategy

LIMIT_S = 60.0
SAVE_S = 30.0
SEND_LIMIT_S = 20.0
END_LIMIT_S = 30.0
RESIZE_LIMIT_S = 60.0


def may_lose_pserver(cluster: SimulatedCluster) -> bool:
    """Whether a parameter server may die. With independent checkpoints, before each has its first one that
    ends the job, and after training it would change what is evaluated."""
    if not cluster.plan.independent:
        return True
    indexes = [index for index, store in cluster.stores() if store.blocks]
    own = all(cluster.simulated.value(cluster.keys.own_checkpoints(index)) for index in indexes)
    return bool(indexes) and own and cluster.state.stage is Stage.TRAIN


async def send(cluster: SimulatedCluster, request: OperatorRequest) -> None:
    """Send it to the job."""
    cluster.say(f"request: {request.kind}")
    match request.kind:
        case RequestKind.TRAINER_LEAVES | RequestKind.PSERVER_LEAVES:
            kind = request.kind.split()[0]
            alive = [node for node in cluster.nodes.values() if node.kind == kind and node.alive]
            if alive and (kind != "pserver" or may_lose_pserver(cluster)):
                cluster.say(f"terminate {alive[int(request.pick * len(alive))].process.name}")
                alive[int(request.pick * len(alive))].stopping.set()
        case RequestKind.CHECKPOINT | RequestKind.RESTORE | RequestKind.RESIZE:
            await _ask(cluster, request)


async def _ask(cluster: SimulatedCluster, request: OperatorRequest) -> None:
    """Repeat until a master has accepted it. A refusal must have a true reason."""
    loop, key = asyncio.get_running_loop(), ids.new_id("request")
    limit, which = loop.time() + SEND_LIMIT_S, ""
    while loop.time() < limit and not cluster.over:
        value = cluster.simulated.value(cluster.keys.latest)
        latest = CheckpointLatest.model_validate_json(value) if value else None
        try:
            if request.kind is RequestKind.CHECKPOINT:
                begun = await _create(cluster, key)
            elif request.kind is RequestKind.RESIZE:
                begun = await _resize(cluster, key, request)
            elif latest is None:
                await asyncio.sleep(1.0)
                continue
            else:
                which = which or latest.kept[int(request.pick * len(latest.kept))].uuid
                begun = await _restore(cluster, key, which)
        except (PeerError, TimeoutError):
            await asyncio.sleep(0.5)
            continue
        except (Conflict, NotFound) as error:
            cluster.say(f"refused: {error}")
            known = ("about to go back", "being resized already")
            if request.kind is RequestKind.RESIZE and not request.members[0]:
                known += (
                    "this Idempotency-Key asked for",
                )  # the job got parameter servers between two attempts: see _resize
            rightly = (
                any(text in error.message for text in known)
                or cluster.plan.independent
                or cluster.state.phase.final
            )
            if isinstance(error, Conflict) and not rightly:
                cluster.failures.append(f"refused while the job is {cluster.state.phase}: {error}")
            return
        except CallerError as error:
            cluster.failures.append(f"{request}: {error!r}")
            return
        cluster.say(f"accepted: {begun.operation_id} ({begun.reason})")
        cluster.accepted.append(begun)
        return


async def _create(cluster: SimulatedCluster, key: str) -> Operation:
    if cluster.plan.dispatch is Dispatch.MASTER:
        return await cluster.call_master(
            lambda m: m.term.operations.create_checkpoint(key, "a request", LIMIT_S)
        )
    async with asyncio.timeout(SEND_LIMIT_S):
        return await cluster.spectator.create_checkpoint(
            cluster.spec.job, key=key, cause="a request", limit_s=LIMIT_S
        )


async def save(cluster: SimulatedCluster) -> None:
    """A checkpoint of the present step, as before a job is paused: it is waited for, at most SAVE_S. Whatever
    fails, the pause goes on."""
    try:
        begun = await _create(cluster, ids.new_id("request"))
    except TriremeError as error:
        cluster.say(f"paused without a checkpoint: {error.message}")
        return
    cluster.accepted.append(begun)
    limit = asyncio.get_running_loop().time() + SAVE_S
    while asyncio.get_running_loop().time() < limit and not cluster.over:
        found = cluster.operation(begun)
        if found is None or not found.running:
            return
        await asyncio.sleep(0.1)


async def _restore(cluster: SimulatedCluster, key: str, which: str) -> Operation:
    if cluster.plan.dispatch is Dispatch.MASTER:
        return await cluster.call_master(
            lambda m: m.term.operations.restore_checkpoint(key, "a request", which)
        )
    async with asyncio.timeout(SEND_LIMIT_S):
        return await cluster.spectator.restore_checkpoint(cluster.spec.job, which, key=key)


async def _resize(cluster: SimulatedCluster, key: str, request: OperatorRequest) -> Operation:
    pservers, trainers = request.members
    # 0: without parameter servers, but the job may have got some
    pservers = pservers or cluster.spec.pservers
    strategy = Strategy.RESTART if request.restart else Strategy.LIVE

    async def ask(master: Master) -> Operation:
        operations = master.term.operations
        return await operations.create_resize(key, "simulated", trainers, pservers, strategy, RESIZE_LIMIT_S)

    begun: Operation = await cluster.call_master(ask)
    return begun


async def wait_for_operations(cluster: SimulatedCluster) -> None:
    """The job is over: wait until all accepted operations have ended."""
    loop = asyncio.get_running_loop()
    limit = loop.time() + END_LIMIT_S
    while loop.time() < limit and (
        left := [o for o in map(cluster.operation, cluster.accepted) if o is not None and o.running]
    ):
        if cluster.plan.dispatch is Dispatch.ETCD:  # no sweeper is left: reading the operation ends it
            await cluster.spectator.get_operation(cluster.spec.job, left[0].operation_id)
        elif not any(node.alive for node in cluster.nodes.values() if node.kind == "master"):
            return
        await asyncio.sleep(0.5)


def violations(cluster: SimulatedCluster) -> list[str]:
    """Operations that broke the rule."""
    found: list[str] = []
    led = cluster.plan.dispatch is Dispatch.ETCD or any(
        node.alive for node in cluster.nodes.values() if node.kind == "master"
    )
    for accepted in cluster.accepted:
        operation = cluster.operation(accepted)
        if operation is None:
            found.append(f"{accepted.operation_id} is forgotten")
        elif operation.running and led:
            found.append(f"still under way after the end: {operation}")
        elif operation.state is OperationState.FAILED and not operation.reason:
            found.append(f"failed without a reason: {operation}")
        elif operation.state is OperationState.DONE and operation.kind is OperationKind.CREATE_CHECKPOINT:
            found += _too_old(cluster, operation)
    return found


def _too_old(cluster: SimulatedCluster, operation: Operation) -> list[str]:
    """A checkpoint on demand is of a version that is no older than the request, or of a pause that began
    after it."""
    made = cluster.simulated.checkpoints_seen.get(operation.checkpoint_id)
    bound = cluster.simulated.bounds[operation.operation_id]
    if made is None:
        return [f"{operation} names a checkpoint that was never the latest"]
    if made.timeline == bound.timeline and made.step < bound.step and not made.final:
        return [f"{operation} is older than the request, which needs {bound.step} or later"]
    return []
