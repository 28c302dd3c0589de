"""Pure decisions: duties, positions, nodes, verdicts, routes, back-off, metrics."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shared.lanes import is_aligned
from shared.records import JobState, LaneInterval, LaneMap, Mode, Phase, SlotMap, Stage, StepMetrics
from shared.records.layout import Layout, OptimizerSpec, Segment
from shared.records.operations import CheckpointRequest
from shared.records.step import CheckpointAsked, LanePosition
from shared.slots import spread
from shared.wire.messages import PushAnswer, Refusal
from trainer_agent.core.duties import Duty, Next, next_duty
from trainer_agent.core.steps import checkpoint_asked, nodes_to_compute, positions_of_step
from trainer_agent.data_plane.routing import route
from trainer_agent.data_plane.verdicts import Verdict, verdict
from trainer_agent.tasks.reports import KEPT_STEPS, MetricBuffer
from trainer_agent.waiting.retry import CEILING_S, backoff_s

RUNNING = JobState(phase=Phase.RUNNING, generation=4, trainers=("me", "other"))
LANES = LaneMap(generation=4, lanes=4, intervals=(LaneInterval(trainer="me", first=1, last=3),))


def duty_of(state, lanes=LANES, trainer="me", mode=Mode.SYNC):
    return next_duty(state, lanes, trainer, mode)


def test_a_trainer_with_lanes_trains_them_in_the_generation_of_state_and_lanes():
    assert duty_of(RUNNING) == Next(Duty.TRAIN, "", 4, (1, 3))


def test_a_trainer_waits_while_state_and_lanes_speak_of_different_generations():
    assert duty_of(RUNNING.model_copy(update={"generation": 5})) == Next(Duty.WAIT, "the lanes of generation 5")


def test_a_trainer_without_lanes_is_a_hot_spare_and_waits():
    assert duty_of(RUNNING, trainer="other") == Next(Duty.WAIT, "a lane (this trainer is a hot spare)", 4)


def test_a_checkpoint_on_demand_is_due_two_versions_on_and_said_anew_in_each_generation_and_attempt():
    first = CheckpointRequest(operation="op", attempt=1)
    asked = checkpoint_asked(first, 4, 10, None)
    assert asked == CheckpointAsked(operation="op", attempt=1, generation=4, version=12)
    assert checkpoint_asked(first, 4, 11, asked) == checkpoint_asked(first, 4, 50, asked) == asked
    assert checkpoint_asked(first, 5, 11, asked).version == 13
    assert checkpoint_asked(CheckpointRequest(operation="op", attempt=2), 4, 11, asked).version == 13
    assert checkpoint_asked(None, 4, 11, asked) is None


def test_async_trainers_need_no_lanes_but_must_be_counted_in():
    assert duty_of(RUNNING, None, mode=Mode.ASYNC) == Next(Duty.TRAIN, "", 4)
    assert duty_of(RUNNING, None, "new", Mode.ASYNC).duty is Duty.WAIT


def test_duty_follows_the_stage_and_the_phase():
    assert duty_of(None).duty is Duty.WAIT
    assert duty_of(JobState()).duty is Duty.WAIT
    assert duty_of(RUNNING.model_copy(update={"stage": Stage.EVALUATE})).duty is Duty.FINISH
    for phase in (Phase.COMPLETED, Phase.FAILED):
        assert duty_of(RUNNING.model_copy(update={"phase": phase})).duty is Duty.LEAVE


def test_a_new_epoch_begins_when_all_lanes_are_exhausted():
    done = [LanePosition(lane=lane, epoch=2, index=3, exhausted=True) for lane in range(2)]
    assert positions_of_step(done) == (LanePosition(lane=0, epoch=3), LanePosition(lane=1, epoch=3))
    under_way = [done[0], done[1].model_copy(update={"exhausted": False})]
    assert positions_of_step(under_way) == tuple(under_way)


def test_missing_lanes_are_covered_by_the_largest_nodes_first():
    assert nodes_to_compute([1, 2, 3, 4, 5, 6, 7]) == [(4, 8), (2, 4), (1, 2)]
    assert nodes_to_compute([0, 2, 3, 7]) == [(2, 4), (0, 1), (7, 8)]
    assert nodes_to_compute([]) == []


@given(st.sets(st.integers(0, 40)))
def test_nodes_cover_exactly_the_missing_lanes(lanes):
    nodes = nodes_to_compute(sorted(lanes))
    assert all(is_aligned(*node) for node in nodes)
    assert sorted(lane for node in nodes for lane in range(*node)) == sorted(lanes)


def test_the_worst_refusal_decides_what_a_push_was():
    def answer(*codes):
        return PushAnswer(refused=tuple(Refusal(block=1, lanes=(0, 1), code=code, version=2) for code in codes))

    assert verdict(PushAnswer(applied=3, duplicate=2), Mode.SYNC) == (Verdict.ACKNOWLEDGED, "")
    assert verdict(answer("TOO_EARLY"), Mode.SYNC)[0] is Verdict.AGAIN
    assert verdict(answer("TOO_EARLY"), Mode.ASYNC)[0] is Verdict.BEHIND
    assert verdict(answer("TOO_EARLY", "STALE_GENERATION"), Mode.SYNC)[0] is Verdict.STALE
    assert verdict(answer("STALE_ATTEMPT", "STALE_GENERATION"), Mode.SYNC)[0] is Verdict.FENCED
    assert verdict(answer("NOT_READY", "LAYOUT_MISMATCH"), Mode.SYNC) == (
        Verdict.BROKEN,
        "block 1 refused: LAYOUT_MISMATCH, it is at version 2",
    )


def test_blocks_are_routed_by_slot():
    layout = Layout(
        segments=(Segment(kind="param", dtype="float32", elements=64 * 5, group=0),),
        block_bytes=256,
        digest="",
        optimizer=OptimizerSpec(name="SGD", defaults={}, groups=({},)),
        slot_count=128,
    )
    routes = route(layout, SlotMap(version=3, owners=spread(128, 2)))
    assert (routes.version, routes.owners, routes.blocks) == (3, (0, 1, 0, 1, 0), {0: (0, 2, 4), 1: (1, 3)})


def test_backing_off_doubles_up_to_a_ceiling():
    assert [backoff_s(n) for n in (1, 2, 3)] == [0.05, 0.1, 0.2]
    assert backoff_s(10_000) == CEILING_S


def test_metrics_are_due_after_a_while_and_shares_of_one_step_are_added():
    buffer = MetricBuffer()
    assert buffer.due_in(5.0) is None
    buffer.add(StepMetrics(step=1, epoch=0, loss_sum=2.0, records=3), 5.0)
    buffer.add(StepMetrics(step=1, epoch=0, loss_sum=1.0, records=1), 5.1)
    assert buffer.due_in(5.2) == 0.5 - (5.2 - 5.0)
    assert buffer.take() == (StepMetrics(step=1, epoch=0, loss_sum=3.0, records=4),)
    assert buffer.take() == ()


def test_metrics_that_nobody_takes_do_not_pile_up():
    buffer = MetricBuffer()
    for step in range(KEPT_STEPS + 5):
        buffer.add(StepMetrics(step=step, epoch=0, loss_sum=0.0, records=1), 0.0)
    assert (len(buffer.steps), buffer.dropped, min(buffer.steps)) == (KEPT_STEPS, 5, 5)
