"""A trainer of a collective job that is slow, also with its storage, and keeps on living: no evaluation is
left out for that.

Lanes leave it, so the owners of newer versions may have written all parts of those before it has written its
part of an evaluated version.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.equipment.cluster.network import STEADY
from tests.equipment.replaced import replaced
from tests.simulation.collective import collective_plan
from tests.simulation.compute import Speed
from tests.simulation.plans import EQUALLY_FAST, Fault, FaultKind, Plan
from tests.simulation.run import simulate
from tests.simulation.slow_parts import parts_take
from trireme_shared.checkpoints.commit import EvaluatedFirst
from trireme_shared.protocol.records import Dispatch, Mode

SLOW, STORAGE_S = "trainer-0", 6.0
SEEDS = [(Dispatch.MASTER, 0), (Dispatch.MASTER, 3), (Dispatch.ETCD, 2)]


def plan_with_slow_storage(seed: int, dispatch: Dispatch) -> Plan:
    """The lanes leave the slow trainer 6 s after the job begins. It has written its part of version 0 then,
    and the job stands at version 2, whoever computes how many lanes: evaluation 1, of version 1, is to come
    first."""
    drawn = collective_plan(seed, dispatch)
    job = replace(drawn.job, files=(24, 24), task_records=4, minibatch=1, lanes=8, epochs=1, tables=False)
    masters = int(dispatch is Dispatch.MASTER)
    settings: Any = {
        "trainers": 3,
        "masters": masters,
        "faults": (),
        "requests": (),
        "slow": 8.0,
        "slowness": EQUALLY_FAST,
        "stragglers": True,
    }
    settings |= {"checkpoint_every": 1, "evaluate": True, "evaluate_every": 1, "rebalance_s": 6.0}
    return replace(drawn, job=job, speed=Speed(0.08, 0.09), conditions=STEADY, **settings)


def run(plan: Plan) -> list[str]:
    """What its members said."""
    said: list[str] = []
    with parts_take(lambda trainer, _: STORAGE_S if trainer.startswith(SLOW) else 0.0):
        outcome = simulate(plan.seed, Mode.SYNC, said.append, plan)
    assert not outcome.violations, f"\n  {outcome}"
    assert lines(said, " lanes_moved ")
    return said


def lines(said: list[str], what: str) -> list[str]:
    return [line for line in said if what in line]


@pytest.mark.parametrize(("dispatch", "seed"), SEEDS)
def test_an_evaluated_version_is_committed_before_newer_ones(dispatch, seed):
    said = run(plan_with_slow_storage(seed, dispatch))
    assert lines(said, "commit_held")
    assert not lines(said, "evaluation_left_out")


@pytest.mark.parametrize(("dispatch", "seed"), SEEDS)
def test_without_that_an_evaluation_is_left_out_although_nothing_failed(dispatch, seed):
    with replaced(EvaluatedFirst, "holds", lambda *_: False):
        said = run(plan_with_slow_storage(seed, dispatch))
    assert lines(said, "evaluation_left_out")


def test_a_trainer_that_dies_is_not_waited_for():
    plan = plan_with_slow_storage(0, Dispatch.MASTER)
    death = Fault(8.0, FaultKind.KILL_TRAINER, 0.0, None, members=(0, 0), noticed=True)
    said = run(replace(plan, faults=(death,)))
    held, committed = lines(said, "commit_held step=2"), lines(said, "checkpoint_committed step=2")
    assert held
    assert 8.0 < float(committed[0].split()[0]) < 12.0, "before it would have written its part"
