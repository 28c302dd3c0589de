"""Positions, checkpoints on demand and tree nodes of a synchronous step."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainer_agent.core.duties import checkpoint_asked, positions_of_step
from trainer_agent.data_plane.pulls import agreed
from trainer_agent.loops.lane_pusher import nodes_to_compute
from trireme_shared.protocol.lanes import is_aligned
from trireme_shared.protocol.records.operations import CheckpointRequest
from trireme_shared.protocol.records.step import CheckpointAsked, LanePosition, LaneZero, StepRecord


def test_a_new_epoch_begins_when_all_lanes_are_exhausted():
    done = [LanePosition(lane=lane, epoch=2, index=3, exhausted=True) for lane in range(2)]
    assert positions_of_step(done) == (LanePosition(lane=0, epoch=3), LanePosition(lane=1, epoch=3))
    under_way = [done[0], done[1].model_copy(update={"exhausted": False})]
    assert positions_of_step(under_way) == tuple(under_way)


def test_a_checkpoint_on_demand_is_due_two_versions_on_and_said_anew_in_each_generation_and_attempt():
    first = CheckpointRequest(operation="op", attempt=1)
    asked = checkpoint_asked(first, 4, 10, None)
    assert asked == CheckpointAsked(operation="op", attempt=1, generation=4, version=12)
    assert checkpoint_asked(first, 4, 11, asked) == checkpoint_asked(first, 4, 50, asked) == asked
    assert checkpoint_asked(first, 5, 11, asked).version == 13
    assert checkpoint_asked(CheckpointRequest(operation="op", attempt=2), 4, 11, asked).version == 13
    assert checkpoint_asked(None, 4, 11, asked) is None


def test_a_checkpoint_that_was_due_when_lane_0_moved_is_not_asked_for_again():
    """The request stays on record until the checkpoint is written; by then lane 0 may have had several
    owners."""
    request = CheckpointRequest(operation="op", attempt=1)
    asked = checkpoint_asked(request, 4, 10, None)
    assert checkpoint_asked(request, 5, 12, asked) == checkpoint_asked(request, 9, 40, asked) == asked
    assert checkpoint_asked(CheckpointRequest(operation="op", attempt=2), 5, 12, asked).version == 14
    rolled_back = checkpoint_asked(request, 6, 12, asked, timeline=5)
    assert (rolled_back.version, rolled_back.generation) == (14, 6)


def test_a_request_that_parameter_servers_have_from_two_owners_of_lane_0_is_asked_anew():
    def record(asked, version=12):
        return StepRecord(version=version, positions=(), lane_zero=LaneZero(options=(), asked=asked))

    old = CheckpointAsked(operation="op", attempt=1, generation=4, version=12)
    new = old.model_copy(update={"generation": 5, "version": 13})
    assert agreed([record(old), None, record(old)]) == record(old)
    for mixed in ([record(old), record(new)], [record(new), record(old), None], [record(None), record(old)]):
        assert agreed(mixed) == record(None)
        anew = checkpoint_asked(CheckpointRequest(operation="op", attempt=1), 5, 12, agreed(mixed).asked)
        assert anew.version == 14
    assert agreed([None, None]) is None


def test_missing_lanes_are_covered_by_the_largest_nodes_first():
    assert nodes_to_compute([1, 2, 3, 4, 5, 6, 7]) == [(4, 8), (2, 4), (1, 2)]
    assert nodes_to_compute([0, 2, 3, 7]) == [(2, 4), (0, 1), (7, 8)]
    assert nodes_to_compute([]) == []


@given(st.sets(st.integers(0, 40)))
def test_nodes_cover_exactly_the_missing_lanes(lanes):
    nodes = nodes_to_compute(sorted(lanes))
    assert all(is_aligned(*node) for node in nodes)
    assert sorted(lane for node in nodes for lane in range(*node)) == sorted(lanes)
