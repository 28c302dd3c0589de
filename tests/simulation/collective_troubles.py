"""Collective jobs in the simulation, once more: gradients that travel narrower, minibatches that are left
out, faults at moments of the job, trainers that all leave and come back, trainers that are replaced for good,
more epochs at the end."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from tests.simulation.collective_settings import varied_plan
from tests.simulation.drawn import longer
from tests.simulation.plans import (
    DTYPES,
    Fault,
    FaultKind,
    Moment,
    MomentFault,
    OperatorRequest,
    Peer,
    Plan,
    RequestKind,
)
from trireme_shared.protocol.records import Dispatch

KINDS = (
    FaultKind.KILL_TRAINER,
    FaultKind.KILL_TRAINER,
    FaultKind.KILL_TRAINERS,
    FaultKind.FREEZE_TRAINER,
    FaultKind.FREEZE_TRAINER,
    FaultKind.CUT_TRAINER,
    FaultKind.TRAINERS_LEAVE,
    FaultKind.RESTART_ETCD,
    FaultKind.RESTART_ALL,
    FaultKind.JOIN_TRAINER,
)
OF_MASTERS = FaultKind.KILL_MASTER, FaultKind.FREEZE_MASTER, FaultKind.CUT_MASTER, FaultKind.HAND_OVER
FOR_A_WHILE = FaultKind.FREEZE_TRAINER, FaultKind.FREEZE_MASTER, FaultKind.CUT_TRAINER, FaultKind.CUT_MASTER


def troubled_plan(seed: int, dispatch: Dispatch = Dispatch.MASTER) -> Plan:
    """That of the seed with other settings, and these troubles drawn apart."""
    drawn, rng = varied_plan(seed, dispatch), random.Random(f"troubles-{dispatch}-{seed}")
    job = replace(drawn.job, travels_as=rng.choice(DTYPES), skips=rng.random() < 0.3)
    plan = replace(drawn, job=job, keep_checkpoints=rng.choice([1, 2, 3]))
    plan = replace(plan, faults=plan.faults if rng.random() < 0.3 else ())
    if rng.random() < 0.5:
        plan = replace(plan, conditions=replace(plan.conditions, break_stream=0.0))
    plan = replace(plan, moments=tuple(_moment(rng, plan) for _ in range(rng.choice([1, 1, 2, 3]))))
    plan = longer(random.Random(f"longer-troubles-{dispatch}-{seed}"), plan)
    changes = plan.min_members == 1 and rng.random() < 0.3
    moments = [
        replace(each, faults=tuple(_restarted(rng, each.faults, plan.min_members, changes=changes)))
        for each in plan.moments
    ]
    return replace(plan, moments=tuple(moments))


def _restarted(rng: random.Random, faults: Sequence[Fault], least: int, *, changes: bool) -> Iterator[Fault]:
    """Whatever is started again has no parameter servers; `changes`: or it may get some, and with them the
    other strategy."""
    for fault in faults:
        pservers = rng.choice([0, 1, 2]) if changes and fault.kind is FaultKind.RESTART_ALL else 0
        yield replace(fault, members=(pservers, max(least, fault.members[1])))


def _moment(rng: random.Random, plan: Plan) -> MomentFault:
    with_master = plan.dispatch is Dispatch.MASTER
    kinds = [*KINDS, *(OF_MASTERS if with_master else ())]
    faults = [_fault(rng, rng.choice(kinds), plan) for _ in range(rng.choice([1, 1, 2, 3]))]
    faults += [Fault(0.0, FaultKind.JOIN_TRAINER) for fault in faults if fault.lasts_s is None]
    asked = [RequestKind.RESTORE, RequestKind.CHECKPOINT]
    if with_master:
        asked.append(RequestKind.RESIZE)
    requests = tuple(_request(rng, kind, plan) for kind in asked if rng.random() < 0.2)
    delay_s = rng.choice([0.0, 0.01, 0.05, 0.2, 0.5, 1.0])
    return MomentFault(rng.choice(list(Moment)), delay_s, tuple(faults), requests)


def _fault(rng: random.Random, kind: FaultKind, plan: Plan) -> Fault:
    lasts: float | None = rng.choice([0.1, 1.0, 4.0])
    if kind in FOR_A_WHILE:
        lasts = rng.choice([0.5, 3.0, 8.0, 15.0])
    elif kind is FaultKind.JOIN_TRAINER:
        lasts = 0.1
    elif kind is FaultKind.KILL_TRAINER and rng.random() < 0.3:
        lasts = None  # another one comes in its place
    trainers = max(plan.min_members, rng.choice([1, 2, 3]))
    return Fault(0.0, kind, rng.random(), lasts, rng.choice(list(Peer)), rng.random() < 0.5, (0, trainers))


def _request(rng: random.Random, kind: RequestKind, plan: Plan) -> OperatorRequest:
    trainers = rng.randint(plan.min_members, max(plan.min_members, min(5, plan.job.lanes)))
    return OperatorRequest(0.0, kind, rng.random(), members=(0, trainers), restart=rng.random() < 0.2)
