"""Lanes follow the measured speed: every lane has one owner, steps get faster, and nothing moves for
little."""

from __future__ import annotations

import random
from collections import deque
from itertools import accumulate, pairwise
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from master_service.core.changes import Decision
from master_service.core.decisions.membership import rebalance
from master_service.core.placement import (
    ALIGNING_COSTS,
    WORTH_MOVING,
    aligned,
    cut,
    new_list,
    runs_of,
    slowest_s,
    step_s,
)
from master_service.core.queue.file_table import FileTable, TableFile
from master_service.core.state import metrics as speeds_module
from master_service.core.state.job import Job
from master_service.core.state.metrics import REPORTS, SPEED_WINDOW_S, Speeds
from tests.master_service.cluster import spec_of
from tests.master_service.core.members import list_after, state_after
from trireme_shared.protocol.lanes import aligned_intervals, share_of
from trireme_shared.protocol.records import JobSpec, JobState, Phase, TrainerList

SECONDS = st.floats(0.01, 100.0)


def sync_spec(lanes: int, **fields: object) -> JobSpec:
    return spec_of(mode="sync", lanes=lanes, global_batch_size=lanes, **fields)


def job_of(spec: JobSpec, trainers: TrainerList, lane_s: dict[str, float]) -> Job:
    job = Job.open(spec, FileTable((TableFile("f", 64),), 4), None)
    job.trainers = trainers
    job.state = JobState(phase=Phase.RUNNING, generation=trainers.generation)
    for trainer, seconds in lane_s.items():
        job.speeds.note(trainer, seconds, None, 0.0)
    return job


def nodes_of(shares: list[int]) -> int:
    ends = [0, *accumulate(shares)]
    return sum(len(aligned_intervals(first, last)) for first, last in pairwise(ends))


def assert_covered_once(found: TrainerList, lanes: int) -> None:
    covered = [lane for name in found.names for lane in range(*found.lanes_of(name))]
    assert covered == list(range(lanes))
    assert [found.owners[found.place_of(lane)] for lane in range(lanes)] == [
        name for name in found.names for _ in range(*found.lanes_of(name))
    ]
    assert all(found.lanes_of(name) != (0, 0) for name in found.owners)
    assert all(found.lanes_of(name) == (0, 0) for name in found.names[found.owner_count :])


# ------------------------------------------------------------------ shares


@given(lanes=st.integers(0, 8).map(lambda k: 2**k), lane_s=st.lists(SECONDS, min_size=1, max_size=20))
def test_no_other_shares_make_a_shorter_step(lanes: int, lane_s: list[float]) -> None:
    shares = cut(lanes, lane_s)
    assert sum(shares) == lanes
    shortest = slowest_s(shares, lane_s)
    # within less time all trainers together do not come to so many lanes
    assert sum(int(shortest * (1 - 1e-9) / seconds) for seconds in lane_s) < lanes


def test_equal_trainers_get_equal_shares() -> None:
    assert cut(8, [0.5] * 5) == [last - first for first, last in (share_of(8, 5, n) for n in range(5))]


def test_a_very_slow_trainer_gets_no_lane() -> None:
    assert cut(8, [1.0, 1.0, 1.0, 5.0]) == [3, 3, 2, 0]
    assert cut(16, [1.0, 1.0, 1.0, 5.0]) == [5, 5, 5, 1]


@given(lanes=st.integers(3, 10).map(lambda k: 2**k), lane_s=st.lists(SECONDS, min_size=1, max_size=8))
def test_aligned_shares_cost_little_time_and_no_trainer_its_last_lane(
    lanes: int, lane_s: list[float]
) -> None:
    shares = [share for share in cut(lanes, lane_s) if share]
    working = [seconds for seconds, share in zip(lane_s, cut(lanes, lane_s), strict=True) if share]
    fitted = aligned(shares, working)
    assert sum(fitted) == lanes
    assert min(fitted) >= 1
    assert slowest_s(fitted, working) <= ALIGNING_COSTS * slowest_s(shares, working) * (1 + 1e-9)


def test_aligned_shares_are_pushed_in_fewer_nodes() -> None:
    lane_s = [1.0, 1.02, 1.01, 1.3]
    shares = cut(256, lane_s)
    assert nodes_of(aligned(shares, lane_s)) < nodes_of(shares) / 2


def test_runs_are_short_where_many_trainers_have_the_same() -> None:
    assert runs_of([1] * 500 + [0, 2] + [1] * 498) == ((1, 500), (0, 1), (2, 1), (1, 498))


# ------------------------------------------------------------------ the list


@given(
    lanes=st.integers(0, 6).map(lambda k: 2**k),
    events=st.lists(
        st.dictionaries(st.integers(0, 9), st.none() | SECONDS, min_size=1, max_size=10),
        min_size=1,
        max_size=6,
    ),
)
def test_every_lane_has_one_owner_whoever_joins_leaves_or_is_slow(
    lanes: int, events: list[dict[int, float | None]]
) -> None:
    spec, listed = sync_spec(lanes), TrainerList()
    for generation, present in enumerate(events, start=1):
        names = [f"t{number}" for number in present]
        lane_s = {f"t{number}": seconds for number, seconds in present.items() if seconds is not None}
        before, listed = listed, new_list(spec, listed, generation, names, lane_s)
        assert sorted(listed.names) == sorted(names)
        assert_covered_once(listed, lanes)
        assert before.changed(before.change_to(listed)) == listed


@given(lanes=st.integers(0, 6).map(lambda k: 2**k), lane_s=st.lists(SECONDS, min_size=1, max_size=12))
def test_a_list_by_speed_is_worth_it_and_stays(lanes: int, lane_s: list[float]) -> None:
    spec, names = sync_spec(lanes), tuple(f"t{number}" for number in range(len(lane_s)))
    known = dict(zip(names, lane_s, strict=True))
    even = TrainerList(generation=1, lanes=lanes, names=names)
    job = job_of(spec, even, known)
    decision = rebalance(job)
    if not decision.changes:
        return
    after = list_after(decision)
    assert step_s(even, known) > WORTH_MOVING * step_s(after, known)
    assert state_after(decision).generation == after.generation == 2
    job.trainers, job.state = after, state_after(decision)
    assert rebalance(job) == Decision(None)


def test_lanes_leave_the_slow_one_and_come_back_when_it_is_fast_again() -> None:
    spec, names = sync_spec(16), ("a", "b", "c", "d")
    job = job_of(
        spec, TrainerList(generation=1, lanes=16, names=names), dict.fromkeys(names, 1.0) | {"c": 5.0}
    )
    decision = rebalance(job)
    job.trainers, job.state = list_after(decision), state_after(decision)
    assert [last - first for first, last in map(job.trainers.lanes_of, names)] == [5, 5, 1, 5]
    assert (
        decision.events[0].message
        == "lanes follow the measured speed: a step takes about 5 s instead of 20 s"
    )
    job.speeds = Speeds()
    for name in names:
        job.speeds.note(name, 1.0, None, 1.0)
    job.trainers = list_after(rebalance(job))
    assert job.trainers == TrainerList(generation=3, lanes=16, names=names)


def test_nothing_moves_for_little_or_while_nothing_is_known() -> None:
    listed = TrainerList(generation=1, lanes=8, names=("a", "b"))
    assert rebalance(job_of(sync_spec(8), listed, {"a": 1.0, "b": 1.15})) == Decision(None)
    assert rebalance(job_of(sync_spec(8), listed, {})) == Decision(None)
    assert rebalance(job_of(sync_spec(8), listed, {"b": 9.0})) == Decision(None), "nobody to compare with"


def test_nothing_moves_in_a_job_that_wants_that_or_does_not_train() -> None:
    listed, lane_s = TrainerList(generation=1, lanes=8, names=("a", "b", "c")), {"a": 1.0, "b": 1.0, "c": 9.0}
    assert rebalance(job_of(sync_spec(8), listed, lane_s)).changes
    assert rebalance(job_of(sync_spec(8, stragglers="off"), listed, lane_s)) == Decision(None)
    waiting = job_of(sync_spec(8), listed, lane_s)
    waiting.state = waiting.state.model_copy(update={"phase": Phase.ROLLING_BACK})
    assert rebalance(waiting) == Decision(None)
    behind = job_of(sync_spec(8), replace_generation(listed, 0), lane_s)
    behind.state = behind.state.model_copy(update={"generation": 1})
    assert rebalance(behind) == Decision(None)


def replace_generation(listed: TrainerList, generation: int) -> TrainerList:
    return listed.model_copy(update={"generation": generation})


def test_a_spare_takes_the_place_of_a_slow_owner_and_nobody_else_moves() -> None:
    names = ("a", "b", "c", "d", "spare")
    lane_s = {"a": 1.0, "b": 9.0, "c": 1.0, "d": 1.0}
    moved = list_after(
        rebalance(job_of(sync_spec(4), TrainerList(generation=1, lanes=4, names=names), lane_s))
    )
    assert moved.names == ("a", "spare", "c", "d", "b")
    assert_covered_once(moved, 4)


def test_lane_zero_goes_to_a_trainer_that_is_not_slow() -> None:
    names, lane_s = ("slow", "b", "c", "d"), {"slow": 5.0, "b": 1.0, "c": 1.0, "d": 1.0}
    moved = list_after(
        rebalance(job_of(sync_spec(16), TrainerList(generation=1, lanes=16, names=names), lane_s))
    )
    assert moved.names == ("b", "c", "d", "slow")
    assert moved.lanes_of("slow") == (15, 16)


def test_a_newcomer_is_taken_to_be_like_the_others_and_what_is_known_stays_known() -> None:
    spec, names = sync_spec(16), ("a", "b", "c", "d")
    lane_s = dict.fromkeys(names, 1.0) | {"d": 5.0}
    job = job_of(spec, TrainerList(generation=1, lanes=16, names=names), lane_s)
    moved = list_after(rebalance(job))
    joined = new_list(spec, moved, 3, (*names, "new"), lane_s)
    assert [last - first for first, last in map(joined.lanes_of, ("a", "b", "c", "new"))] == [4, 4, 4, 4]
    assert joined.lanes_of("d") == (0, 0)


def test_who_was_not_measured_for_long_or_is_gone_is_not_known_to_be_slow_any_more() -> None:
    speeds = Speeds()
    speeds.note("a", 1.0, None, 10.0)
    speeds.note("b", 5.0, None, 2.0)
    speeds.note("gone", 1.0, None, 10.0)
    speeds.keep({"a", "b"}, since=3.0)
    assert speeds.lane_s == {"a": 1.0}


def test_lanes_without_records_tell_only_who_is_slower_than_the_others() -> None:
    speeds = Speeds()
    speeds.note("idle", None, 0.001, 1.0)
    assert speeds.lane_s == {}, "nobody to compare with"
    speeds.note("a", 1.0, None, 1.0)
    speeds.note("b", 3.0, None, 1.0)
    speeds.note("slow", None, 9.0, 1.0)
    speeds.note("stuck", 1.0, 8.0, 1.0)
    speeds.note("unknown", None, None, 1.0)
    assert speeds.lane_s == {"idle": 1.0, "a": 1.0, "b": 3.0, "slow": 9.0, "stuck": 8.0}


def test_a_report_of_nothing_leaves_what_is_known() -> None:
    speeds = Speeds()
    speeds.note("a", 1.0, None, 1.0)
    speeds.note("a", None, None, 5.0)
    assert speeds.lane_s == {"a": 1.0}
    speeds.keep({"a"}, since=2.0)
    assert speeds.lane_s == {}, "and is no sign that it is still so"


def test_lanes_leave_a_slow_trainer_whose_lanes_have_no_records() -> None:
    names = ("a", "b", "c", "slow")
    job = job_of(sync_spec(16), TrainerList(generation=1, lanes=16, names=names), dict.fromkeys("abc", 1.0))
    job.speeds.note("slow", None, 0.001, 0.0)
    assert rebalance(job) == Decision(None), "it is quick with nothing: that says little"
    job.speeds.note("slow", None, 5.0, 20.0)
    moved = list_after(rebalance(job))
    assert moved.lanes_of("slow") == (15, 16)


def test_a_thousand_trainers_are_cut_again_at_once() -> None:
    rng = random.Random(0)
    names = tuple(f"t{number}" for number in range(1000))
    lane_s = {name: rng.choice([1.0, 1.0, 1.1, 4.0]) for name in names}
    job = job_of(sync_spec(1024), TrainerList(generation=1, lanes=1024, names=names), lane_s)
    moved = list_after(rebalance(job))
    assert_covered_once(moved, 1024)
    assert step_s(moved, lane_s) * 2 <= step_s(job.trainers, lane_s)


def moves_of_equal_trainers(rebalance_s: float) -> int:
    """How often lanes move in two minutes between trainers that are equally fast, but whose lanes vary. As a
    trainer does, each reports every second the median of its last 16 lanes, of which it computes four a
    second."""
    rng, names, moves = random.Random(5), ("a", "b", "c", "d"), 0
    job = job_of(sync_spec(16), TrainerList(generation=1, lanes=16, names=names), {})
    kept = {name: deque((rng.lognormvariate(0, 0.6) for _ in range(16)), maxlen=16) for name in names}
    for tick in range(240):
        now = tick / 2
        if tick % 2:
            for name in names:
                kept[name].extend(rng.lognormvariate(0, 0.6) for _ in range(4))
                job.speeds.note(name, median(kept[name]), None, now)
        if now % rebalance_s == 0 and (decision := rebalance(job)).changes:
            moves += 1
            job.trainers, job.state = list_after(decision), state_after(decision)
    return moves


def test_lanes_do_not_move_by_noise_however_often_the_leader_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert moves_of_equal_trainers(0.5) <= 3
    monkeypatch.setattr(speeds_module, "SPEED_WINDOW_S", 0.0)
    assert moves_of_equal_trainers(0.5) > 10, "without the window they do"


def test_a_trainer_that_becomes_slow_loses_lanes_within_the_window() -> None:
    names = ("a", "b", "c", "d")
    job = job_of(sync_spec(16), TrainerList(generation=1, lanes=16, names=names), dict.fromkeys(names, 1.0))
    for second in range(1, 31):
        for name in names:
            job.speeds.note(name, 5.0 if name == "c" and second > 20 else 1.0, None, float(second))
        if rebalance(job).changes:
            assert 20 < second <= 20 + SPEED_WINDOW_S
            return
    pytest.fail("no lane has moved")


def test_what_is_kept_of_a_trainer_is_bounded() -> None:
    speeds = Speeds()
    for number in range(1000):
        speeds.note("a", 1.0, None, number / 1000)
    assert len(speeds.reports["a"]) == REPORTS
