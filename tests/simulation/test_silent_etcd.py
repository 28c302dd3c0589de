"""etcd is silent (frozen, or its packets are dropped) for longer than the leases: members wait, keep their
state, and go on."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.equipment.cluster.network import STEADY
from tests.simulation.compute import Speed
from tests.simulation.plans import Fault, FaultKind, Plan, plan_of
from tests.simulation.run import Outcome, simulate
from trireme_shared.protocol.records import Dispatch, Mode

AWAY_S = (2.0, 6.0, 10.0, 60.0)


def kept(outcome: Outcome) -> None:
    assert not outcome.violations, f"\n  {outcome.plan}\n  {outcome}"


def silent_plan(seed: int, mode: Mode, dispatch: Dispatch, away_s: float) -> Plan:
    """Nothing else goes wrong. The members are enough to see each kind leave, and the job trains when etcd
    falls silent."""
    plan = plan_of(seed, mode, dispatch)
    job = replace(plan.job, epochs=3)
    members = {"trainers": 2, "pservers": 2, "speed": Speed(0.25, 0.5), "skip_after_s": None}
    fault = Fault(2.5, FaultKind.SILENCE_ETCD, lasts_s=away_s)
    return replace(plan, job=job, conditions=STEADY, requests=(), faults=(fault,), **members)


@pytest.mark.parametrize("dispatch", list(Dispatch))
@pytest.mark.parametrize("mode", list(Mode))
def test_nobody_leaves_and_nothing_is_rolled_back_however_long_etcd_is_silent(mode, dispatch):
    for number, away_s in enumerate(AWAY_S):
        seed = number % 2
        plan = silent_plan(seed, mode, dispatch, away_s)
        outcome = simulate(seed, mode, plan=plan, dispatch=dispatch)
        kept(outcome)
        assert (outcome.injected, outcome.timeline) == (1, 0), outcome.plan
        assert outcome.started == plan.masters + plan.pservers + plan.trainers, outcome.plan


@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 6), marks=pytest.mark.soak)], ids=str)
@pytest.mark.parametrize("dispatch", list(Dispatch))
@pytest.mark.parametrize("mode", list(Mode))
def test_every_promise_is_kept_whatever_fails_while_etcd_is_silent(mode, dispatch, seeds):
    for seed in seeds:
        plan = plan_of(seed, mode, dispatch)
        rng = random.Random(f"silences-{mode}-{seed}")
        silences = [
            Fault(rng.uniform(0.0, plan.window_s), FaultKind.SILENCE_ETCD, lasts_s=rng.choice(AWAY_S))
            for _ in range(rng.choice([1, 1, 2]))
        ]
        faults = sorted([*plan.faults, *silences], key=lambda fault: fault.at_s)
        kept(simulate(seed, mode, plan=replace(plan, faults=tuple(faults)), dispatch=dispatch))
