"""Who helps with a late lane: all trainers find the same answer, and never two of them the same lane."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainer_agent.core.duties import helper_of, lanes_to_help, usual_share_s
from trireme_shared.protocol.records import TrainerList

FOUR = TrainerList(generation=1, lanes=8, names=("a", "b", "c", "d", "spare"), shares=((2, 4),))


@given(
    lanes=st.integers(0, 7).map(lambda k: 2**k),
    trainers=st.integers(1, 40),
    late=st.sets(st.integers(0, 127)),
    number=st.integers(0, 9),
)
def test_each_late_lane_has_one_helper_that_is_not_its_owner(lanes, trainers, late, number):
    names = tuple(f"t{each}" for each in range(trainers))
    listed = TrainerList(generation=1, lanes=lanes, names=names)
    missing = [(lane, lane + 1) for lane in sorted(late) if lane < lanes]
    found = {name: lanes_to_help(listed, name, missing, number) for name in names}
    helped = sorted(lane for mine in found.values() for lane in mine)
    assert helped == ([lane for lane, _ in missing if lane] if listed.owner_count > 1 else [])
    for name, mine in found.items():
        assert not any(lane in range(*listed.lanes_of(name)) for lane in mine)


def test_the_lanes_of_one_owner_go_to_different_helpers_and_to_others_in_the_next_round():
    assert [helper_of(FOUR, lane, 0) for lane in (2, 3)] == ["c", "d"]
    assert [helper_of(FOUR, lane, 1) for lane in (2, 3)] == ["d", "a"]
    assert [helper_of(FOUR, 2, number) for number in range(4)] == ["c", "d", "a", "c"]


def test_lane_zero_is_never_helped():
    """Its push says which checkpoint is due: two trainers could say different things."""
    assert [lanes_to_help(FOUR, name, [(0, 2)], 0) for name in "abcd"] == [[], [], [1], []]


def test_a_hot_spare_without_parameters_and_a_lonely_owner_help_nobody():
    assert lanes_to_help(FOUR, "spare", [(0, 8)], 0) == []
    assert helper_of(TrainerList(generation=1, lanes=8, names=("a",)), 3, 0) is None


def test_even_shares_differ_by_a_lane_and_that_is_no_delay():
    listed = TrainerList(generation=1, lanes=8, names=("a", "b", "c", "d", "e"))
    assert usual_share_s(listed, "e", 1.0) == 2.0
    assert usual_share_s(listed, "a", 2.0) == 2.0
    assert usual_share_s(FOUR, "a", 2.0) == 2.0
