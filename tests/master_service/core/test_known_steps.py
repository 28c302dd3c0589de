"""What proves that a step was done: the same error twice ends only jobs without one."""

from __future__ import annotations

import pytest

from master_service.core.decisions.lifecycle import count_outside_tasks
from master_service.core.state.job import Job, Members
from tests.master_service.cluster import spec_of, table_of
from tests.master_service.core.members import trainers
from tests.master_service.core.test_rollback import LATEST, NEWEST
from trireme_shared.protocol.records import Holding, Mode, Phase, UserFailure
from trireme_shared.protocol.records.checkpoints import CheckpointLatest

NO = UserFailure(error_type="ValueError", message="no", trainer="b")


def a_holds(version: int) -> Members:
    (member,) = trainers("a").values()
    return Members({"a": member.model_copy(update={"holds": Holding(timeline=0, version=version)})})


def saved_after(minibatches: int) -> CheckpointLatest:
    """The first checkpoint of an asynchronous job."""
    ref = NEWEST.model_copy(update={"step": 1, "minibatches": minibatches})
    return LATEST.model_copy(update={"step": 1, "kept": (ref,)})


@pytest.mark.parametrize(
    ("mode", "found", "stepped"),
    [
        (Mode.SYNC, Members(), False),
        (Mode.SYNC, Members(latest=LATEST), True),
        (Mode.SYNC, Members(latest=LATEST.model_copy(update={"step": 0})), False),
        (Mode.SYNC, a_holds(0), False),
        (Mode.SYNC, a_holds(1), True),
        (Mode.ASYNC, Members(latest=saved_after(0)), False),
        (Mode.ASYNC, Members(latest=saved_after(1)), True),
    ],
)
def test_what_proves_a_step_to_a_leader_that_has_heard_of_no_metrics(
    mode: Mode, found: Members, stepped: bool
) -> None:
    job = Job.open(spec_of(mode=mode), table_of(4), None)
    job.members = found
    for _ in range(2):
        for change in count_outside_tasks(job, NO).changes:
            job.apply(change, 0.0)
    assert (job.state.phase is Phase.FAILED) is not stepped
