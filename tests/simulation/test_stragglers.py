"""Slow members: lanes leave them, others compute what is late, late tasks are given twice; every promise is
kept.

Seconds are those of the virtual clock, so they are the same in every run.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.equipment.cluster.network import STEADY
from tests.equipment.replaced import replaced
from tests.simulation import job_spec
from tests.simulation.collective import collective_plan
from tests.simulation.compute import Speed
from tests.simulation.plans import EQUALLY_FAST, Fault, FaultKind, Plan, plan_of
from tests.simulation.run import Outcome, simulate
from trireme_shared.protocol.records import Dispatch, Mode, Strategy


def plan_with_a_slow_trainer(
    seed: int, mode: Mode, dispatch: Dispatch, *, stragglers: bool, epochs: int = 4
) -> Plan:
    plan = plan_of(seed, mode, dispatch)
    lanes = 8 if mode is Mode.SYNC else 1
    job = replace(
        plan.job, files=(16, 16, 12), task_records=4, minibatch=2, lanes=lanes, epochs=epochs, push_every=1
    )
    return replace(
        plan,
        job=job,
        speed=Speed(0.1, 0.12),
        conditions=STEADY,
        trainers=4,
        pservers=2,
        pull_every=1,
        checkpoint_every=None,
        checkpoint_every_s=None,
        skip_after_s=None,
        independent=False,
        faults=(),
        requests=(),
        slow=8.0,
        stragglers=stragglers,
        evaluate=False,
    )


def run_beside_equals(plan: Plan) -> tuple[Outcome, str]:
    """All but trainer-0 are equally fast: what its lanes cost there would depend on what is drawn for the
    others."""
    return run(replace(plan, slowness=EQUALLY_FAST), Mode.SYNC)


def run(plan: Plan, mode: Mode) -> tuple[Outcome, str]:
    lines: list[str] = []
    outcome = simulate(plan.seed, mode, lines.append, plan=plan, dispatch=plan.dispatch)
    assert not outcome.violations, f"\n  {outcome}"
    return outcome, "\n".join(lines)


@pytest.mark.parametrize("dispatch", [Dispatch.MASTER, pytest.param(Dispatch.ETCD, marks=pytest.mark.soak)])
def test_lanes_leave_a_slow_trainer(dispatch):
    on_s = off_s = 0.0
    for seed in range(2):
        plans = [plan_with_a_slow_trainer(seed, Mode.SYNC, dispatch, stragglers=on) for on in (True, False)]
        (on, told), (off, not_told) = map(run_beside_equals, plans)
        assert " lanes_moved " in told
        assert " lanes_moved " not in not_told
        on_s, off_s = on_s + on.seconds, off_s + off.seconds
    assert on_s * 2 <= off_s, (on_s, off_s)


@pytest.mark.parametrize(
    ("dispatch", "seed"), [(Dispatch.MASTER, 0), pytest.param(Dispatch.ETCD, 2, marks=pytest.mark.soak)]
)
def test_others_compute_late_lanes_while_nothing_moves(dispatch, seed):
    plans = [plan_with_a_slow_trainer(seed, Mode.SYNC, dispatch, stragglers=on) for on in (True, False)]
    (on, told), (off, not_told) = (run_beside_equals(replace(plan, rebalance_s=3600.0)) for plan in plans)
    assert " helps " in told
    assert " helps " not in not_told
    assert " lanes_moved " not in told
    assert on.seconds * 1.25 <= off.seconds, (on.seconds, off.seconds)


@pytest.mark.parametrize(
    ("strategy", "dispatch"),
    [
        (Strategy.COLLECTIVE, Dispatch.MASTER),
        (Strategy.PARAMETER_SERVER, Dispatch.ETCD),
        pytest.param(Strategy.COLLECTIVE, Dispatch.ETCD, marks=pytest.mark.soak),
        pytest.param(Strategy.PARAMETER_SERVER, Dispatch.MASTER, marks=pytest.mark.soak),
    ],
)
@pytest.mark.parametrize(("trainers", "left"), [(1, 1), (8, 8), (8, 1)])
def test_nobody_is_evicted_because_steps_take_long(strategy, dispatch, trainers, left):
    """A step takes longer than the shortest time limit from the first one on, or longer than those before
    because one trainer computes the lanes of all."""
    drawn = (
        plan_of(1, Mode.SYNC, dispatch)
        if strategy is not Strategy.COLLECTIVE
        else collective_plan(1, dispatch)
    )
    job = replace(drawn.job, files=(24,) * 4, task_records=12, minibatch=2, lanes=8, epochs=1, tables=False)
    deaths = tuple(
        Fault(20.0, FaultKind.KILL_TRAINER, 0.0, None, noticed=True) for _ in range(trainers - left)
    )
    given = {
        "conditions": STEADY,
        "requests": (),
        "evaluate": False,
        "checkpoint_every": 3,
        "slow": 1.0,
        "storage_s": 0.0,
    }
    plan = replace(drawn, job=job, speed=Speed(6.0, 6.0), trainers=trainers, faults=deaths, **given)
    with replaced(job_spec, "TASK_CEILING_S", 1200.0):
        _, told = run(plan, Mode.SYNC)
    assert " silent for " not in told


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("dispatch", list(Dispatch))
@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, 10), marks=pytest.mark.soak)], ids=str)
def test_every_promise_is_kept_with_a_slow_trainer_whatever_fails(mode, dispatch, seeds):
    for seed in seeds:
        plan = plan_with_a_slow_trainer(seed, mode, dispatch, stragglers=True)
        drawn = plan_of(seed, mode, dispatch)
        deaths = (Fault(2.0 + seed / 3, FaultKind.KILL_TRAINER, 0.3 * (seed % 3), 0.5, noticed=True),)
        run(replace(plan, conditions=drawn.conditions, faults=deaths, evaluate=drawn.evaluate), mode)
