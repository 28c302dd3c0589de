"""Jobs that operators restore several times, to older and to newer checkpoints: the metrics of all steps are
those of the parameters."""

from __future__ import annotations

import pytest

from tests.simulation.collective_settings import varied_plan
from tests.simulation.drawn import drawn_plan
from tests.simulation.plans import Plan
from tests.simulation.restores import back_and_forth, restored, stored_at_once
from tests.simulation.run import Outcome, simulate
from tests.simulation.slow_parts import parts_take
from trireme_shared.protocol.records import Dispatch, Mode
from trireme_shared.protocol.records.operations import OperationKind, OperationState


def drawn(kind: str, seed: int) -> Plan:
    return restored(
        varied_plan(seed, Dispatch.MASTER)
        if kind == "collective"
        else drawn_plan(seed, Mode(kind), Dispatch.MASTER)
    )


def run(plan: Plan) -> Outcome:
    with stored_at_once():
        return simulate(plan.seed, plan.job.mode, plan=plan)


def restores(outcome: Outcome) -> int:
    kind, done = OperationKind.RESTORE_CHECKPOINT, OperationState.DONE
    return sum((operation.kind, operation.state) == (kind, done) for operation in outcome.operations)


@pytest.mark.parametrize("kind", ["sync", "collective"])
def test_back_and_forth_all_metrics_and_evaluations_are_there(kind: str) -> None:
    with parts_take(lambda *_: 0.0):
        outcome = run(back_and_forth(kind))
    assert not outcome.violations, str(outcome)
    assert restores(outcome) == 4


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["sync", "collective", "async"])
def test_jobs_that_are_restored_whenever_and_to_whatever_keep_every_promise(kind: str) -> None:
    for seed in range(60):
        outcome = run(drawn(kind, seed))
        assert not outcome.violations, str(outcome)
