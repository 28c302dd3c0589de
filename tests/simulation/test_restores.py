"""Jobs that operators restore several times, to older and to newer checkpoints: the metrics of all steps are those of the parameters."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from master_service.control import series_keeper
from shared.records import Dispatch, Mode
from shared.records.operations import OperationKind, OperationState
from tests.equipment.replaced import replaced
from tests.simulation.collective_settings import varied_plan
from tests.simulation.drawn import drawn_plan
from tests.simulation.plans import OperatorRequest, Plan, RequestKind
from tests.simulation.run import Outcome, simulate


def restored(plan: Plan) -> Plan:
    """Two to five restores. The kept checkpoints of the job's history come first, newest first; then those that it left: a high `pick` goes far
    back at first, and forward later."""
    rng = random.Random(f"restores-{plan.seed}")
    first = rng.uniform(0.2, 0.6) * max(6.0, plan.work_s / max(1, plan.trainers))
    times = [first + number * rng.uniform(1.0, 4.0) for number in range(rng.choice([2, 2, 3, 5]))]
    asked = [OperatorRequest(at_s, RequestKind.RESTORE, rng.choice([0.0, 0.5, 0.99, 0.99])) for at_s in times]
    asked += [OperatorRequest(rng.uniform(0.3, times[-1]), RequestKind.CHECKPOINT) for _ in range(4)]
    every = rng.choice([1, 2, 3]) if plan.job.mode is Mode.SYNC else None
    if plan.job.mode is Mode.SYNC and plan.evaluate_every is None and rng.random() < 0.6:
        best = rng.choice([None, "value:min", "value:max"])
        plan = replace(plan, evaluate=True, evaluate_every=rng.choice([2, 3, 5]), keep_best=best)
    return replace(
        plan,
        independent=False,
        keep_checkpoints=rng.choice([2, 3, 4]),
        checkpoint_every=every,
        first_epochs=None,
        requests=tuple(sorted(asked, key=lambda one: one.at_s)),
    )


def plan_of(kind: str, seed: int) -> Plan:
    if kind == "collective":
        return restored(varied_plan(seed, Dispatch.MASTER))
    return restored(drawn_plan(seed, Mode(kind), Dispatch.MASTER))


FLUSH_S = 0.3  # metrics are stored at once, so checkpoints do not carry those of many steps


def restores(kind: str, seed: int) -> Outcome:
    plan = plan_of(kind, seed)
    with replaced(series_keeper, "FLUSH_S", FLUSH_S):
        return simulate(seed, plan.job.mode, plan=plan)
