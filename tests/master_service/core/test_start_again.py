"""What a failed job remembers of its failure, and what follows when the user starts it again."""

from __future__ import annotations

import asyncio
import random

import pytest

from master_service.core.changes import RestartQueue
from master_service.core.decisions.lifecycle import cause_of, fail, start_again
from master_service.store.start_again import start_again as write_start_again
from shared.errors import Conflict, DatasetError, StorageUnreachable
from shared.etcd import Etcd
from shared.keys import Keys
from shared.records import EvaluationSums, FailureCause, JobState, Phase, Stage, TaskKind, UserFailure
from tests.equipment.etcd.simulated import SimulatedEtcd
from tests.equipment.virtual_loop import VirtualLoop, run
from tests.master_service.core.members import RUNNING, state_after

AWAY = RUNNING.model_copy(update={"damaged": ("c1",), "absent": (1,), "timeline": 3, "checkpoint": "c0"})
KEYS = Keys("ctr")


@pytest.mark.parametrize(
    ("error_type", "cause"),
    [
        ("KeyError", FailureCause.SCRIPT),
        ("LAYOUT_MISMATCH", FailureCause.SCRIPT),
        (DatasetError.code, FailureCause.DATASET),
        (StorageUnreachable.code, FailureCause.STORAGE),
    ],
)
def test_the_error_tells_whether_the_script_is_the_cause(error_type: str, cause: FailureCause) -> None:
    assert cause_of(UserFailure(error_type=error_type, message="no")) is cause
    assert cause_of(None) is FailureCause.MEMBERS


@pytest.mark.parametrize("cause", [FailureCause.MEMBERS, FailureCause.STORAGE, FailureCause.DATASET])
def test_a_job_that_did_not_fail_by_its_script_waits_for_members_again_where_it_was(cause: FailureCause) -> None:
    failed = state_after(fail(AWAY, "pserver-1 did not come back", cause))
    assert (failed.phase, failed.cause) == (Phase.FAILED, cause)
    decision = start_again(failed)
    again = state_after(decision)
    expected = {"phase": Phase.WAITING, "damaged": (), "absent": (), "reason": again.reason}
    assert again == AWAY.model_copy(update=expected)
    assert again.reason == "started again after: pserver-1 did not come back"
    assert len(decision.changes) == 1


@pytest.mark.parametrize("state", [RUNNING, JobState(phase=Phase.FAILED), JobState(phase=Phase.COMPLETED)])
def test_other_jobs_stay_as_they_are(state: JobState) -> None:
    assert not start_again(state).answer
    assert not start_again(state_after(fail(RUNNING, "KeyError", FailureCause.SCRIPT))).answer


def test_tasks_that_ended_the_job_are_given_again() -> None:
    exporting = RUNNING.model_copy(update={"stage": Stage.EXPORT})
    decision = start_again(state_after(fail(exporting, "no space", FailureCause.STORAGE)))
    assert decision.changes[1:] == (RestartQueue(TaskKind.EXPORT),)
    evaluating = RUNNING.model_copy(update={"stage": Stage.EVALUATE})
    decision = start_again(state_after(fail(evaluating, "no file", FailureCause.DATASET)))
    assert decision.changes[1:] == (RestartQueue(TaskKind.EVALUATE), EvaluationSums())


def test_it_is_written_once_and_never_beside_a_master() -> None:
    async def main() -> None:
        etcd = Etcd(SimulatedEtcd().transport("launcher"))
        assert not await write_start_again(etcd, KEYS), "a new job"
        exporting = RUNNING.model_copy(update={"stage": Stage.EXPORT})
        failed = state_after(fail(exporting, "no space", FailureCause.STORAGE))
        await etcd.put(KEYS.state, failed.to_bytes())
        await etcd.put(KEYS.discarded("export-0@0"), b"{}")
        await etcd.put(KEYS.master_lock, b"{}")
        with pytest.raises(Conflict, match="a master runs already"):
            await write_start_again(etcd, KEYS)
        await etcd.delete(KEYS.master_lock)
        assert await write_start_again(etcd, KEYS)
        found = await etcd.get(KEYS.state)
        assert found is not None
        assert JobState.model_validate_json(found.value).phase is Phase.WAITING
        assert await etcd.get(KEYS.discarded("export-0@0")) is None
        assert not await write_start_again(etcd, KEYS)

    rng = random.Random(7)
    run(VirtualLoop(rng), asyncio.wait_for(main(), 60), rng)
