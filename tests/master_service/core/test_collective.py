"""Jobs with the collective strategy, as the master decides them: who is a member, what is waited for, where
lost parameters come from."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from master_service.core.changes import Decision, Event, ForgetParameters
from master_service.core.decisions import collective, membership, recovery
from master_service.core.decisions.collective import begins_without_some, give_up_loading, still_loading
from master_service.core.decisions.membership import missing, only_joins, storage_events
from master_service.core.queue.file_table import FileTable
from master_service.core.state.job import Job, Members
from tests.master_service.cluster import spec_of
from tests.master_service.core.members import list_after, state_after, trainers
from tests.master_service.core.test_rollback import LATEST, NEWEST, OLDER
from trireme_shared.protocol.records import (
    FailureCause,
    Holding,
    JobSpec,
    JobState,
    Mode,
    Phase,
    SlotMap,
    Stage,
    Strategy,
    TrainerList,
    TrainerMember,
)
from trireme_shared.protocol.records.job import Torn

SPEC = spec_of(mode=Mode.SYNC, strategy=Strategy.COLLECTIVE, lanes=4, pservers=0, trainers=3)
WAITING = JobState(phase=Phase.WAITING)
RUNNING = JobState(phase=Phase.RUNNING, generation=4)
NOBODY = TrainerList()
LISTED = TrainerList(generation=4, lanes=4, names=("a", "b"))
BACK = JobState(phase=Phase.ROLLING_BACK, generation=5, timeline=5, checkpoint="newest")
FIRST = Holding(timeline=0)
LOADED = Holding(timeline=5, checkpoint="newest", version=40)
DOUBTED = Holding(timeline=0, doubted=True)
BROKEN = Holding(timeline=5, checkpoint="newest", error="part 0 is damaged")


def members(says: dict[str, Holding | None], **more: object) -> Members:
    """Trainers in order of arrival, with what each says that it has. `a` gave the parameters their first
    values."""
    there = {
        name: member.model_copy(update={"holds": says[name]}) for name, member in trainers(*says).items()
    }
    return replace(Members(there, init_done=True, initialiser="a", layout_revision=10), **more)  # type: ignore[arg-type]


def reconcile(
    spec: JobSpec, state: JobState, listed: TrainerList, slots: SlotMap | None, found: Members
) -> Decision[None]:
    """As the supervisor chooses."""
    if spec.strategy is Strategy.COLLECTIVE:
        return collective.reconcile(spec, state, listed, found)
    return membership.reconcile(spec, state, listed, slots, found)


def decide(state: JobState, listed: TrainerList, found: Members, **spec: object) -> Decision[None]:
    return reconcile(SPEC.model_copy(update=spec), state, listed, None, found)


def torn(member: TrainerMember, timeline: int) -> TrainerMember:
    return member.model_copy(update={"torn": Torn(timeline=timeline, cause="step 7 is torn")})


def named(decision: Decision[None], name: str) -> Event:
    return next(event for event in decision.events if event.name == name)


# ------------------------------------------------------------------ the beginning


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (Members(), "waiting for a trainer"),
        (Members(trainers("a")), "waiting for a trainer to initialise the parameters"),
        (members({"a": None}), "waiting for a to say that it has the parameters"),
    ],
)
def test_a_job_waits_for_a_trainer_that_has_the_parameters_and_for_no_parameter_server(
    found: Members, reason: str
):
    decision = decide(WAITING, NOBODY, found)
    assert state_after(decision) == WAITING.model_copy(update={"reason": reason})
    assert decide(state_after(decision), NOBODY, found) == Decision(None)


def test_it_runs_with_those_that_have_the_parameters_and_without_a_slot_map():
    decision = decide(WAITING, NOBODY, members({"a": FIRST, "b": None, "c": FIRST}))
    assert (state_after(decision).phase, state_after(decision).generation) == (Phase.RUNNING, 1)
    assert list_after(decision).names == ("a", "c")
    assert list_after(decision).lanes == 4
    assert not any(isinstance(change, SlotMap) for change in decision.changes)


def test_it_waits_for_min_members_that_have_the_parameters():
    found = members({"a": FIRST, "b": None})
    waits = state_after(decide(WAITING, NOBODY, found, min_members=2))
    assert waits.reason == "waiting for 2 trainers that have the parameters (min_members), 1 of 2 have them"
    assert waits.phase is Phase.WAITING
    assert (
        state_after(decide(waits, NOBODY, members({"a": FIRST, "b": FIRST}), min_members=2)).phase
        is Phase.RUNNING
    )


def test_the_beginning_waits_a_moment_for_trainers_that_are_there_and_do_not_have_the_parameters_yet():
    some, all_of_them = members({"a": FIRST, "b": None}), members({"a": FIRST, "b": FIRST})
    assert begins_without_some(WAITING, some, decide(WAITING, NOBODY, some))
    assert not begins_without_some(WAITING, all_of_them, decide(WAITING, NOBODY, all_of_them))
    assert not begins_without_some(RUNNING, some, decide(RUNNING, LISTED, some))


def test_the_death_of_the_initialiser_before_anybody_has_the_parameters_starts_over():
    decision = decide(WAITING, NOBODY, members({"b": None}))
    assert ForgetParameters() in decision.changes
    again = state_after(decision)
    assert (again.phase, again.timeline, again.generation) == (Phase.WAITING, 1, 1)
    assert again.reason.startswith("a is gone, which gave the parameters their first values")
    assert decide(WAITING, NOBODY, members({"b": FIRST})).changes  # another one has them: the job runs
    assert state_after(decide(WAITING, NOBODY, members({"b": FIRST}))).phase is Phase.RUNNING


# ------------------------------------------------------------------ generations


def test_members_that_hold_what_is_listed_change_nothing():
    assert decide(RUNNING, LISTED, members({"a": FIRST, "b": FIRST, "c": None})) == Decision(None)


def test_a_dead_owner_makes_a_generation_and_its_lanes_go_to_the_others():
    decision = decide(RUNNING, LISTED, members({"a": FIRST}))
    assert (state_after(decision).generation, list_after(decision).names) == (5, ("a",))
    assert state_after(decision).reason == "b is gone"
    assert list_after(decision).lanes_of("a") == (0, 4)


def test_a_trainer_joins_once_it_has_the_parameters_of_this_timeline():
    old, failed, other = (
        Holding(timeline=3),
        Holding(timeline=0, error="no room"),
        Holding(timeline=0, checkpoint="x"),
    )
    for says in (None, old, failed, other):
        assert decide(RUNNING, LISTED, members({"a": FIRST, "b": FIRST, "c": says})) == Decision(None)
    decision = decide(RUNNING, LISTED, members({"a": FIRST, "b": FIRST, "c": FIRST}))
    assert set(list_after(decision).names) == {"a", "b", "c"}
    assert state_after(decision).reason == "c joined"
    assert only_joins(RUNNING, LISTED, decision)  # those who come within the join window make one generation


def test_a_listed_trainer_that_has_the_parameters_no_more_is_listed_no_more():
    decision = decide(RUNNING, LISTED, members({"a": FIRST, "b": None}))
    assert list_after(decision).names == ("a",)
    assert state_after(decision).reason == "b has the parameters no more"


def test_more_trainers_than_lanes_are_spares_that_take_over_in_place():
    listed = TrainerList(generation=4, lanes=2, names=("a", "b", "c"))
    decision = decide(RUNNING, listed, members({"b": FIRST, "c": FIRST}), lanes=2)
    assert list_after(decision).names == ("c", "b")


def test_fewer_than_min_members_wait_with_nobody_listed_and_go_on_where_they_were():
    one = members({"a": FIRST})
    decision = decide(RUNNING, LISTED, one, min_members=2)
    waits = state_after(decision)
    assert (waits.phase, waits.generation, waits.timeline) == (Phase.WAITING, 5, 0)
    assert list_after(decision) == TrainerList(generation=5, lanes=4)
    assert named(decision, "job_waiting").fields == {"trainers": 1, "min_members": 2}
    assert not only_joins(RUNNING, LISTED, decision)
    assert decide(waits, list_after(decision), one, min_members=2) == Decision(None)
    both = decide(waits, list_after(decision), members({"a": FIRST, "c": FIRST}), min_members=2)
    assert (state_after(both).phase, state_after(both).generation) == (Phase.RUNNING, 6)
    assert state_after(both).timeline == 0


def test_the_members_that_a_job_counts_on_are_its_trainers_also_with_a_slot_map_of_an_earlier_run():
    slots = SlotMap(version=3, owners=(0, 1) * 64)
    assert missing(SPEC, LISTED, slots, members({"a": FIRST})) == ["b"]
    assert reconcile(SPEC, RUNNING, LISTED, slots, members({"a": FIRST, "b": FIRST})) == Decision(None)
    assert job_of(RUNNING, members({}), slots=slots).pservers_needed == 0


def test_a_trainer_that_cannot_write_checkpoints_is_told_once():
    fine = members({"a": FIRST})
    away = replace(
        fine,
        trainers={"a": fine.trainers["a"].model_copy(update={"trouble": "disk full", "waits": "S3 is away"})},
    )
    assert storage_events(fine, away) == (
        Event("storage_away", "S3 is away", {"trainer": "a"}),
        Event("checkpoint_failed", "disk full", {"trainer": "a"}),
    )
    assert storage_events(away, away) == ()
    assert [event.name for event in storage_events(away, fine)] == ["checkpoint_works_again"]


# ------------------------------------------------------------------ lost parameters


@pytest.mark.parametrize("stage", [Stage.TRAIN, Stage.EVALUATE, Stage.EXPORT])
@pytest.mark.parametrize(
    ("says", "cause"),
    [
        ({}, "all previous members have left: training continues from step 40"),
        ({"c": None}, "all previous members have left: training continues from step 40"),
        (
            {"a": None, "b": Holding(timeline=3)},
            "no trainer has the parameters any more: the job goes back to step 40",
        ),
    ],
)
def test_without_anybody_who_has_the_parameters_the_job_goes_back_to_the_newest_checkpoint(
    says: dict[str, Holding | None], cause: str, stage: Stage
):
    decision = decide(RUNNING.model_copy(update={"stage": stage}), LISTED, members(says, latest=LATEST))
    back = state_after(decision)
    assert (back.phase, back.timeline, back.checkpoint, back.reason) == (
        Phase.ROLLING_BACK,
        5,
        "newest",
        cause,
    )
    assert decide(back, LISTED, members(says, latest=LATEST)) == Decision(None)


def test_one_survivor_is_enough_to_lose_nothing():
    assert state_after(decide(RUNNING, LISTED, members({"b": FIRST}, latest=LATEST))).timeline == 0


def test_a_torn_step_of_this_timeline_goes_back_although_everybody_is_there():
    whole = members({"a": FIRST, "b": FIRST}, latest=LATEST)
    bad = replace(whole, trainers={**whole.trainers, "b": torn(whole.trainers["b"], 0)})
    assert state_after(decide(RUNNING, LISTED, bad)).reason == "step 7 is torn: the job goes back to step 40"
    older = replace(whole, trainers={**whole.trainers, "b": torn(whole.trainers["b"], 9)})
    assert decide(RUNNING, LISTED, older) == Decision(None)


def test_without_a_checkpoint_the_job_starts_over_in_a_new_timeline():
    decision = decide(RUNNING, LISTED, members({"c": None}))
    again = state_after(decision)
    assert (again.phase, again.timeline, again.checkpoint) == (Phase.WAITING, 5, "")
    assert ForgetParameters() in decision.changes
    assert list_after(decision).names == ()
    # who has parameters of before is no member of it
    assert decide(again, NOBODY, Members(members({"c": FIRST}).trainers)).changes != ()
    assert Members(members({"c": FIRST}).trainers).holding(again.timeline, again.checkpoint) == ()


def test_lost_initial_parameters_that_were_saved_start_over_too():
    first = OLDER.model_copy(update={"uuid": "first", "step": 0})
    latest = LATEST.model_copy(update={"uuid": "first", "step": 0, "kept": (first,)})
    state = RUNNING.model_copy(update={"damaged": ("first",)})
    back = state_after(decide(state, LISTED, members({}, latest=latest)))
    assert (back.phase, back.checkpoint) == (Phase.ROLLING_BACK, "")
    assert ForgetParameters() in decide(back, LISTED, members({}, latest=latest)).changes


# ------------------------------------------------------------------ a roll-back


def job_of(state: JobState, found: Members, slots: SlotMap | None = None, **spec: object) -> Job:
    job = Job.open(SPEC.model_copy(update=spec), FileTable((), 1), None)
    job.state, job.members, job.trainers, job.slots = state, found, LISTED, slots
    return job


def test_a_rollback_ends_with_those_that_have_loaded_the_checkpoint():
    loading = members({"a": LOADED, "b": None, "c": Holding(timeline=0)}, latest=LATEST)
    assert decide(BACK, LISTED, loading) == Decision(None)
    assert still_loading(BACK, loading) == ["b", "c"]
    resumed = recovery.resume(job_of(BACK, loading), 0, 40, records=0, seconds=1.0)
    assert resumed.answer
    assert list_after(Decision(None, resumed.changes)).names == ("a",)
    assert state_after(Decision(None, resumed.changes)).phase is Phase.RUNNING
    assert not recovery.resume(job_of(BACK, loading, min_members=2), 0, 40, records=0, seconds=1.0).answer


def test_a_damaged_checkpoint_gives_way_to_the_one_before_once_all_say_so():
    assert decide(BACK, LISTED, members({"a": BROKEN, "b": None}, latest=LATEST)) == Decision(None)
    assert decide(BACK, LISTED, members({"a": BROKEN, "b": LOADED}, latest=LATEST)) == Decision(None)
    decision = decide(BACK, LISTED, members({"a": BROKEN, "b": BROKEN}, latest=LATEST))
    back = state_after(decision)
    assert (back.timeline, back.checkpoint, back.damaged) == (6, "older", ("newest",))
    assert named(decision, "checkpoint_unusable").message == "a: part 0 is damaged"


def test_the_job_fails_if_no_checkpoint_is_left():
    latest = LATEST.model_copy(update={"kept": (NEWEST,)})
    failed = state_after(decide(BACK, LISTED, members({"a": BROKEN}, latest=latest)))
    assert (failed.phase, failed.cause) == (Phase.FAILED, FailureCause.STORAGE)


def test_a_checkpoint_that_is_kept_no_more_is_not_damaged():
    gone = BACK.model_copy(update={"checkpoint": "superseded"})
    says = Holding(timeline=5, checkpoint="superseded", error="deleted", superseded=True)
    back = state_after(decide(gone, LISTED, members({"a": says}, latest=LATEST)))
    assert (back.checkpoint, back.damaged) == ("newest", ())


def test_a_rollback_that_takes_too_long_fails_the_job_and_names_the_storage_if_it_is_away():
    loading = members({"a": None, "b": LOADED}, latest=LATEST)
    assert give_up_loading(SPEC, BACK, loading) == Decision(None)
    two = SPEC.model_copy(update={"min_members": 2})
    failed = state_after(give_up_loading(two, BACK, loading))
    assert failed.reason == "1 of 2 trainers loaded the checkpoint within recovery_timeout_s 600, 2 must"
    assert failed.cause is FailureCause.MEMBERS
    away = {
        name: member.model_copy(update={"waits": "no route to S3"})
        for name, member in loading.trainers.items()
    }
    failed = state_after(give_up_loading(two, BACK, replace(loading, trainers=away)))
    assert (failed.cause, failed.reason[-17:]) == (FailureCause.STORAGE, " (no route to S3)")


def test_a_job_that_changes_to_the_collective_strategy_or_from_it_goes_back_to_its_newest_checkpoint():
    fresh = members({"c": None}, latest=LATEST)
    slots = SlotMap(version=1, owners=(0,) * 128)
    for strategy, pservers in ((Strategy.COLLECTIVE, 0), (Strategy.PARAMETER_SERVER, 1)):
        spec = SPEC.model_copy(update={"strategy": strategy, "pservers": pservers, "slot_count": 128})
        back = state_after(reconcile(spec, RUNNING, LISTED, slots, fresh))
        assert (back.phase, back.checkpoint) == (Phase.ROLLING_BACK, "newest")


def test_a_collective_job_that_ended_while_it_went_back_and_gets_parameter_servers_gets_a_slot_map():
    """They load by it. Seed 57111 of `tests.simulation --collective --drawn --moments --dispatch etcd`: they
    waited for it until the job failed."""
    spec = SPEC.model_copy(update={"strategy": Strategy.PARAMETER_SERVER, "pservers": 2, "slot_count": 128})
    found = members({"c": None}, latest=LATEST)
    decision = reconcile(spec, BACK, TrainerList(), None, found)
    (slots,) = [change for change in decision.changes if isinstance(change, SlotMap)]
    assert set(slots.owners) == {0, 1}
    assert not reconcile(spec, BACK, TrainerList(), slots, found).changes


# ------------------------------------------------------------------ whatever comes


HOLDINGS = st.sampled_from([None, FIRST, LOADED, BROKEN, Holding(timeline=5)])
STATES = st.sampled_from(
    [
        WAITING,
        RUNNING,
        BACK,
        RUNNING.model_copy(update={"generation": 6, "timeline": 5, "checkpoint": "newest"}),
    ]
)


@given(
    says=st.dictionaries(st.sampled_from("abcd"), HOLDINGS, max_size=4),
    state=STATES,
    saved=st.booleans(),
    least=st.integers(1, 3),
)
def test_decisions_come_to_rest_and_list_nobody_without_the_parameters(
    says: dict[str, Holding | None], state: JobState, saved: bool, least: int
):
    found, listed = members(says, latest=LATEST if saved else None), LISTED
    for _ in range(6):
        decision = decide(state, listed, found, min_members=least)
        if not decision.changes:
            break
        for change in decision.changes:
            if isinstance(change, JobState):
                assert change.generation >= state.generation
                assert change.timeline >= state.timeline
                state = change
            elif isinstance(change, TrainerList):
                listed = change
            elif isinstance(change, ForgetParameters):
                found = replace(found, init_done=False, initialiser="", layout_revision=0)
    else:
        pytest.fail(f"never at rest: {state!r}")
    having = found.holding(state.timeline, state.checkpoint)
    if state.phase is Phase.RUNNING:
        assert set(listed.names) == set(having)
        assert len(having) >= least


# ------------------------------------------------------------------ who comes back, and may be too far behind


def test_who_comes_back_is_no_member_before_it_knows_whether_it_can_follow_those_that_went_on():
    assert decide(RUNNING, LISTED, members({"a": FIRST, "b": FIRST, "c": DOUBTED})) == Decision(None)
    joined = decide(RUNNING, LISTED, members({"a": FIRST, "b": FIRST, "c": FIRST}))
    assert list_after(joined).names == ("a", "b", "c")


@pytest.mark.parametrize(
    ("listed", "says", "least"),
    [
        (NOBODY, {"a": DOUBTED, "b": DOUBTED}, 1),
        (LISTED, {"a": DOUBTED, "b": DOUBTED, "c": DOUBTED}, 1),
        (LISTED, {"a": FIRST, "c": DOUBTED}, 2),
        (NOBODY, {"a": FIRST, "c": DOUBTED}, 1),
    ],
    ids=["all were away", "nobody is sure", "too few without it", "nobody is listed"],
)
def test_where_nobody_went_on_or_too_few_all_that_have_the_parameters_are_members(
    listed: TrainerList, says: dict[str, Holding | None], least: int
):
    found, state = members(says), RUNNING if listed.names else WAITING
    decision = decide(state, listed, found, min_members=least)
    after = list_after(decision).names if decision.changes else listed.names
    assert after == tuple(says)


def test_after_training_who_comes_back_does_not_go_on_without_those_that_went_on():
    """It may lack the last steps, whose tasks are done: nobody would make them again, and what it has would
    be exported."""
    after = RUNNING.model_copy(update={"stage": Stage.EVALUATE})
    alone = decide(after, LISTED, members({"c": DOUBTED}, latest=LATEST))
    assert state_after(alone).phase is Phase.ROLLING_BACK
    assert state_after(decide(RUNNING, LISTED, members({"c": DOUBTED}, latest=LATEST))).phase is Phase.RUNNING
    for says in ({"b": DOUBTED}, {"a": FIRST, "c": DOUBTED}, {"c": FIRST}):
        decision = decide(after, LISTED, members(says, latest=LATEST))
        assert state_after(decision).phase is Phase.RUNNING


def test_who_is_listed_stays_whatever_it_doubts():
    assert decide(RUNNING, LISTED, members({"a": FIRST, "b": DOUBTED})) == Decision(None)
