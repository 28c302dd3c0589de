"""The checkpoint of an evaluated version is lost: the job goes back for it, and ends as the undisturbed
run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from master_service.core.decisions import recovery
from tests.equipment.replaced import replaced
from tests.simulation.collective import collective_plan
from tests.simulation.drawn import drawn_plan
from tests.simulation.plans import Fault, FaultKind, Plan
from tests.simulation.run import simulate
from trireme_shared.checkpoints import commit
from trireme_shared.protocol.records import Mode

BACK = "was not written: the job goes back to step"
OVER = "was not written, and no checkpoint before it: training starts over"


def killed(seed: int) -> Plan:
    """A collective job that keeps one checkpoint, and loses a trainer every few seconds."""
    drawn = collective_plan(seed)
    times = (4.0, 7.3, 10.1, 13.7, 16.2, 19.9)
    who = [(seed * 7 + number * 13) % 100 / 100 for number in range(len(times))]
    faults = tuple(
        Fault(at_s, FaultKind.KILL_TRAINER, one, 0.1) for at_s, one in zip(times, who, strict=True)
    )
    often = {"keep_checkpoints": 1, "checkpoint_every": 1, "evaluate": True, "evaluate_every": 3}
    job = replace(drawn.job, schedule="none", lanes=max(2, drawn.job.lanes))
    return replace(
        drawn,
        job=job,
        keep_best="value:min",
        trainers=max(2, drawn.trainers),
        faults=faults,
        storage_s=1.0,
        **often,
    )


def played(seed: int, plan: Plan) -> tuple[list[str], set[str]]:
    """Violations, and why the job went back for an evaluation."""
    said: list[str] = []
    outcome = simulate(seed, Mode.SYNC, said.append, plan)
    backs = [line.partition("cause=")[0] for line in said if "rolling_back" in line]
    return outcome.violations, {
        next(one for one in (BACK, OVER) if one in line) for line in backs if "was not written" in line
    }


CASES = [
    pytest.param(27, killed(27), {BACK}, id="a trainer is killed"),
    pytest.param(26, killed(26), {OVER}, id="before the first checkpoint"),
    pytest.param(54069, drawn_plan(54069, Mode.SYNC), {BACK}, id="slots move at that version"),
]


@pytest.mark.parametrize(("seed", "plan", "why"), CASES)
def test_the_result_is_that_of_the_undisturbed_run(seed: int, plan: Plan, why: set[str]) -> None:
    assert played(seed, plan) == ([], why)


def test_without_going_back_the_result_is_another_one() -> None:
    with replaced(recovery, "is_evaluation_lost", lambda job: False):
        violations, why = played(27, killed(27))
    assert violations
    assert not why


def test_without_keeping_a_checkpoint_for_it_more_is_trained_again() -> None:
    with replaced(commit, "way_back", lambda *_: None):
        violations, why = played(27, killed(27))
    assert not violations
    assert OVER in why
