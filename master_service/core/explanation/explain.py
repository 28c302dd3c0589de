"""Why a job does not progress and what to do: a pure function of the job and of what its leader has observed.

over? ─► obstacles (nothing can be trained) ─► still: who is waited for, else NO_PROGRESS ─► notes
                                          `──► moving: PROGRESS_IS_FINE, who is waited for ─► notes

A new situation is one rule in one of the tuples below, one Code, and one row in docs/explain.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from master_service.core.explanation import collective, obstacles, reports, training
from master_service.core.explanation.cause import Cause, Explanation, explanation_of
from master_service.core.explanation.situation import Situation

Rule = Callable[[Situation], Cause | None]

ENDS: Sequence[Rule] = (obstacles.completed, obstacles.failed)
OBSTACLES: Sequence[Rule] = (
    obstacles.etcd_full,
    obstacles.etcd_silent,
    obstacles.storage_away,
    obstacles.rolling_back,
    collective.rolling_back,
    obstacles.nobody_can_start,
    obstacles.pservers_missing,
    obstacles.no_trainer,
    obstacles.pause,
    obstacles.initialising,
    collective.fewer_than_min_members,
    obstacles.waiting,
)
AWAITED: Sequence[Rule] = (
    training.silent_member,
    training.lanes_not_started,
    reports.refusals,
    reports.start_failures,
    reports.failing_tasks,
    training.awaited_slower_trainer,  # before late tasks: a task may be late because its trainer waits
    training.late_tasks,
    training.awaited_evaluation,
    training.slow_minibatch,
)
NOTES: Sequence[Rule] = (
    training.absent_pservers,
    training.failing_checkpoints,
    training.waiting_operations,
    training.discarded_tasks,
    training.trainers_without_lanes,
    training.fewer_trainers,
    collective.fetching,
)


def explain(now: Situation) -> Explanation:
    """The most important cause first."""
    name = now.job.spec.job
    if ends := _apply(ENDS, now):
        return explanation_of(name, *ends)
    obstacles_now = _apply(OBSTACLES, now)
    awaited, notes = _apply(AWAITED, now), _apply(NOTES, now)
    if obstacles_now:
        known = {cause.code for cause in obstacles_now}
        rest = [cause for cause in (*awaited, *notes) if cause.code not in known]
        return explanation_of(name, *obstacles_now, *rest)
    if now.is_still:
        return explanation_of(name, *(awaited or [training.no_progress(now)]), *notes)
    return explanation_of(name, training.progress(now), *awaited, *notes)


def _apply(rules: Sequence[Rule], now: Situation) -> list[Cause]:
    """What the rules found, in their order."""
    return [cause for rule in rules if (cause := rule(now)) is not None]
