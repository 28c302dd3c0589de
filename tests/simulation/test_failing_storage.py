"""The storage fails for some seconds just when an evaluated version, or the last one, is written: the job
waits for it, and ends as the undisturbed run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.equipment.cluster.network import STEADY
from tests.equipment.replaced import replaced
from tests.simulation.collective import collective_plan
from tests.simulation.compute import Speed
from tests.simulation.failing_storage import StorageError, StorageFault
from tests.simulation.plans import Plan, plan_of
from tests.simulation.run import simulate
from trainer_agent.loops import evaluate_export
from trainer_agent.loops.evaluating import read_checkpoint
from trireme_shared.protocol.records import Mode

FAILS_S = 8.0
ENOUGH_S = 60.0  # without another attempt the job waits for ten minutes


def short(drawn: Plan, *, tables: bool, kinds: tuple[str, ...], member: str) -> Plan:
    """A job of a few seconds, whose result depends on its evaluations, on a storage that fails at once."""
    job = replace(
        drawn.job, files=(12,), task_records=4, minibatch=2, lanes=2, epochs=1, schedule="none", tables=tables
    )
    fault = StorageFault(member, 0.0, FAILS_S, kinds, StorageError.FULL)
    given = {"evaluate": True, "evaluate_every": 2, "keep_best": "value:min", "checkpoint_every": None}
    steady = {
        "conditions": STEADY,
        "faults": (),
        "requests": (),
        "slow": 1.0,
        "speed": Speed(0.05, 0.1),
        "masters": 1,
    }
    return replace(drawn, job=job, trainers=2, storage_faults=(fault,), storage_s=0.0, **given, **steady)


@pytest.mark.parametrize("what", ["write", "commit"])
@pytest.mark.parametrize("tables", [False, True], ids=["without tables", "with tables"])
def test_a_collective_job_goes_on_once_the_storage_works(what, tables):
    for member in ("trainer-0", "trainer-1"):
        plan = short(collective_plan(0), tables=tables, kinds=(what,), member=member)
        outcome = simulate(0, Mode.SYNC, plan=plan)
        assert not outcome.violations, f"\n  {outcome}"
        assert outcome.seconds < ENOUGH_S


@pytest.mark.parametrize("what", ["write", "commit"])
def test_a_job_with_parameter_servers_goes_on_once_the_storage_works(what):
    plan = replace(short(plan_of(0, Mode.SYNC), tables=False, kinds=(what,), member="pserver-0"), pservers=1)
    outcome = simulate(0, Mode.SYNC, plan=plan)
    assert not outcome.violations, f"\n  {outcome}"
    assert outcome.seconds < ENOUGH_S


def test_the_last_version_is_saved_although_an_evaluated_one_waits_to_be_written():
    """Writing takes a second at one of the trainers."""
    plan = replace(short(collective_plan(0), tables=False, kinds=(), member=""), storage_faults=())
    said: list[str] = []
    outcome = simulate(0, Mode.SYNC, said.append, plan)
    assert not outcome.violations, f"\n  {outcome}"
    committed = [line.partition("step=")[2].split()[0] for line in said if "checkpoint_committed" in line]
    assert committed == ["0", "2", "4"]


@pytest.mark.parametrize("best", ["value:min", "value:max"])
def test_the_best_model_is_exported_although_its_files_could_not_be_read_at_once(best):
    """One of the two is not the last version."""
    failed: list[OSError] = []

    def read(*given: Any) -> Any:
        if len(failed) < 2:
            failed.append(StorageError.AWAY.to_error())
            raise failed[-1]
        return read_checkpoint(*given)

    for drawn in (collective_plan(0), plan_of(0, Mode.SYNC)):
        failed.clear()
        plan = replace(short(drawn, tables=False, kinds=(), member=""), keep_best=best, storage_faults=())
        with replaced(evaluate_export, "read_checkpoint", read):
            outcome = simulate(0, Mode.SYNC, plan=plan)
        assert not outcome.violations, f"\n  {outcome}"
