"""max_staleness with a trainer eight times slower, whatever fails: no trainer computes with parameters much
older than the bound, and none waits for ever.

Seconds are those of the virtual clock, so they are the same in every run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from tests.equipment.replaced import replaced
from tests.simulation.plans import Plan, plan_of
from tests.simulation.run import Outcome, simulate
from tests.simulation.test_stragglers import plan_with_a_slow_trainer
from trireme_shared.protocol.records import Dispatch, Mode
from trireme_shared.serving.core.asynchronous import ParametersInUse

BOUND = 3


def plan_within_bound(seed: int, dispatch: Dispatch, **changes: object) -> Plan:
    plan = plan_with_a_slow_trainer(seed, Mode.ASYNC, dispatch, stragglers=False, epochs=1)
    return replace(plan, max_staleness=BOUND, **changes)


@contextmanager
def ages() -> Iterator[list[int]]:
    """How many pushes old the parameters were that trainers computed with, when their pushes came."""
    found: list[int] = []
    pushed = ParametersInUse.pushed

    def seen(self: ParametersInUse, trainer: str, now: float, *, keeps: bool) -> bool:
        if (age := self.age_of(trainer)) is not None:
            found.append(age)
        return pushed(self, trainer, now, keeps=keeps)

    with replaced(ParametersInUse, "pushed", seen):
        yield found


def run(plan: Plan) -> Outcome:
    return simulate(plan.seed, Mode.ASYNC, plan=plan, dispatch=plan.dispatch)


@pytest.mark.parametrize("dispatch", [Dispatch.ETCD, pytest.param(Dispatch.MASTER, marks=pytest.mark.soak)])
def test_parameters_are_not_much_older_than_the_bound(dispatch: Dispatch) -> None:
    plan = plan_within_bound(1, dispatch)
    with ages() as bounded:
        assert not run(plan).violations
    most = BOUND + plan.trainers  # its own push, and each of the others may have been answered just before
    assert BOUND < max(bounded) <= most
    with ages() as unbounded, replaced(ParametersInUse, "slowest", lambda *_: None):
        assert not run(plan).violations
    assert max(unbounded) > most


@pytest.mark.soak
@pytest.mark.parametrize("dispatch", list(Dispatch))
@pytest.mark.parametrize("seed", range(3))
def test_nobody_waits_for_ever_whatever_fails(seed: int, dispatch: Dispatch) -> None:
    drawn = plan_of(seed, Mode.ASYNC, dispatch)
    changes = {"conditions": drawn.conditions, "faults": drawn.faults, "pull_every": 1 + seed % 2}
    outcome = run(plan_within_bound(seed, dispatch, **changes))
    assert not outcome.violations, f"\n  {outcome}"
