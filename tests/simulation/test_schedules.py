"""Learning rates per epoch and on plateau, under kills of everybody and rollbacks: the undisturbed run's
bits, and its rate in each step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.equipment.cluster.network import STEADY
from tests.equipment.replaced import replaced
from tests.simulation.compute import TinyCompute
from tests.simulation.plans import Plan, plan_of
from tests.simulation.reference import series_of
from tests.simulation.run import Outcome, simulate
from trainer_agent.loops.evaluating import Evaluator
from trireme_shared.protocol.records import Mode
from trireme_shared.protocol.records.step import LaneZero

# the second ones are rolled back, behind a change of the rate
EPOCH_SEEDS, PLATEAU_SEEDS = (44, 49), (12, 15)


def per_epoch(seed: int) -> Plan:
    drawn = plan_of(seed, Mode.SYNC)
    return replace(drawn, job=replace(drawn.job, epochs=3, schedule="epoch"))


def on_plateau(seed: int) -> Plan:
    drawn, every = plan_of(seed, Mode.SYNC), [1, 2, "epoch"][seed % 3]
    job = replace(drawn.job, epochs=4, schedule="plateau", evaluated_every=every)
    return replace(drawn, evaluate=True, evaluate_every=every, job=job)


def rates(plan: Plan) -> list[float]:
    return [value.total for value in series_of(plan.job)["lr.0"].values()]


def broken(outcome: Outcome) -> list[str]:
    return outcome.violations


@pytest.mark.parametrize("seed", EPOCH_SEEDS)
def test_a_schedule_per_epoch_under_faults(seed: int):
    plan = per_epoch(seed)
    assert sorted({*rates(plan)}) == [2.0**-4, 2.0**-3, 2.0**-2]
    outcome = simulate(seed, Mode.SYNC, plan=plan)
    assert not broken(outcome), str(outcome)
    assert outcome.timeline > 0 or seed not in EPOCH_SEEDS[-1:]


@pytest.mark.parametrize("seed", PLATEAU_SEEDS)
def test_a_plateau_under_faults(seed: int):
    plan = on_plateau(seed)
    assert len({*rates(plan)}) > 1
    outcome = simulate(seed, Mode.SYNC, plan=plan)
    assert not broken(outcome), str(outcome)
    assert outcome.timeline > 0 or seed not in PLATEAU_SEEDS[-1:]


def test_results_that_count_as_soon_as_they_are_known_are_noticed():
    def newest(self: Evaluator, _: Any) -> float | None:
        recent = self.status.recent
        return recent[-1].metrics["value"] if recent else None

    undisturbed = replace(on_plateau(22), conditions=STEADY, faults=(), requests=())
    with replaced(Evaluator, "plateau_value", newest):
        found = broken(simulate(22, Mode.SYNC, plan=undisturbed))
    assert any("lr.0 is stored" in line for line in found), found


@pytest.mark.parametrize("plan", [per_epoch(12), on_plateau(12)], ids=["epoch", "plateau"])
def test_a_state_that_does_not_come_back_with_the_version_is_noticed(plan: Plan):
    def forgetful(self: TinyCompute, lane_zero: LaneZero) -> None:
        pass

    with replaced(TinyCompute, "restore", forgetful):
        found = broken(simulate(plan.seed, Mode.SYNC, plan=plan))
    assert any("final parameters differ" in line for line in found), found
