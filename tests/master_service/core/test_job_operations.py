"""What is asked of a whole job, as an operation: how it begins, how it ends, and how long it is kept."""

from __future__ import annotations

import pytest

from master_service.core.decisions import cluster_jobs, job_operations
from master_service.core.decisions.job_operations import AT_ONCE, KEPT
from master_service.core.state.cluster import ClusterDecision, ClusterState, PutJobOperation
from tests.master_service.core.cluster_jobs import WALL, active, deleted, job_of, state_of
from trireme_shared.protocol.records.cluster import ClusterJob, Standing
from trireme_shared.protocol.records.operations import Operation, OperationKind, OperationState

STAMP = "2027-01-15T08:00:00.000+00:00"


def asked(kind: str, number: int = 1) -> Operation:
    return Operation(operation_id=f"op-{number}", kind=OperationKind(kind), limit_s=0.0, create_time=STAMP)


def done(state: ClusterState, decision: ClusterDecision[Operation]) -> Operation:
    for change in decision.changes:
        state.apply(change, 0.0)
    return decision.answer


def begun(state: ClusterState, kind: str, number: int, decided: ClusterDecision[ClusterJob]) -> Operation:
    return done(state, job_operations.begin(state, asked(kind, number), decided))


def states(state: ClusterState) -> dict[str, tuple[OperationState, str]]:
    return {each.operation_id: (each.state, each.error_code) for each in state.operations["a"].values()}


@pytest.mark.parametrize(
    ("wanted", "kind", "standing", "ended"),
    [
        ("pause", "PAUSE", Standing.PAUSED, (OperationState.DONE, "")),
        ("pause", "PAUSE", Standing.COMPLETED, (OperationState.FAILED, "CONFLICT")),
        ("pause", "PAUSE", Standing.QUEUED, (OperationState.DONE, "")),  # preempted: it is PAUSED then
        ("cancel", "CANCEL", Standing.CANCELLED, (OperationState.DONE, "")),
        ("cancel", "CANCEL", Standing.FAILED, (OperationState.FAILED, "CONFLICT")),
    ],
)
def test_an_operation_of_a_job_that_runs_ends_with_its_term(wanted, kind, standing, ended):
    state = state_of(active("a"))
    ask = cluster_jobs.pause(state, "a") if wanted == "pause" else cluster_jobs.cancel(state, "a", STAMP)
    assert begun(state, kind, 1, ask).running
    for change in cluster_jobs.finish(state, "a", standing, "it stopped", STAMP).changes:
        state.apply(change, 0.0)
    assert states(state) == {"op-1": ended}
    assert state.operations["a"]["op-1"].end_time == STAMP


def test_a_job_that_fails_because_nothing_more_can_be_written_about_it_ends_its_operation():
    state = state_of(active("a"))
    assert begun(state, "PAUSE", 1, cluster_jobs.pause(state, "a")).running
    for change in cluster_jobs.fail(state, "a", "too large", STAMP).changes:
        state.apply(change, 0.0)
    assert states(state) == {"op-1": (OperationState.FAILED, "CONFLICT")}


def test_the_deletion_of_a_job_that_cannot_be_read_is_finished_by_the_next_leader():
    """Its record says nothing, and nobody would go on."""
    state = state_of(job_of("a", standing=Standing.UNREADABLE), job_of("b", standing=Standing.UNREADABLE))
    assert begun(state, "DELETE", 1, cluster_jobs.begin_delete(state, "a")).running
    assert cluster_jobs.due_for_deletion(state, WALL, None) == ["a"]


@pytest.mark.parametrize(
    ("kind", "now", "ended"),
    [
        ("PAUSE", job_of("a", standing=Standing.PAUSED, wanted="pause"), (OperationState.DONE, "")),
        ("PAUSE", job_of("a", wanted="run"), (OperationState.FAILED, "CONFLICT")),  # resumed after that
        ("PAUSE", active("a", wanted="pause"), (OperationState.RUNNING, "")),
        ("PAUSE", active("a", wanted="cancel"), (OperationState.FAILED, "CONFLICT")),
        ("CANCEL", job_of("a", standing=Standing.CANCELLED, wanted="cancel"), (OperationState.DONE, "")),
        ("CANCEL", None, (OperationState.FAILED, "CONFLICT")),
        ("DELETE", None, (OperationState.DONE, "")),
        ("DELETE", job_of("a", standing=Standing.COMPLETED), (OperationState.DONE, "")),  # of the next job
        ("DELETE", job_of("a", standing=Standing.FAILED, wanted="delete"), (OperationState.RUNNING, "")),
        ("DELETE", job_of("a", standing=Standing.UNREADABLE), (OperationState.RUNNING, "")),
    ],
)
def test_what_a_leader_without_operations_has_carried_out_is_ended_by_the_next_one(kind, now, ended):
    """It ran for ever, and a deletion took the next job of that name with it."""
    state = state_of(*([now] if now is not None else []))
    state.apply(PutJobOperation("a", asked(kind)), 0.0)
    decided = job_operations.overtaken(state, STAMP)
    for change in decided.changes:
        state.apply(change, 0.0)
    assert states(state) == {"op-1": ended}
    assert not decided.answer


def test_many_operations_are_ended_some_at_a_time():
    state = state_of()
    for number in range(AT_ONCE + 1):
        state.apply(PutJobOperation(f"j{number}", asked("PAUSE", number)), 0.0)
    first = job_operations.overtaken(state, STAMP)
    for change in first.changes:
        state.apply(change, 0.0)
    assert (first.answer, len(first.changes)) == (True, AT_ONCE)
    last = job_operations.overtaken(state, STAMP)
    assert (last.answer, len(last.changes)) == (False, 1)


def test_an_operation_does_not_delete_the_next_job_of_its_name():
    """A leader without operations had finished it."""
    state = state_of(job_of("a", standing=Standing.COMPLETED, end_time=STAMP))
    state.apply(PutJobOperation("a", asked("DELETE")), 0.0)
    assert cluster_jobs.due_for_deletion(state, WALL, None) == []


def test_the_same_request_gets_the_operation_that_runs_and_another_one_ends_it():
    state = state_of(active("a"))
    assert begun(state, "PAUSE", 1, cluster_jobs.pause(state, "a")).running
    assert begun(state, "PAUSE", 2, cluster_jobs.pause(state, "a")).operation_id == "op-1"
    assert begun(state, "CANCEL", 3, cluster_jobs.cancel(state, "a", STAMP)).running
    assert states(state) == {
        "op-1": (OperationState.FAILED, "CONFLICT"),
        "op-3": (OperationState.RUNNING, ""),
    }
    assert "asked to cancel" in state.operations["a"]["op-1"].reason


def test_what_takes_no_time_is_done_at_once_and_a_deletion_outlives_its_job():
    state = state_of(job_of("a"))
    assert begun(state, "PAUSE", 1, cluster_jobs.pause(state, "a")).state is OperationState.DONE
    assert begun(state, "RESUME", 2, cluster_jobs.resume(state, "a")).state is OperationState.DONE
    assert begun(state, "CANCEL", 3, cluster_jobs.cancel(state, "a", STAMP)).state is OperationState.DONE
    assert begun(state, "DELETE", 4, cluster_jobs.begin_delete(state, "a")).running
    done(state, job_operations.not_deleted(state, "a", OSError("disk gone"), STAMP))  # type: ignore[arg-type]
    assert states(state)["op-4"] == (OperationState.FAILED, "INTERNAL")
    assert begun(state, "DELETE", 5, cluster_jobs.begin_delete(state, "a")).running
    for change in deleted(state, "a").changes:
        state.apply(change, 0.0)
    assert "a" not in state.jobs
    assert states(state)["op-5"] == (OperationState.DONE, "")


def test_a_bounded_number_is_kept_the_newest_and_all_that_run():
    state = state_of(active("a"), job_of("b"))
    assert begun(state, "PAUSE", 0, cluster_jobs.pause(state, "a")).running
    for number in range(1, KEPT + 50):
        stamp = f"2027-01-15T08:00:00.{number:06}+00:00"
        ended = asked("RESUME", number).with_fields(create_time=stamp, state=OperationState.DONE)
        state.apply(PutJobOperation("c", ended), 0.0)
    for number in range(KEPT + 50, KEPT + 60):
        decided = job_operations.begin(state, asked("RESUME", number), cluster_jobs.resume(state, "b"))
        assert len(decided.changes) <= AT_ONCE + 2
        done(state, decided)
    kept = [each for operations in state.operations.values() for each in operations.values()]
    assert sum(not each.running for each in kept) == KEPT
    assert state.operations["a"]["op-0"].running
    assert "op-1" not in state.operations["c"]
    assert f"op-{KEPT + 49}" in state.operations["c"]
