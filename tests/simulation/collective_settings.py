"""Collective jobs in the simulation with other settings: spares, evaluations and what depends on them,
requests, few records."""

from __future__ import annotations

import random
from dataclasses import replace

from tests.simulation.collective import collective_plan
from tests.simulation.plans import CLIP, OperatorRequest, Plan, RequestKind
from trireme_shared.protocol.records import Dispatch

FILES: tuple[tuple[tuple[int, ...], int, int], ...] = (
    # files, records per task, minibatch
    ((7, 1, 16, 5), 4, 2),
    ((12, 12), 4, 2),
    ((3,), 1, 1),  # fewer tasks than most jobs have lanes
    ((9, 0, 13, 2), 8, 4),
    ((2, 1), 2, 1),
    ((24, 20), 4, 2),
)
KINDS = (
    RequestKind.CHECKPOINT,
    RequestKind.CHECKPOINT,
    RequestKind.TRAINER_LEAVES,
    RequestKind.TRAINER_LEAVES,
    RequestKind.RESIZE,
    RequestKind.RESIZE,
)


def varied_plan(seed: int, dispatch: Dispatch = Dispatch.MASTER) -> Plan:
    """That of the seed, with settings and requests drawn apart."""
    drawn, rng = collective_plan(seed, dispatch), random.Random(f"settings-{seed}")
    files, task_records, minibatch = rng.choice(FILES)
    every = rng.choice([None, 1, 2, "epoch"])
    lanes, trainers = rng.choice([1, 2, 2, 4, 8]), rng.choice([1, 2, 3, 4, 6])
    job = replace(
        drawn.job,
        files=files,
        task_records=task_records,
        minibatch=minibatch,
        lanes=lanes,
        epochs=rng.choice([1, 2, 4]),
        clip_grad_norm=rng.choice([None, CLIP]),
        tables=rng.random() < 0.4,
        schedule=rng.choice(["none", "epoch"] if every is None else ["none", "epoch", "plateau", "plateau"]),
    )
    job = replace(job, evaluated_every=every if job.schedule == "plateau" else None)
    plan = replace(
        drawn,
        job=job,
        trainers=trainers,
        varied=True,
        min_members=rng.choice([1, 1, min(2, lanes, trainers)]),
        evaluate=rng.random() < 0.5 or every is not None,
        evaluate_every=every,
        keep_best=rng.choice([None, "value:min", "value:max"]) if every is not None else None,
        stop_early=rng.choice([None, None, "value:min:patience=1"])
        if every is not None and job.schedule != "plateau"
        else None,
        checkpoint_every=rng.choice([None, 1, 2, 5]),
    )
    faults = tuple(replace(each, members=(0, max(each.members[1], plan.min_members))) for each in plan.faults)
    return replace(plan, faults=faults, requests=_requests(rng, plan))


def _requests(rng: random.Random, plan: Plan) -> tuple[OperatorRequest, ...]:
    """At most one restore: it may repeat all the work."""
    kinds = [rng.choice(KINDS) for _ in range(rng.choice([0, 1, 2, 4]))]
    kinds += [RequestKind.RESTORE] if rng.random() < 0.3 else []
    if plan.dispatch is Dispatch.ETCD:
        kinds = [kind for kind in kinds if kind is not RequestKind.RESIZE]
    found = [
        OperatorRequest(
            rng.uniform(0.5, plan.window_s),
            kind,
            rng.random(),
            members=(0, rng.randint(plan.min_members, min(5, plan.job.lanes))),
            restart=rng.random() < 0.2,
        )
        for kind in kinds
    ]
    return tuple(sorted(found, key=lambda request: request.at_s))
