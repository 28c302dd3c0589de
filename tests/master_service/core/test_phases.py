"""Phases of a job: the table of what may follow what, and one constructor for each event."""

from __future__ import annotations

import pytest

from master_service.core.state import phases
from master_service.core.state.phases import TRANSITIONS, PhaseEvent, after
from trireme_shared.protocol.records import FailureCause, JobResult, JobState, Phase, Stage
from trireme_shared.protocol.records.job import Saving

MAKERS = {
    PhaseEvent.REGROUP: lambda state: phases.regrouped(state, "why"),
    PhaseEvent.FALL_SHORT: lambda state: phases.short_of_members(state, "why"),
    PhaseEvent.GO_BACK: lambda state: phases.rolling_back(state, "uuid", "why"),
    PhaseEvent.RESTORE: lambda state: phases.restored(state, Stage.TRAIN, "why"),
    PhaseEvent.START_OVER: lambda state: phases.started_over(state, "why"),
    PhaseEvent.PAUSE: lambda state: phases.checkpointing(state, Saving(uuid="u", step=1), "why"),
    PhaseEvent.CONTINUE: lambda state: phases.training_continues(state, 3, "why"),
    PhaseEvent.COMPLETE: lambda state: phases.completed(state, JobResult()),
    PhaseEvent.FAIL: lambda state: phases.failed(state, "why", FailureCause.SCRIPT, None),
    PhaseEvent.START_AGAIN: phases.started_again,
    PhaseEvent.TRAIN_LONGER: lambda state: phases.trained_longer(state, "why"),
}


@pytest.mark.parametrize("event", PhaseEvent)
@pytest.mark.parametrize("phase", Phase)
def test_a_constructor_gives_the_phase_of_the_table_or_refuses(phase, event):
    state = JobState(phase=phase, generation=2, timeline=1, reason="before")
    if (phase, event) in TRANSITIONS:
        assert MAKERS[event](state).phase is TRANSITIONS[phase, event]
    else:
        with pytest.raises(RuntimeError, match=f"a job that is {phase} cannot {event}"):
            MAKERS[event](state)


def test_a_final_job_changes_only_by_its_user():
    met = {event for phase, event in TRANSITIONS if phase.final}
    assert met == {PhaseEvent.START_AGAIN, PhaseEvent.TRAIN_LONGER}


def test_every_phase_is_reached_from_the_first_one():
    reached = {Phase.WAITING}
    for _ in Phase:
        reached |= {to for (phase, _), to in TRANSITIONS.items() if phase in reached}
    assert reached == set(Phase)


def test_the_error_says_where_the_event_is_possible():
    with pytest.raises(RuntimeError, match="that is possible in RUNNING only"):
        after(Phase.FAILED, PhaseEvent.PAUSE)


def test_a_timeline_that_begins_forgets_who_was_gone():
    state = JobState(
        phase=Phase.RUNNING, generation=7, absent=(1,), mended=6, mends={"1": "a"}, joined={"2": "b"}
    )
    back = phases.rolling_back(state, "uuid", "why")
    assert (back.generation, back.timeline, back.checkpoint) == (8, 8, "uuid")
    assert (back.absent, back.mended, back.mends, back.joined) == ((), 0, {}, {})
