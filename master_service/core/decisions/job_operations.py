"""What users ask of a whole job and what takes long: pause, resume, cancel and delete, as operations that the
cluster keeps, also of a job that nobody leads now, and of one that is deleted. Decisions only.

asked ─► its decision (cluster_jobs.py) and a RUNNING operation, in one transaction
    ├─ QUEUED, PAUSED: it is so at once ─► DONE
    ├─ the job's term ends as asked ─────► DONE
    ├─ it ends otherwise ────────────────► FAILED
    ├─ something else is asked meanwhile ► FAILED, and the next one runs
    └─ a leader that knows no operations has done it, or something else ► the next one that does ends it

Of a job one runs at a time: the same request again gets that one.
"""

from __future__ import annotations

from master_service.core.changes import Decision
from master_service.core.state.cluster import (
    ClusterChange,
    ClusterDecision,
    ClusterState,
    DropJobOperation,
    PutJobOperation,
)
from trireme_shared.protocol.errors import Conflict, TriremeError
from trireme_shared.protocol.records.cluster import ClusterJob, Standing
from trireme_shared.protocol.records.operations import Operation, OperationKind, OperationState

KEPT = 1000  # in a cluster, of those that ended
AT_ONCE = 20  # are forgotten when a new one comes

WAITS_FOR = {
    OperationKind.PAUSE: "the job saves a checkpoint, and its members leave",
    OperationKind.CANCEL: "the job's members leave",
    OperationKind.DELETE: "the job's files are deleted",
}
REACHED = {OperationKind.PAUSE: Standing.PAUSED, OperationKind.CANCEL: Standing.CANCELLED}


def begin(
    state: ClusterState, asked: Operation, decided: ClusterDecision[ClusterJob]
) -> ClusterDecision[Operation]:
    """The operation of a request that `decided` carries out. Answers the one that runs already if it is of
    the same kind."""
    job, running = decided.answer, _running(state, decided.answer.job)
    if running is not None and running.kind is asked.kind:
        return Decision(running, decided.changes, decided.events)
    changes: list[ClusterChange] = list(decided.changes)
    if running is not None:
        why = f"job {job.job} was asked to {asked.kind.lower()} before that was done"
        changes.append(_ended(job.job, running, OperationState.FAILED, why, asked.create_time, Conflict.code))
    takes_long = asked.kind is OperationKind.DELETE or (
        job.standing is Standing.ACTIVE and asked.kind in REACHED
    )
    if takes_long:
        begun = PutJobOperation(job.job, asked.with_fields(reason=WAITS_FOR[asked.kind]))
    else:
        begun = _ended(job.job, asked, OperationState.DONE, _where(job), asked.create_time)
    return Decision(begun.operation, (*changes, begun, *_surplus(state)), decided.events)


def stopped(state: ClusterState, job: ClusterJob, stamp: str) -> tuple[ClusterChange, ...]:
    """The job's term has ended, and the job is where it says now."""
    running = _running(state, job.job)
    return () if running is None else (_ended_where(job, running, stamp),)


def overtaken(state: ClusterState, stamp: str) -> ClusterDecision[bool]:
    """Ends what a leader of a version without operations carried out meanwhile, some at a time. Answers
    whether there is more. Nobody else would end them, and a deletion would be of the next job of that
    name."""
    stale = [
        (name, each)
        for name, operations in state.operations.items()
        for each in operations.values()
        if each.running and not _goes_on(state.jobs.get(name), each.kind)
    ]
    changes = [_overtaken(state, name, each, stamp) for name, each in stale[:AT_ONCE]]
    return Decision(len(stale) > AT_ONCE, tuple(changes))


def is_deleting(state: ClusterState, name: str) -> bool:
    """Of a job that cannot be read only this says so."""
    running = _running(state, name)
    return running is not None and running.kind is OperationKind.DELETE


def deleted(state: ClusterState, name: str, stamp: str) -> tuple[ClusterChange, ...]:
    running = _running(state, name)
    done = f"job {name} is deleted"
    return () if running is None else (_ended(name, running, OperationState.DONE, done, stamp),)


def not_deleted(state: ClusterState, name: str, error: Exception, stamp: str) -> ClusterDecision[None]:
    """The leader tries again by itself, and so does the same request."""
    running = _running(state, name)
    if running is None or running.kind is not OperationKind.DELETE:
        return Decision(None)
    code = error.code if isinstance(error, TriremeError) else TriremeError.code
    why = f"{error or type(error).__name__}; it is tried again"
    return Decision(None, (_ended(name, running, OperationState.FAILED, why, stamp, code),))


def _goes_on(job: ClusterJob | None, kind: OperationKind) -> bool:
    """Whether the job is still asked for it. What is asked of a job that cannot be read is not known."""
    if job is None:
        return False
    if job.standing is Standing.UNREADABLE:
        return True
    runs_still = kind is OperationKind.DELETE or job.standing is Standing.ACTIVE
    return runs_still and job.wanted == kind.lower()


def _overtaken(state: ClusterState, name: str, operation: Operation, stamp: str) -> PutJobOperation:
    job = state.jobs.get(name)
    if operation.kind is OperationKind.DELETE:
        return _ended(name, operation, OperationState.DONE, f"job {name} is deleted", stamp)
    if job is None:
        why = f"job {name} was deleted"
        return _ended(name, operation, OperationState.FAILED, why, stamp, Conflict.code)
    return _ended_where(job, operation, stamp)


def _running(state: ClusterState, name: str) -> Operation | None:
    return next((each for each in state.operations.get(name, {}).values() if each.running), None)


def _where(job: ClusterJob) -> str:
    return f"job {job.job} is {job.standing}" + (f": {job.reason}" if job.reason else "")


def _ended_where(job: ClusterJob, operation: Operation, stamp: str) -> PutJobOperation:
    """As the job has come where it was asked to, or has not."""
    if job.standing is REACHED.get(operation.kind):
        return _ended(job.job, operation, OperationState.DONE, _where(job), stamp)
    return _ended(job.job, operation, OperationState.FAILED, _where(job), stamp, Conflict.code)


def _ended(
    name: str, operation: Operation, state: OperationState, reason: str, stamp: str, code: str = ""
) -> PutJobOperation:
    ended = operation.with_fields(state=state, reason=reason, error_code=code, end_time=stamp)
    return PutJobOperation(name, ended)


def _surplus(state: ClusterState) -> tuple[DropJobOperation, ...]:
    """What a new one takes the place of, the oldest first."""
    ended = [
        (each.create_time, name, each.operation_id)
        for name, operations in state.operations.items()
        for each in operations.values()
        if not each.running
    ]
    many = len(ended) + 1 - KEPT
    if many <= 0:
        return ()
    return tuple(DropJobOperation(name, each) for _, name, each in sorted(ended)[: min(many, AT_ONCE)])
