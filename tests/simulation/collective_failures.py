"""Collective jobs in the simulation, with what else may happen to them: storage that fails at single
trainers, and jobs that are paused and resumed."""

from __future__ import annotations

import random
from dataclasses import replace

from tests.simulation.collective_troubles import troubled_plan
from tests.simulation.failing_storage import storage_faults
from tests.simulation.plans import Fault, FaultKind, Moment, MomentFault, Plan
from trireme_shared.protocol.records import Dispatch

PAUSED_S = (0.1, 1.0, 4.0, 15.0)
LONG_S = 600.0


def failing_plan(seed: int, dispatch: Dispatch = Dispatch.MASTER) -> Plan:
    """That of the seed with faults at moments, and these drawn apart."""
    plan, rng = troubled_plan(seed, dispatch), random.Random(f"failures-{dispatch}-{seed}")
    if rng.random() < 0.5 and plan.first_epochs is None:
        plan = replace(plan, moments=plan.moments[:1])
    if plan.evaluations_s > LONG_S:
        plan = replace(
            plan,
            evaluate_every="epoch",
            job=replace(plan.job, evaluated_every=plan.job.evaluated_every and "epoch"),
        )
    plan = replace(plan, storage_faults=storage_faults(rng, 1.5 * plan.window_s, plan.trainers))
    if dispatch is Dispatch.MASTER:
        plan = replace(plan, moments=(*plan.moments, *(_pause(rng) for _ in range(rng.choice([0, 1, 1, 2])))))
    return replace(plan, failing=True)


def _pause(rng: random.Random) -> MomentFault:
    fault = Fault(0.0, FaultKind.PAUSE, rng.random(), rng.choice(PAUSED_S))
    return MomentFault(rng.choice(list(Moment)), rng.choice([0.0, 0.05, 0.5, 1.0, 2.0, 5.0]), (fault,))
