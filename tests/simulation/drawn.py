"""Plans whose settings are drawn, too, and whose faults come at moments of the job: what evaluates, ends
early, moves or saves when it breaks."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.simulation import operator_requests
from tests.simulation.plans import (
    CLIP,
    DTYPES,
    Fault,
    FaultKind,
    Moment,
    MomentFault,
    OperatorRequest,
    Peer,
    Plan,
    RequestKind,
    plan_of,
)
from tests.simulation.reference import tasks_of
from trireme_shared.protocol.evaluations import EvaluationStatus
from trireme_shared.protocol.records import Dispatch, Mode, Phase, Stage, TaskMeta

if TYPE_CHECKING:
    from tests.simulation.cluster import SimulatedCluster

LOOK_S = 0.004
LONGER = 0.3

FILES: tuple[tuple[tuple[int, ...], int, int, int], ...] = (
    ((1,), 4, 2, 4),
    ((5,), 5, 5, 8),
    ((40,), 40, 2, 4),  # one task
    ((7, 1, 16, 5), 4, 2, 4),
    ((17, 1), 6, 2, 8),
    ((24,), 6, 4, 4),
    ((20, 11), 5, 5, 1),
    ((3, 3, 3, 3, 3), 3, 3, 4),
)


def drawn_plan(seed: int, mode: Mode, dispatch: Dispatch = Dispatch.MASTER) -> Plan:
    plan, rng = plan_of(seed, mode, dispatch), random.Random(f"drawn-{mode}-{dispatch}-{seed}")
    files, task_records, minibatch, lanes = rng.choice(FILES)
    job = replace(
        plan.job,
        files=files,
        task_records=task_records,
        minibatch=minibatch,
        lanes=lanes if mode is Mode.SYNC else 1,
        epochs=rng.choice([1, 2, 3, 4]),
    )
    plan = replace(
        plan,
        pservers=rng.choice([1, 2, 3]),
        trainers=rng.choice([1, 2, 3]),
        keep_checkpoints=rng.choice([1, 2, 3]),
    )
    every = rng.choice([None, 1, 2, 3, "epoch", "epoch"])
    if every is not None and len(files) == 1:
        every = "epoch"  # else it would evaluate most of the time
    if every is not None:
        plan = replace(
            plan,
            evaluate=True,
            evaluate_every=every,
            keep_best=rng.choice([None, "value:min", "value:max"]),
            stop_early=rng.choice([None, None, "value:min:patience=1", "value:max:patience=1"]),
            independent=False,
        )
    if mode is Mode.SYNC:
        job = replace(job, clip_grad_norm=rng.choice([None, CLIP]), travels_as=rng.choice(DTYPES))
        job = replace(
            job, schedule=rng.choice(["none", "epoch", *(["plateau"] * 2 if every is not None else [])])
        )
        job = replace(job, evaluated_every=every if job.schedule == "plateau" else None)
        plan = replace(plan, checkpoint_every=rng.choice([None, 1, 2, 3, 5]))
    else:
        job = replace(job, push_every=rng.choice([1, 2, 3]))
        plan = replace(
            plan,
            pull_every=rng.choice([1, 2, 4]),
            max_staleness=rng.choice([None, None, 1, 2, 4]) if plan.skip_after_s is None else None,
            checkpoint_every_s=rng.choice([None, 0.7, 2.0]),
        )
    plan = replace(plan, job=job, slow=rng.choice([1.0, 1.0, plan.slow]))
    plan = replace(plan, **_troubles(rng, plan))
    return longer(random.Random(f"longer-{mode}-{dispatch}-{seed}"), plan)


def longer(rng: random.Random, plan: Plan) -> Plan:
    """Some jobs get more epochs when everything has been killed, at the end of what they had."""
    if rng.random() > LONGER or plan.stop_early is not None or plan.job.epochs < 2 or plan.independent:
        return plan
    moments = [Moment.LAST_STEPS, Moment.AFTER_TRAINING, Moment.EXPORT, Moment.COMPLETED, Moment.COMPLETED]
    members = rng.choice([1, 2, 3]), rng.choice([1, 2, 3])
    restart = Fault(0.0, FaultKind.RESTART_ALL, rng.random(), rng.choice([0.1, 4.0]), members=members)
    again = MomentFault(rng.choice(moments), rng.choice([0.0, 0.05, 0.2, 0.5, 1.0, 2.0]), (restart,))
    others = tuple(
        one for one in plan.moments if not any(f.kind is FaultKind.RESTART_ALL for f in one.faults)
    )
    faults = tuple(fault for fault in plan.faults if fault.kind is not FaultKind.RESTART_ALL)
    first = rng.randrange(1, plan.job.epochs)
    return replace(plan, first_epochs=first, moments=(*others, again), faults=faults)


def _troubles(rng: random.Random, plan: Plan) -> dict[str, object]:
    faults = plan.faults if rng.random() < 0.3 else ()
    requests = list(plan.requests if rng.random() < 0.5 else ())
    evaluated = (
        plan.job.mode is Mode.SYNC and plan.evaluate_every is not None
    )  # left out if slots move at its version, unless results count
    evaluated = (
        evaluated and plan.keep_best is None and plan.stop_early is None and plan.job.schedule != "plateau"
    )
    if plan.dispatch is Dispatch.MASTER and not plan.independent and rng.random() < 0.3 and not evaluated:
        members = (
            rng.choice([1, 2, 3]),
            rng.choice([1, 2, 3]) if plan.job.lanes > 1 or plan.job.mode is Mode.ASYNC else 1,
        )
        at_s = rng.uniform(0.5, max(1.0, 0.7 * plan.work_s))
        requests.append(
            OperatorRequest(at_s, RequestKind.RESIZE, members=members, restart=rng.random() < 0.3)
        )
    moments = tuple(_moment(rng, plan) for _ in range(rng.choice([1, 1, 2, 3])))
    found: dict[str, object] = {
        "faults": faults,
        "requests": tuple(sorted(requests, key=lambda one: one.at_s)),
        "moments": moments,
    }
    if rng.random() < 0.5:
        found["conditions"] = replace(plan.conditions, break_stream=0.0)
    return found


def _moment(rng: random.Random, plan: Plan) -> MomentFault:
    kinds = [
        FaultKind.KILL_TRAINER,
        FaultKind.KILL_TRAINERS,
        FaultKind.FREEZE_TRAINER,
        FaultKind.FREEZE_TRAINER,
        FaultKind.CUT_TRAINER,
        FaultKind.RESTART_ETCD,
        FaultKind.RESTART_ALL,
    ]
    if not plan.independent:
        kinds += [
            FaultKind.KILL_PSERVER,
            FaultKind.KILL_PSERVER,
            FaultKind.FREEZE_PSERVER,
            FaultKind.KILL_EVERYBODY,
        ]
    if plan.dispatch is Dispatch.MASTER:
        kinds += [FaultKind.KILL_MASTER, FaultKind.FREEZE_MASTER, FaultKind.CUT_MASTER]
    several = tuple(_fault(rng, rng.choice(kinds), plan) for _ in range(rng.choice([1, 1, 2, 3])))
    requests: tuple[RequestKind, ...] = (
        (RequestKind.RESTORE, RequestKind.CHECKPOINT) if not plan.independent else ()
    )
    asks = tuple(OperatorRequest(0.0, kind, rng.random()) for kind in requests if rng.random() < 0.15)
    delay_s = rng.choice([0.0, 0.01, 0.05, 0.2, 0.5, 1.0])
    return MomentFault(rng.choice(list(Moment)), delay_s, several, asks)


def _fault(rng: random.Random, kind: FaultKind, plan: Plan) -> Fault:
    lasts = rng.choice([0.1, 1.0, 4.0])
    if kind in {
        FaultKind.FREEZE_TRAINER,
        FaultKind.FREEZE_MASTER,
        FaultKind.CUT_TRAINER,
        FaultKind.CUT_MASTER,
    }:
        lasts = rng.choice([0.5, 3.0, 8.0, 15.0])
    if kind is FaultKind.FREEZE_PSERVER:
        lasts = rng.choice([0.5, 2.0, *([8.0, 15.0] if plan.job.mode is Mode.SYNC else [])])
    members = rng.choice([1, 2, 3]), rng.choice([1, 2, 3])
    return Fault(0.0, kind, rng.random(), lasts, rng.choice(list(Peer)), rng.random() < 0.5, members)


def reached(cluster: SimulatedCluster, moment: Moment) -> bool:
    state, keys = cluster.state, cluster.keys
    running = state.phase is Phase.RUNNING
    status = EvaluationStatus.model_validate_json(cluster.simulated.value(keys.evaluation_status) or b"{}")
    match moment:
        case Moment.FIRST_STEP:
            return running
        case Moment.LAST_STEPS:
            return running and _last_task_given(cluster)
        case Moment.AFTER_TRAINING:
            return running and state.stage in {Stage.EVALUATE, Stage.EXPORT}
        case Moment.EXPORT:
            return running and state.stage is Stage.EXPORT
        case Moment.COMPLETED:
            return state.phase is Phase.COMPLETED
        case Moment.EVALUATION:
            return status.running is not None
        case Moment.EVALUATED:
            return status.settled > 0
        case Moment.STOPS:
            return status.stop_after is not None
        case Moment.CHECKPOINTING:
            written = bool(cluster.simulated.names(keys.checkpoints)) and bool(
                cluster.simulated.checkpoints_seen
            )
            return state.saving is not None or written
        case Moment.COMMITTED:
            return len(cluster.simulated.checkpoints_seen) > 1
        case Moment.ROLLING_BACK:
            return state.phase is Phase.ROLLING_BACK
        case Moment.ROLLED_BACK:
            return state.timeline > 0 and running


def _last_task_given(cluster: SimulatedCluster) -> bool:
    keys, job = cluster.keys, cluster.plan.job
    meta = TaskMeta.model_validate_json(cluster.simulated.value(keys.task_meta) or b"{}")
    given = sum(
        int(cluster.simulated.value(keys.cursor(name)) or b"0") for name in map(str, range(job.lanes))
    )
    return meta.epoch == cluster.spec.epochs - 1 and given >= len(tasks_of(job))


async def strike(
    cluster: SimulatedCluster, moment: MomentFault, inject: Callable[..., Coroutine[Any, Any, None]]
) -> None:
    """Once that moment comes."""
    loop = asyncio.get_running_loop()
    while not reached(cluster, moment.moment):
        if cluster.over:
            return
        await asyncio.sleep(LOOK_S)
    await asyncio.sleep(moment.delay_s)
    if cluster.over:
        return
    cluster.say(f"moment: {moment.moment}")
    async with asyncio.TaskGroup() as group:
        for request in moment.requests:
            group.create_task(operator_requests.send(cluster, request))
        for fault in moment.faults:
            cluster.injected += 1
            cluster.last_fault_s = max(cluster.last_fault_s, loop.time() + (fault.lasts_s or 0.0))
            group.create_task(inject(cluster, fault))
