"""The checkpoint of an evaluated version is lost: the job goes back for it, and ends as the undisturbed
run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from master_service.core.decisions import recovery
from pserver_service.member import Drain
from tests.equipment.cluster.network import STEADY
from tests.equipment.replaced import replaced
from tests.simulation.compute import Speed
from tests.simulation.plans import (
    EQUALLY_FAST,
    Fault,
    FaultKind,
    Job,
    OperatorRequest,
    Plan,
    RequestKind,
    plan_of,
)
from tests.simulation.processes import DRAIN_S
from tests.simulation.run import simulate
from tests.simulation.slow_parts import parts_take
from trireme_shared.checkpoints import commit
from trireme_shared.protocol.records import Mode, Strategy

BACK = "was not written: the job goes back to step"
OVER = "was not written, and no checkpoint before it: training starts over"

NEVER_S = 1e6  # the run is over long before
VICTIM = "trainer-0"
SEEDS = range(2)
SOON_S = 20.0  # no job is over


@dataclass(frozen=True)
class Scenario:
    """`part_s`, by the name of a process and a version: how long the storage takes for that part. Nothing
    here depends on what the seed draws: where it does, the versions that are lost would be others in every
    tree that sends one message more."""

    plan: Plan
    part_s: Callable[[str, int], float]


def calm(seed: int, job: Job, every: int, **settings: Any) -> Plan:
    """A job that keeps one checkpoint, evaluates each version of which the number is divisible by `every`,
    and stands where the next one would come before the last one is begun."""
    saves = {"checkpoint_every": 1, "keep_checkpoints": 1, "keep_best": "value:min", "storage_s": 0.0}
    calmly = {"conditions": STEADY, "faults": (), "requests": (), "slow": 1.0, "slowness": EQUALLY_FAST}
    plan = replace(plan_of(seed, Mode.SYNC), job=job, evaluate=True, evaluate_every=every)
    return replace(plan, **{**saves, **calmly, **settings})


def a_trainer_dies(seed: int, *, writes_first: bool) -> Scenario:
    """It owes its part of version 3, the first that is evaluated, and the job stands at version 6. Those that
    are left write that one whole. `writes_first`: its part of version 0 it has written, so the job has a
    checkpoint."""
    job = Job(Mode.SYNC, (24, 24), task_records=4, minibatch=1, lanes=4, epochs=1, seed=0, trainers_hold=True)
    death = Fault(6.0, FaultKind.KILL_TRAINER, members=(0, 0), noticed=True)
    trains: Any = {"strategy": Strategy.COLLECTIVE, "pservers": 0, "trainers": 3, "speed": Speed(0.1, 0.12)}
    plan = calm(seed, job, every=3, **trains, faults=(death,))

    def part_s(trainer: str, version: int) -> float:
        owes = version > 0 or not writes_first
        return NEVER_S if owes and trainer.startswith(VICTIM) else 0.0

    return Scenario(plan, part_s)


def slots_move(seed: int, every: int, part_s: float, *more: OperatorRequest) -> Scenario:
    """Right after the first version that is evaluated, one parameter server hands all its slots over. Each
    has to write its part of that version, for which the storage takes `part_s`."""
    job = Job(Mode.SYNC, (24, 24), task_records=4, minibatch=1, lanes=2, epochs=1, seed=0)
    fewer = OperatorRequest(0.5 + 0.3 * every, RequestKind.RESIZE, members=(2, 2))
    trains: Any = {"pservers": 3, "trainers": 2, "speed": Speed(0.3, 0.31), "requests": (fewer, *more)}
    plan = calm(seed, job, every, **trains)
    return Scenario(plan, lambda _, version: part_s if version == every else 0.0)


def played(scenario: Scenario) -> tuple[list[str], set[str], list[str]]:
    """Violations, why the job went back for an evaluation, and what was logged."""
    said: list[str] = []
    with parts_take(scenario.part_s):
        outcome = simulate(scenario.plan.seed, Mode.SYNC, said.append, scenario.plan)
    backs = [line.partition("cause=")[0] for line in said if "rolling_back" in line]
    why = {next(one for one in (BACK, OVER) if one in line) for line in backs if "was not written" in line}
    return outcome.violations, why, said


CASES = {
    "a trainer dies": (lambda seed: a_trainer_dies(seed, writes_first=True), BACK),
    "before the first checkpoint": (lambda seed: a_trainer_dies(seed, writes_first=False), OVER),
    "slots move at that version": (lambda seed: slots_move(seed, every=4, part_s=3 * DRAIN_S), BACK),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("scenario", "why"), CASES.values(), ids=CASES)
def test_the_result_is_that_of_the_undisturbed_run(
    scenario: Callable[[int], Scenario], why: str, seed: int
) -> None:
    violations, found, _ = played(scenario(seed))
    assert (violations, found) == ([], {why})


def test_without_going_back_the_result_is_another_one() -> None:
    with replaced(recovery, "is_evaluation_lost", lambda job: False):
        violations, why, _ = played(a_trainer_dies(0, writes_first=True))
    assert violations
    assert not why


def test_without_keeping_a_checkpoint_for_it_more_is_trained_again() -> None:
    with replaced(commit, "way_back", lambda *_: None):
        violations, why, _ = played(a_trainer_dies(0, writes_first=True))
    assert (violations, why) == ([], {OVER})


@pytest.mark.parametrize("more", [(), (OperatorRequest(2.0, RequestKind.RESIZE, members=(3, 2)),)])
def test_a_parameter_server_whose_slots_have_moved_writes_its_part_first(
    more: tuple[OperatorRequest, ...],
) -> None:
    """Also if a resize wants it again meanwhile: then it stays."""
    violations, why, said = played(slots_move(0, 2, DRAIN_S / 3, *more))
    assert (violations, why) == ([], set())
    assert any("drained" in line for line in said)
    assert not any("rolling_back" in line or "evaluation_left_out" in line for line in said)
    left = [line for line in said if " exit pserver-" in line and float(line.split()[0]) < SOON_S]
    assert len(left) == (0 if more else 1)


def test_without_that_training_stands_until_the_evaluation_is_left_out() -> None:
    run = Drain.run

    async def only_if_asked_to_stop(drain: Drain, limit_s: float, *, asks: bool = True) -> None:
        if asks:
            await run(drain, limit_s)

    with replaced(Drain, "run", only_if_asked_to_stop):
        *_, said = played(slots_move(0, 2, DRAIN_S / 3))
    assert any("evaluation_left_out" in line for line in said)
