"""An evaluation whose checkpoint is lost, in a synchronous job whose result depends on it: the job goes back, and makes that version again.

a later checkpoint is the latest, or its files are damaged ─► back to the newest checkpoint before it ─► the version is made, saved and evaluated
the first evaluation, before any checkpoint was there ─► training starts over
no such checkpoint is kept, or TIMES times ─► left out (evaluation.begin, evaluation.leave_out)
"""

from __future__ import annotations

from collections.abc import Sequence

from master_service.core.changes import Decision
from master_service.core.decisions.evaluations import evaluation
from master_service.core.decisions.recovery import rollback
from master_service.core.state.job import Job
from trireme_shared.checkpoints.schedule import way_back
from trireme_shared.protocol.errors import CheckpointUnusable
from trireme_shared.protocol.evaluations import results_count
from trireme_shared.protocol.records import Phase, Stage, UserFailure
from trireme_shared.protocol.records.checkpoints import CheckpointRef

TIMES = 3


def is_lost(job: Job) -> bool:
    """Whether the checkpoint of the first evaluation that is not over cannot come any more, and the job can go back for it."""
    state, status, mine = job.state, job.evaluation, evaluation.of_history(job)
    stands = state.phase is not Phase.RUNNING or state.stage not in (Stage.TRAIN, Stage.EVALUATE)
    if stands or not mine or status.timeline != state.timeline:
        return False
    number = status.settled + 1
    due = any(ref.evaluation == number and ref.uuid not in state.damaged for ref in mine)
    if status.running is not None or due or status.stops_before(number) or mine[0].leads_to(number):
        return False
    return _way_back(job, number) is not None or _begins_anew(job, mine)


def go_back(job: Job) -> Decision[bool]:
    """Answers whether the job goes back."""
    if not is_lost(job):
        return Decision(False)
    number = job.evaluation.settled + 1
    return Decision(True) + _redo(job, number, f"the checkpoint of evaluation {number} was not written")


def give_up(job: Job, failure: UserFailure | None, cause: str) -> Decision[None]:
    """The checkpoint of the evaluation that runs could not be read: the job goes back if its files are damaged, else goes on without."""
    running = job.evaluation.running
    assert running is not None
    damaged = failure is not None and failure.error_type == CheckpointUnusable.code
    if damaged and job.state.phase is Phase.RUNNING and _way_back(job, running.number, running.ref.uuid) is not None:
        return _redo(job, running.number, f"the checkpoint of evaluation {running.number} is damaged", running.ref.uuid)
    return evaluation.leave_out(job, running.number, cause)


def _way_back(job: Job, number: int, damaged: str = "") -> CheckpointRef | None:
    latest, mine, (redone, times) = job.members.latest, evaluation.of_history(job), job.evaluation.redone
    if latest is None or not mine or (redone == number and times >= TIMES):
        return None
    return way_back(job.spec, number, latest.kept, mine[0], {*job.state.damaged, damaged})


def _begins_anew(job: Job, mine: Sequence[CheckpointRef]) -> bool:
    """Whether no checkpoint was there yet before the version of the first evaluation. From then on one is kept from which it can be made again."""
    if job.evaluation.settled or job.state.damaged or not results_count(job.spec):
        return False
    return not any(ref.evaluated_before is None or ref.leads_to(1) for ref in mine)


def _redo(job: Job, number: int, cause: str, damaged: str = "") -> Decision[None]:
    ref, (redone, times) = _way_back(job, number, damaged), job.evaluation.redone
    if ref is None:
        return rollback.back_to_start(job.state, f"{cause}, and no checkpoint before it: training starts over")
    state = job.state.with_fields(damaged=(*job.state.damaged, damaged)) if damaged else job.state
    counted = job.evaluation.with_fields(redone=(number, times + 1 if redone == number else 1))
    return Decision(None, (counted,)) + rollback.back_to(job.spec, state, job.slots, ref, cause)
