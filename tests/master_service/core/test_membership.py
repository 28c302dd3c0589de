"""Lane owners, generations, phases, and what users' errors cost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from master_service.core.changes import Decision
from master_service.core.decisions.lifecycle import count_failure, fail, next_stage
from master_service.core.decisions.membership import only_joins, reconcile, storage_events
from master_service.core.decisions.recovery import survivors
from master_service.core.placement import moved_lanes, place
from master_service.core.state.job import FailureBudget, Members
from master_service.core.state.metrics import Metrics
from tests.master_service.cluster import spec_of
from tests.master_service.core.members import (
    NOBODY,
    RUNNING,
    SLOTS,
    SPEC,
    TRAINERS,
    list_after,
    pservers,
    state_after,
    trainers,
    whole,
)
from trireme_shared.protocol.records import (
    FailureCause,
    JobState,
    MetricBatch,
    Mode,
    Phase,
    PserverMember,
    Restored,
    SlotMap,
    Stage,
    StepMetrics,
    TrainerList,
    UserFailure,
)
from trireme_shared.protocol.records.checkpoints import OwnCheckpoints
from trireme_shared.protocol.records.datasets import TextLines
from trireme_shared.protocol.records.queue import FailureCounts

ALONE = TrainerList(generation=4, lanes=4, names=("a",))

# ------------------------------------------------------------------ lanes


@given(
    lanes=st.integers(0, 6).map(lambda k: 2**k),
    events=st.lists(st.lists(st.integers(0, 9), unique=True, max_size=10), min_size=1, max_size=6),
)
def test_lanes_are_always_covered_once_and_evenly(lanes: int, events: list[list[int]]) -> None:
    names: tuple[str, ...] = ()
    for present in events:
        trainers = [f"t{n}" for n in present]
        names = place(lanes, names, trainers)
        assert sorted(names) == sorted(trainers)
        if not names:
            continue
        found = TrainerList(generation=1, lanes=lanes, names=names)
        covered = [lane for name in names for lane in range(*found.lanes_of(name))]
        assert covered == list(range(lanes))
        sizes = [last - first for first, last in map(found.lanes_of, names[:lanes])]
        assert max(sizes) - min(sizes) <= 1
        assert min(sizes) >= 1


def test_the_same_members_keep_their_lanes() -> None:
    assert place(4, ("b", "a"), ["a", "b"]) == ("b", "a")


def test_a_spare_takes_the_place_of_the_dead_and_nobody_else_moves() -> None:
    assert place(2, ("a", "b", "spare", "other"), ["b", "spare", "other"]) == ("spare", "b", "other")


def test_a_newcomer_is_put_where_the_fewest_lanes_move() -> None:
    assert moved_lanes(8, ("a",), place(8, ("a",), ["a", "new"])) == 4
    before = ("a", "b", "c")
    after = place(8, before, ["a", "b", "c", "new"])
    worst = max(moved_lanes(8, before, order) for order in (["new", "a", "b", "c"], ["a", "b", "c", "new"]))
    assert moved_lanes(8, before, after) <= worst


# ------------------------------------------------------------------ phases


def test_a_job_waits_and_says_for_what() -> None:
    state = JobState()
    waits = [
        (Members(), "waiting for 2 of 2 parameter servers to register"),
        (Members(pservers=pservers(0)), "waiting for 1 of 2 parameter servers to register"),
        (Members(pservers=pservers(0, 1)), "waiting for a trainer"),
        (Members(trainers("a"), pservers(0, 1)), "waiting for a trainer to initialise the parameters"),
    ]
    for members, reason in waits:
        decision = reconcile(SPEC, state, NOBODY, SLOTS, members)
        assert decision.changes == (state.model_copy(update={"reason": reason}),)
        again = reconcile(SPEC, state_after(decision), NOBODY, SLOTS, members)
        assert again == Decision(None)


def test_the_slot_map_is_written_once_when_all_pservers_are_there() -> None:
    decision = reconcile(
        SPEC, JobState(reason="waiting for a trainer"), NOBODY, None, Members(pservers=pservers(0, 1))
    )
    assert decision.changes == (SLOTS,)
    assert (
        reconcile(
            SPEC, JobState(reason="waiting for a trainer"), NOBODY, SLOTS, Members(pservers=pservers(0, 1))
        ).changes
        == ()
    )


def test_an_initialised_job_with_a_trainer_runs_in_generation_one() -> None:
    decision = reconcile(SPEC, JobState(), NOBODY, SLOTS, whole("a", "b"))
    state = state_after(decision)
    assert (state.phase, state.generation) == (Phase.RUNNING, 1)
    assert list_after(decision) == TrainerList(generation=1, lanes=4, names=("a", "b"))


@pytest.mark.parametrize(
    ("present", "reason"),
    [
        (("a", "b", "c"), "c joined"),
        (("b",), "a is gone"),
        ((), "a is gone; b is gone; waiting for a trainer"),
    ],
)
def test_every_join_and_death_is_a_new_generation_with_its_lanes(
    present: tuple[str, ...], reason: str
) -> None:
    decision = reconcile(SPEC, RUNNING, TRAINERS, SLOTS, whole(*present))
    state = state_after(decision)
    trainers = list_after(decision)
    assert (state.generation, state.reason) == (5, reason)
    assert (trainers.generation, sorted(trainers.names)) == (5, sorted(present))
    assert reconcile(SPEC, state, trainers, SLOTS, whole(*present)) == Decision(None)


def test_asynchronous_jobs_have_generations_but_no_lanes() -> None:
    spec = spec_of(mode=Mode.ASYNC, pservers=2)
    decision = reconcile(spec, RUNNING, NOBODY, SLOTS, whole("a"))
    assert [type(change) for change in decision.changes] == [TrainerList, JobState]
    assert state_after(decision).generation == 5


@pytest.mark.parametrize(
    "members",
    [
        Members(trainers("a"), pservers(0), {0: 5}, layout_revision=10, init_done=True),
        Members(trainers("a"), pservers(0, 1), {0: 5, 1: 11}, layout_revision=10, init_done=True),
    ],
    ids=["gone", "replaced by an empty one"],
)
@pytest.mark.parametrize("kind", ["coordinated", "independent"])
def test_parameters_lost_before_any_checkpoint_start_an_asynchronous_job_over(
    members: Members, kind: str
) -> None:
    spec = spec_of(mode=Mode.ASYNC, pservers=2, slot_count=128, checkpoint_kind=kind)
    assert reconcile(spec, RUNNING, ALONE, SLOTS, members) == Decision(None)
    assert [member.index for member in survivors(spec, RUNNING, SLOTS, members)] == [0], "it leaves first"
    pausing = RUNNING.model_copy(update={"phase": Phase.CHECKPOINTING})
    assert survivors(spec, pausing, SLOTS, members) == [], "the first checkpoint may still be made"
    left = replace(members, pservers=pservers(0, 1), pserver_revisions={0: 12, 1: 11})
    state = state_after(reconcile(spec, RUNNING, ALONE, SLOTS, left))
    assert (state.phase, state.timeline) == (Phase.WAITING, 5)
    assert (
        state.reason
        == "pserver-0 was replaced by an empty one and no checkpoint exists yet: training starts over"
    )


def test_independent_checkpoints_of_others_do_not_bring_lost_parameters_back() -> None:
    spec = spec_of(mode=Mode.ASYNC, pservers=2, slot_count=128, checkpoint_kind="independent")
    own = OwnCheckpoints(pserver=0, incarnation="p0", timestamp="", checksum="", kept=())
    members = Members(trainers("a"), pservers(0), {0: 5}, layout_revision=10, init_done=True, own={0: own})
    state = state_after(reconcile(spec, RUNNING, ALONE, SLOTS, members))
    assert state.phase is Phase.FAILED
    assert state.reason == "pserver-1 is gone and no checkpoint of it exists yet; start the job again"
    assert survivors(spec, RUNNING, SLOTS, members) == []


@pytest.mark.parametrize("error", ["", "no checkpoint of pserver-1 is left: 1 cannot be used: …"])
def test_a_parameter_server_that_came_back_in_vain_takes_part_when_training_has_started_over(
    error: str,
) -> None:
    """It was initialised like the others, and its answer to the loss is of another timeline: the job started
    over for ever."""
    spec = spec_of(mode=Mode.ASYNC, pservers=2, slot_count=128)
    said = Restored(timeline=0, checkpoint="", error=error, rejoined=True)
    came = {1: pservers(1)[1].model_copy(update={"restored": said})}
    members = Members(
        trainers("a"), {**pservers(0), **came}, {0: 12, 1: 11}, layout_revision=10, init_done=True
    )
    over = state_after(reconcile(spec, RUNNING, ALONE, SLOTS, members))
    assert (over.phase, over.timeline) == (Phase.WAITING, 5)
    again = replace(members, layout_revision=20)
    state = state_after(reconcile(spec, over, NOBODY, SLOTS, again))
    assert (state.phase, state.timeline, state.reason) == (Phase.RUNNING, 5, "a joined")


def test_a_pserver_may_come_and_go_before_initialisation() -> None:
    members = Members(trainers("a"), pservers(0), {0: 5})
    assert state_after(reconcile(SPEC, JobState(), NOBODY, SLOTS, members)).phase is Phase.WAITING


@pytest.mark.parametrize("phase", [Phase.COMPLETED, Phase.FAILED])
def test_a_job_that_is_over_ignores_who_comes_and_goes(phase: Phase) -> None:
    over = RUNNING.model_copy(update={"phase": phase})
    assert reconcile(SPEC, over, TRAINERS, SLOTS, Members()) == Decision(None)
    assert fail(over, "too late", FailureCause.MEMBERS) == Decision(None)


def test_stages_follow_each_other() -> None:
    without = spec_of()
    with_evaluation = spec_of(evaluation_dataset=TextLines("test.txt"))
    assert next_stage(with_evaluation, Stage.TRAIN) is Stage.EVALUATE
    assert next_stage(without, Stage.TRAIN) is Stage.EXPORT
    assert next_stage(with_evaluation, Stage.EVALUATE) is Stage.EXPORT
    assert next_stage(without, Stage.EXPORT) is Stage.DONE


# ------------------------------------------------------------------ users' errors

NO = UserFailure(error_type="ValueError", message="no")


def spend(budget: FailureBudget, failure: UserFailure, *, in_task: bool) -> str:
    """Spent and, as etcd would, kept; why the job must fail now, or ""."""
    reason = ""
    for change in count_failure(budget, JobState(phase=Phase.RUNNING), failure, in_task=in_task).changes:
        match change:
            case FailureCounts():
                budget.counts = change
            case JobState():
                assert (change.phase, change.failure) == (Phase.FAILED, failure)
                reason = change.reason
    return reason


def test_the_same_error_twice_before_the_first_step_fails_the_job_at_once() -> None:
    budget = FailureBudget(allowed=3)
    assert spend(budget, NO, in_task=True) == ""
    assert spend(budget, NO, in_task=True) == "ValueError twice before a step was known to be done: no"


def test_different_errors_before_the_first_step_use_the_budget_up() -> None:
    budget = FailureBudget(allowed=3)
    failures = [NO.model_copy(update={"message": str(n)}) for n in range(3)]
    assert [bool(spend(budget, failure, in_task=True)) for failure in failures] == [False, False, True]


def test_after_the_first_step_a_failure_inside_a_task_does_not_count_against_the_job() -> None:
    budget = FailureBudget(allowed=3, started=True)
    assert [spend(budget, NO, in_task=True) for _ in range(20)] == [""] * 20
    outside = [spend(budget, NO, in_task=False) for _ in range(3)]
    assert outside == [
        "",
        "",
        "3 failures of the user's code (max_user_failures 3), the last: ValueError: no",
    ]


def test_what_is_kept_of_the_budget_stays_small_whatever_the_errors_are() -> None:
    budget = FailureBudget(allowed=10_000, started=True)
    for number in range(1000):
        spend(budget, NO.model_copy(update={"message": "long" * 1000 + str(number)}), in_task=False)
    assert budget.counts.total == 1000
    assert len(budget.counts.to_bytes()) < 2000


def test_a_job_that_is_over_spends_nothing_more() -> None:
    budget = FailureBudget(allowed=1)
    assert count_failure(budget, JobState(phase=Phase.FAILED), NO, in_task=False) == Decision(None)


# ------------------------------------------------------------------ metrics


def batch(step: int, epoch: int, loss_sum: float, records: int) -> MetricBatch:
    return MetricBatch(
        trainer="a", steps=(StepMetrics(step=step, epoch=epoch, loss_sum=loss_sum, records=records),)
    )


def test_shares_of_a_step_add_up_and_rates_look_at_the_last_seconds() -> None:
    metrics = Metrics()
    metrics.add(batch(1, 0, 8.0, 4), 100.0)
    metrics.add(batch(1, 0, 4.0, 4), 101.0)
    metrics.add(batch(2, 0, 1.0, 12), 102.0)
    assert metrics.steps[1].loss == 1.5
    assert metrics.step == 3, "steps are numbered from 0, so these were three"
    assert metrics.epochs[0].loss == 13.0 / 20
    assert metrics.rate(102.0) == 8.0
    assert metrics.rate(1000.0) == 0.0


def test_metrics_stay_bounded() -> None:
    metrics = Metrics()
    for step in range(6000):
        metrics.add(batch(step, step, 1.0, 1), step * 1e-3)
    assert (len(metrics.steps), len(metrics.epochs), len(metrics.recent)) == (1000, 1000, 4096)
    assert next(iter(metrics.steps)) == 5000


def test_a_pserver_that_cannot_write_checkpoints_is_an_event_once_and_when_it_is_over_another():
    def seen(trouble):
        member = PserverMember(index=1, url="u", incarnation="i", host="h", pid=1, trouble=trouble)
        return Members(pservers={1: member})

    nobody = Members()
    [event] = storage_events(nobody, seen("no room for step 2"))
    assert (event.name, event.message, event.fields) == (
        "checkpoint_failed",
        "no room for step 2",
        {"pserver": 1},
    )
    assert storage_events(seen("no room for step 2"), seen("no room for step 2")) == ()
    assert storage_events(nobody, seen("")) == ()
    [event] = storage_events(seen("no room for step 2"), seen(""))
    assert event.name == "checkpoint_works_again"
    assert storage_events(seen("no room for step 2"), nobody) == ()


def test_a_pserver_that_waits_for_its_storage_is_an_event_once():
    def seen(waits):
        return Members(
            pservers={1: PserverMember(index=1, url="u", incarnation="i", host="h", pid=1, waits=waits)}
        )

    [event] = storage_events(seen(""), seen("no answer from http://s3"))
    assert (event.name, event.message, event.fields) == (
        "storage_away",
        "no answer from http://s3",
        {"pserver": 1},
    )
    assert storage_events(seen("no answer from http://s3"), seen("still none")) == ()
    assert storage_events(seen("no answer from http://s3"), seen("")) == ()


@pytest.mark.parametrize(
    ("present", "waits"), [(("a", "b", "c"), True), (("a",), False), (("a", "c"), False), ((), False)]
)
def test_only_joins_to_a_running_job_can_wait_for_others(present: tuple[str, ...], waits: bool) -> None:
    assert only_joins(RUNNING, TRAINERS, reconcile(SPEC, RUNNING, TRAINERS, SLOTS, whole(*present))) is waits
    idle = TrainerList(generation=4, lanes=4)
    first = reconcile(SPEC, RUNNING, idle, SLOTS, whole("a"))
    assert not only_joins(RUNNING, idle, first), "nobody trains: the first one does at once"


def test_news_of_a_waiting_job_can_wait_but_not_its_start_or_its_slots() -> None:
    def can_wait(state: JobState, slots: SlotMap | None, members: Members) -> bool:
        return only_joins(state, NOBODY, reconcile(SPEC, state, NOBODY, slots, members))

    assert can_wait(JobState(), SLOTS, Members())
    assert not can_wait(JobState(), None, Members(pservers=pservers(0, 1)))
    assert not can_wait(JobState(), SLOTS, whole("a"))
    assert not only_joins(RUNNING, TRAINERS, reconcile(SPEC, RUNNING, TRAINERS, SLOTS, whole("a", "b")))
