"""Evaluations while a job trains, under kills of everybody: each once, with the undisturbed run's sums, and no bit of training changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shared.records import Mode
from shared.records.job_spec import StopEarly
from tests.equipment.cluster.network import STEADY
from tests.equipment.replaced import replaced
from tests.simulation.compute import Speed, TinyCompute
from tests.simulation.plans import Plan, plan_of
from tests.simulation.reference import stopping as stopping_at
from tests.simulation.run import Outcome, simulate

SEEDS = range(8)


def plan(seed: int, every: int | str) -> Plan:
    drawn = plan_of(seed, Mode.SYNC)
    best = ["value:min", "value:max", None][seed % 3]
    return replace(drawn, evaluate=True, evaluate_every=every, keep_best=best, job=replace(drawn.job, epochs=3))


def undisturbed(every: int | str, trainers: int = 2) -> Plan:
    quiet = replace(plan(0, every), conditions=STEADY, faults=(), requests=(), slow=1.0, trainers=trainers)
    return replace(quiet, speed=Speed(0.01, 0.02))


def broken(outcome: Outcome) -> list[str]:
    return outcome.violations


@pytest.mark.parametrize("every", [1, 3, "epoch"])
@pytest.mark.parametrize("trainers", [1, 6])
def test_each_evaluation_is_of_its_version_and_training_keeps_its_bits(every: int | str, trainers: int):
    assert not broken(simulate(0, Mode.SYNC, plan=undisturbed(every, trainers)))


@pytest.mark.parametrize("seed", SEEDS)
def test_under_faults_each_evaluation_comes_once_with_the_same_sums(seed: int):
    outcome = simulate(seed, Mode.SYNC, plan=plan(seed, [1, 2, "epoch"][seed % 3]))
    assert not broken(outcome), str(outcome)


@pytest.mark.parametrize("seed", SEEDS)
def test_stop_early_ends_at_the_same_step_under_faults(seed: int):
    drawn = plan(seed, [1, 2, "epoch"][seed % 3])
    stopping = replace(drawn, stop_early="value:min:patience=1", job=replace(drawn.job, epochs=4))
    assert stopping_at(stopping.job, [1, 2, "epoch"][seed % 3], StopEarly(metric="value:min", patience=1)) is not None
    outcome = simulate(seed, Mode.SYNC, plan=stopping)
    assert not broken(outcome), str(outcome)


def test_without_the_parameters_set_again_training_is_changed():
    def kept(self: TinyCompute, used: Any) -> None:
        self._vectors[0] = [vector.copy() for vector in self._vectors[0]]

    with replaced(TinyCompute, "restore_used", kept):
        found = broken(simulate(0, Mode.SYNC, plan=undisturbed(2, 1)))
    assert any("final parameters differ" in line for line in found), found
