"""Jobs that operators restore several times, to older and to newer checkpoints."""

from __future__ import annotations

import random
from contextlib import AbstractContextManager
from dataclasses import replace

from master_service.control import series_keeper
from tests.equipment.cluster.network import STEADY
from tests.equipment.replaced import replaced
from tests.simulation.plans import CLIP, EQUALLY_FAST, Job, OperatorRequest, Plan, RequestKind, Speed, plan_of
from trireme_shared.protocol.records import Mode, Strategy


def stored_at_once() -> AbstractContextManager[None]:
    """Metrics are stored at once, so checkpoints do not carry those of many steps."""
    return replaced(series_keeper, "FLUSH_S", 0.3)


def restored(plan: Plan) -> Plan:
    """Two to five restores. The kept checkpoints of the job's history come first, newest first; then those
    that it left: a high `pick` goes far back at first, and forward later."""
    rng = random.Random(f"restores-{plan.seed}")
    longer = max(plan.job.epochs, rng.choice([2, 4, 6])) if plan.stop_early is None else plan.job.epochs
    plan = replace(
        plan, job=replace(plan.job, epochs=longer), faults=plan.faults if rng.random() < 0.3 else ()
    )
    first = rng.uniform(3.0, 9.0)
    times = [first + number * rng.uniform(2.0, 5.0) for number in range(rng.choice([2, 2, 3, 4]))]
    asked = [OperatorRequest(at_s, RequestKind.RESTORE, rng.choice([0.0, 0.6, 0.99, 0.99])) for at_s in times]
    asked += [OperatorRequest(rng.uniform(0.3, times[-1]), RequestKind.CHECKPOINT) for _ in range(4)]
    every = rng.choice([2, 3, 5]) if plan.job.mode is Mode.SYNC else None
    if plan.job.mode is Mode.SYNC and plan.evaluate_every is None and rng.random() < 0.6:
        best = rng.choice([None, "value:min", "value:max"])
        plan = replace(plan, evaluate=True, evaluate_every=rng.choice([2, 3, 5]), keep_best=best)
    return replace(
        plan,
        independent=False,
        keep_checkpoints=rng.choice([2, 3, 4]),
        checkpoint_every=every,
        first_epochs=None,
        restored=True,
        requests=tuple(sorted(asked, key=lambda one: one.at_s)),
    )


def back_and_forth(kind: str) -> Plan:
    """Nothing fails. Back to the oldest checkpoint that is kept, and soon afterwards to the newest one that
    was left; both once more."""
    plan = replace(
        plan_of(5, Mode.SYNC), faults=(), moments=(), conditions=STEADY, slow=1.0, evaluate=True, masters=1
    )
    plan = replace(
        plan, slowness=EQUALLY_FAST
    )  # else the requests come when the job is over, or has one checkpoint
    job = Job(
        mode=Mode.SYNC,
        files=(20, 11),
        task_records=5,
        minibatch=5,
        lanes=2,
        epochs=10,
        seed=0,
        push_every=1,
        clip_grad_norm=CLIP,
    )
    if kind == "collective":
        plan, job = replace(plan, strategy=Strategy.COLLECTIVE, pservers=0), replace(job, trainers_hold=True)
    asked = [(14.0, 0.99), (17.0, 0.3), (20.0, 0.99), (22.0, 0.3)]
    return replace(
        plan,
        job=job,
        trainers=2,
        speed=Speed(0.2, 0.3, stall=0.0, stall_s=0.0),
        checkpoint_every=5,
        keep_checkpoints=4,
        evaluate_every=6,
        keep_best="value:min",
        requests=tuple(OperatorRequest(at_s, RequestKind.RESTORE, pick) for at_s, pick in asked),
    )
