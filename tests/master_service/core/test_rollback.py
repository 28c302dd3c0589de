"""Rollbacks as the master decides them: which checkpoint, the queue restored, and what happens to old
reports."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from master_service.core.changes import Decision, DesirePservers, Event, ForgetParameters, NextEpoch
from master_service.core.decisions import recovery
from master_service.core.decisions.membership import reconcile
from master_service.core.decisions.queue_at_checkpoint import epoch_at, restore_to_positions
from master_service.core.decisions.tasks import acquire, complete, fail_task
from master_service.core.queue.file_table import FileTable, TableFile
from master_service.core.state.job import Job, Members
from tests.equipment.queue_violations import violations
from tests.master_service.cluster import spec_of
from tests.master_service.core.members import (
    RUNNING,
    SLOTS,
    SPEC,
    TRAINERS,
    list_after,
    pservers,
    state_after,
    trainers,
)
from trireme_shared.protocol.errors import StaleAttempt
from trireme_shared.protocol.records import (
    AcquireTask,
    CompleteTask,
    FailTask,
    JobState,
    Mode,
    Phase,
    PserverMember,
    Restored,
    SlotMap,
    Stage,
    TaskKind,
    TrainerList,
    UserFailure,
)
from trireme_shared.protocol.records.assignments import spread
from trireme_shared.protocol.records.checkpoints import CheckpointLatest, CheckpointRef
from trireme_shared.protocol.records.step import LanePosition

NO = UserFailure(error_type="ValueError", message="no")
NEWEST = CheckpointRef(uuid="newest", step=40, timeline=0, manifest="m")
OLDER = CheckpointRef(uuid="older", step=30, timeline=0, manifest="m")
LATEST = CheckpointLatest(
    uuid="newest", step=40, timeline=0, term=1, timestamp="", manifest="m", slots=SLOTS, kept=(NEWEST, OLDER)
)


def members_of(
    *indexes: int,
    latest: CheckpointLatest | None = LATEST,
    restored: dict[int, Restored] | None = None,
    new: int = -1,
) -> Members:
    """`new`: the index of a pserver that came after the parameters were initialised."""
    found: dict[int, PserverMember] = {
        index: member.model_copy(update={"restored": (restored or {}).get(index)})
        for index, member in pservers(*indexes).items()
    }
    revisions = {index: 99 if index == new else 5 for index in indexes}
    return Members(trainers("a", "b"), found, revisions, layout_revision=10, init_done=True, latest=latest)


def said(timeline: int, error: str = "", checkpoint: str = "newest") -> dict[int, Restored]:
    return {index: Restored(timeline=timeline, checkpoint=checkpoint, error=error) for index in (0, 1)}


def event_of(decision: Decision[None], name: str) -> Event:
    return next(event for event in decision.events if event.name == name)


# ------------------------------------------------------------------ whether, and to where


@pytest.mark.parametrize("stage", [Stage.TRAIN, Stage.EVALUATE, Stage.EXPORT])
@pytest.mark.parametrize(
    ("members", "cause"),
    [
        (members_of(0), "pserver-1 is gone"),
        (members_of(0, 1, new=1), "pserver-1 was replaced by an empty one"),
    ],
)
def test_lost_parameters_take_the_job_back_to_the_newest_checkpoint(
    stage: Stage, members: Members, cause: str
) -> None:
    decision = reconcile(SPEC, RUNNING.model_copy(update={"stage": stage}), TRAINERS, SLOTS, members)
    state = state_after(decision)
    assert (state.phase, state.generation, state.timeline, state.checkpoint) == (
        Phase.ROLLING_BACK,
        5,
        5,
        "newest",
    )
    assert state.reason == f"{cause}: the job goes back to step 40"
    assert event_of(decision, "rolling_back").fields["step"] == 40
    assert reconcile(SPEC, state, TRAINERS, SLOTS, members) == Decision(None)


def test_a_pserver_that_restored_and_is_replaced_later_is_a_loss_again() -> None:
    state = RUNNING.model_copy(update={"timeline": 4, "checkpoint": "newest"})
    whole = members_of(0, 1, restored=said(4))
    assert reconcile(SPEC, state, TRAINERS, SLOTS, whole) == Decision(None)
    one_new = members_of(0, 1, restored={0: said(4)[0]})
    assert state_after(reconcile(SPEC, state, TRAINERS, SLOTS, one_new)).timeline == 5


def test_another_number_of_pservers_is_a_roll_back_with_a_new_slot_map() -> None:
    more = SPEC.model_copy(update={"pservers": 3})
    decision = reconcile(more, RUNNING, TRAINERS, SLOTS, members_of(0, 1, 2))
    slots = next(change for change in decision.changes if isinstance(change, SlotMap))
    assert (slots.version, set(slots.owners)) == (2, {0, 1, 2})
    assert state_after(decision).phase is Phase.ROLLING_BACK
    back = state_after(decision)
    fewer = reconcile(SPEC, back, TRAINERS, slots, members_of(0, 1))
    assert state_after(fewer).timeline == back.generation + 1
    assert any(isinstance(change, SlotMap) and change.version == 3 for change in fewer.changes)


def test_a_checkpoint_that_was_deleted_when_a_newer_one_came_is_not_damaged_the_newer_one_is_taken() -> None:
    back = RUNNING.model_copy(
        update={"phase": Phase.ROLLING_BACK, "generation": 5, "timeline": 5, "checkpoint": "superseded"}
    )
    answers = {
        index: said.model_copy(update={"superseded": True})
        for index, said in said(5, "not kept", "superseded").items()
    }
    decision = reconcile(SPEC, back, TRAINERS, SLOTS, members_of(0, 1, restored=answers))
    again = state_after(decision)
    assert (again.phase, again.timeline, again.checkpoint, again.damaged) == (
        Phase.ROLLING_BACK,
        6,
        "newest",
        (),
    )
    old_view = LATEST.model_copy(update={"kept": (NEWEST.model_copy(update={"uuid": "superseded"}),)})
    late = members_of(0, 1, restored=answers, latest=old_view)
    assert reconcile(SPEC, back, TRAINERS, SLOTS, late) == Decision(None), (
        "its watch will bring what the pserver saw"
    )


def test_a_checkpoint_that_cannot_be_used_is_followed_by_the_one_before_it_with_a_warning() -> None:
    back = RUNNING.model_copy(
        update={"phase": Phase.ROLLING_BACK, "generation": 5, "timeline": 5, "checkpoint": "newest"}
    )
    decision = reconcile(
        SPEC, back, TRAINERS, SLOTS, members_of(0, 1, restored=said(5, "part 1 has another checksum"))
    )
    state = state_after(decision)
    assert (state.phase, state.timeline, state.checkpoint) == (Phase.ROLLING_BACK, 6, "older")
    assert event_of(decision, "checkpoint_unusable").message == "pserver-0: part 1 has another checksum"
    last = reconcile(SPEC, state, TRAINERS, SLOTS, members_of(0, 1, restored=said(6, "it is gone", "older")))
    assert state_after(last).phase is Phase.FAILED
    assert state_after(last).reason.startswith(
        "no checkpoint is left that could be loaded; the last one tried: "
    )


def test_initial_parameters_that_cannot_be_loaded_are_made_again_once_every_pserver_has_dropped_them() -> (
    None
):
    first = CheckpointRef(uuid="first", step=0, timeline=0, manifest="m")
    latest = LATEST.model_copy(update={"uuid": "first", "step": 0, "kept": (first,)})
    back = RUNNING.model_copy(
        update={"phase": Phase.ROLLING_BACK, "generation": 5, "timeline": 5, "checkpoint": "first"}
    )
    half = {0: said(5, "", "first")[0], 1: said(5, "it is truncated", "first")[1]}
    decision = reconcile(SPEC, back, TRAINERS, SLOTS, members_of(0, 1, latest=latest, restored=half))
    dropping = state_after(decision)
    assert (dropping.phase, dropping.timeline, dropping.checkpoint) == (Phase.ROLLING_BACK, 6, "")
    assert dropping.reason.endswith("only the initial parameters were saved: training starts over")
    assert event_of(decision, "checkpoint_unusable").message == "pserver-1: it is truncated"
    for restored in (half, {0: said(6, "", "")[0]}, {0: said(6, "", "")[0], 1: half[1]}):
        waiting = members_of(0, 1, latest=latest, restored=restored)
        assert reconcile(SPEC, dropping, TRAINERS, SLOTS, waiting) == Decision(None), (
            "one may still serve what it has"
        )
    over = reconcile(
        SPEC, dropping, TRAINERS, SLOTS, members_of(0, 1, latest=latest, restored=said(6, "", ""))
    )
    begun = state_after(over)
    assert (begun.phase, begun.stage, begun.timeline, begun.checkpoint) == (Phase.WAITING, Stage.TRAIN, 7, "")
    assert {ForgetParameters(), NextEpoch(0)} <= set(over.changes[1:3] + over.changes[-1:])
    asynchronous = SPEC.model_copy(update={"mode": Mode.ASYNC})
    failed = reconcile(asynchronous, back, TRAINERS, SLOTS, members_of(0, 1, latest=latest, restored=half))
    assert state_after(failed).phase is Phase.FAILED, (
        "its checkpoints are numbered: the first one may hold training"
    )


def test_a_checkpoint_that_was_deleted_as_the_roll_back_began_is_followed_by_the_newest_one() -> None:
    back = RUNNING.model_copy(
        update={"phase": Phase.ROLLING_BACK, "generation": 5, "timeline": 5, "checkpoint": "deleted"}
    )
    decision = reconcile(
        SPEC, back, TRAINERS, SLOTS, members_of(0, 1, restored=said(5, "not among those kept", "deleted"))
    )
    assert (state_after(decision).checkpoint, state_after(decision).damaged) == ("newest", ("deleted",))


def test_what_could_not_be_loaded_is_not_tried_again_at_the_next_loss() -> None:
    state = RUNNING.model_copy(update={"timeline": 4, "checkpoint": "older", "damaged": ("newest",)})
    decision = reconcile(SPEC, state, TRAINERS, SLOTS, members_of(0, restored=said(4, checkpoint="older")))
    assert state_after(decision).checkpoint == "older"


def test_an_old_error_does_not_count_in_a_newer_timeline() -> None:
    back = RUNNING.model_copy(
        update={"phase": Phase.ROLLING_BACK, "generation": 6, "timeline": 6, "checkpoint": "older"}
    )
    assert reconcile(SPEC, back, TRAINERS, SLOTS, members_of(0, 1, restored=said(5, "damaged"))) == Decision(
        None
    )


def test_without_any_checkpoint_pservers_that_hold_parameters_leave_and_training_starts_over() -> None:
    alone = members_of(0, latest=None)
    assert reconcile(SPEC, RUNNING, TRAINERS, SLOTS, alone) == Decision(None)
    assert [member.index for member in recovery.survivors(SPEC, RUNNING, SLOTS, alone)] == [0]
    decision = reconcile(SPEC, RUNNING, TRAINERS, SLOTS, members_of(latest=None))
    state = state_after(decision)
    assert (state.phase, state.timeline, state.checkpoint, list_after(decision).names) == (
        Phase.WAITING,
        5,
        "",
        (),
    )
    assert event_of(decision, "started_over").message == state.reason


@pytest.mark.parametrize(("serving", "wanted"), [(3, 2), (1, 2), (2, 2)])
def test_a_job_that_starts_over_in_a_resize_has_the_parameter_servers_that_the_resize_asked_for(
    serving, wanted
):
    """Trainers initialise them once as many are there as etcd says, and all have slots: a map of other
    numbers was waited for for ever."""
    slots = SlotMap(version=4, owners=spread(SPEC.slot_count, serving), pservers=wanted)
    spec = SPEC.model_copy(update={"pservers": wanted})
    changes = reconcile(spec, RUNNING, TRAINERS, slots, members_of(latest=None)).changes
    placed = [change for change in changes if isinstance(change, SlotMap | DesirePservers)]
    if serving == wanted:
        assert placed == []
        return
    assert placed == [SlotMap(version=5, owners=spread(SPEC.slot_count, wanted)), DesirePservers(wanted)]


# ------------------------------------------------------------------ the queue


@dataclass
class Reader:
    """A lane as trainers drive it: positions only, one minibatch a step."""

    position: LanePosition
    trained: Counter[tuple[int, str, int]]

    def step(self, job: Job, minibatch: int, now: float) -> LanePosition:
        """Train one minibatch; where the lane stands after it."""
        position = self.position
        while not position.exhausted:
            ask = AcquireTask(
                trainer="t",
                request=f"r{now}-{position.lane}-{position.index}",
                generation=job.state.generation,
                stream=position.lane,
                epoch=position.epoch,
                index=position.index,
            )
            answer = land(job, acquire(job, ask), now).answer
            if answer.answer == "exhausted":
                return position.model_copy(update={"exhausted": True})
            if answer.answer == "skip":
                over = position.index + 1 >= answer.stream_length
                position = position.model_copy(
                    update={"index": position.index + 1, "offset": 0, "exhausted": over}
                )
                continue
            task = answer.task
            assert task is not None
            for record in range(position.offset, min(position.offset + minibatch, task.count)):
                self.trained[position.epoch, task.task_id, record] += 1
            offset = position.offset + minibatch
            if offset < task.count:
                return position.model_copy(update={"offset": offset})
            over = position.index + 1 >= task.stream_length
            return position.model_copy(update={"index": position.index + 1, "offset": 0, "exhausted": over})
        return position


def land(job: Job, decision: Decision[object], now: float) -> Decision[object]:
    for change in decision.changes:
        job.apply(change, now)
    return decision


def books_of(tasks: list[int], lanes: int, epochs: int) -> Job:
    spec = spec_of(
        mode=Mode.SYNC, lanes=lanes, epochs=epochs, global_batch_size=2 * lanes, records_per_task=max(tasks)
    )
    table = FileTable(
        tuple(TableFile(f"{n}.txt", count) for n, count in enumerate(tasks)), max(tasks), "digest"
    )
    job = Job.open(spec, table, FileTable((TableFile("test.txt", 3),), 2, "evaluation"))
    job.state = JobState(phase=Phase.RUNNING, generation=1)
    job.trainers = TrainerList(generation=1, lanes=lanes, names=("t",))
    return job


def train(job: Job, readers: list[Reader], rng: random.Random, steps: int, now: float) -> bool:
    """`steps` steps, or to the end of training (then True), as the trainer's loop does them; tasks fail now
    and then."""
    for step in range(steps):
        if all(reader.position.exhausted for reader in readers):
            epoch = readers[0].position.epoch + 1
            if epoch == job.spec.epochs:
                return True
            for reader in readers:
                reader.position = LanePosition(lane=reader.position.lane, epoch=epoch)
            if epoch > job.training.epoch:
                ask = AcquireTask(
                    trainer="t", request="e", generation=job.state.generation, stream=0, epoch=epoch
                )
                land(job, Decision(None, job.training.close_before(ask)), now)
        for reader in readers:
            reader.position = reader.step(job, 2, now + step * 100)
        for task_id, held in list(job.training.pending.items()):
            lane = readers[int(held.record.stream)].position
            if held.record.index < lane.index or lane.exhausted:
                report = CompleteTask(trainer="t", attempt=held.record.attempt, epoch=held.record.epoch)
                land(job, complete(job, task_id, report), now)
            elif rng.random() < 0.05 and lane.offset == 0:
                failed = FailTask(
                    trainer="t", attempt=held.record.attempt, failure=NO, epoch=held.record.epoch
                )
                land(job, fail_task(job, task_id, failed), now)
        assert list(violations(job.training)) == []
    return (
        all(reader.position.exhausted for reader in readers)
        and readers[0].position.epoch + 1 == job.spec.epochs
    )


@settings(deadline=None, max_examples=150)
@given(
    tasks=st.lists(st.integers(1, 7), min_size=1, max_size=9),
    lanes=st.sampled_from([1, 2, 4, 8]),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 10_000),
)
def test_from_any_positions_each_record_is_trained_exactly_once_afterwards(
    tasks: list[int], lanes: int, epochs: int, seed: int
) -> None:
    rng = random.Random(seed)
    job = books_of(tasks, lanes, epochs)
    readers = [Reader(LanePosition(lane=lane), Counter()) for lane in range(lanes)]
    train(job, readers, rng, rng.randrange(25), 0.0)
    saved = [(reader.position, reader.trained.copy()) for reader in readers]
    positions = [position for position, _ in saved]
    train(job, readers, rng, rng.randrange(25), 1e4)  # lost
    readers = [Reader(position, trained) for position, trained in saved]
    for _ in range(rng.choice([1, 2])):  # a master that dies half-way is followed by one that does it again
        land(job, Decision(None, (NextEpoch(epoch_at(positions)),)), 2e4)
        changes = restore_to_positions(job, positions)
        for change in changes[: rng.choice([len(changes), len(changes) // 2])] if _ == 0 else changes:
            job.apply(change, 2e4)
    land(job, Decision(None, (NextEpoch(epoch_at(positions)),)), 3e4)
    land(job, Decision(None, restore_to_positions(job, positions)), 3e4)
    assert list(violations(job.training)) == []
    assert job.training.epoch == epoch_at(positions)
    stage = recovery.stage_at(job.spec, job.state.stage, epoch_at(positions))
    job.state = job.state.model_copy(update={"stage": stage})
    assert train(job, readers, random.Random(0), 2000, 4e4)
    trained = sum((reader.trained for reader in readers), Counter())
    discarded = {(epoch, task_id) for epoch, task_id in job.training.discarded}
    for epoch in range(epochs):
        for number, count in enumerate(tasks):
            for record in range(count):
                times = trained[epoch, str(number), record]
                assert times == 1 or (times == 0 and (epoch, str(number)) in discarded), (
                    epoch,
                    number,
                    record,
                    times,
                )


def test_training_that_was_over_stays_over_and_what_follows_is_not_undone() -> None:
    job = books_of([2, 2], 1, 1)
    job.state = job.state.model_copy(update={"stage": Stage.EVALUATE})
    over = [LanePosition(lane=0, epoch=0, index=2, exhausted=True)]
    job.training.epoch = 1
    queue = job.queues[TaskKind.EVALUATE]
    ask = AcquireTask(trainer="t", request="r", generation=1)
    land(job, acquire(job, ask), 0.0)
    assert len(queue.pending) == 1
    land(job, Decision(None, (NextEpoch(epoch_at(over)),)), 1.0)
    land(job, Decision(None, restore_to_positions(job, over)), 1.0)
    assert (len(queue.pending), len(queue.requeued), job.training.epoch) == (0, 1, 1)
    assert recovery.stage_at(job.spec, Stage.EVALUATE, epoch_at(over)) is Stage.EVALUATE
    assert recovery.stage_at(job.spec, Stage.TRAIN, epoch_at(over)) is not Stage.TRAIN
    early = [LanePosition(lane=0, epoch=0, index=1)]
    land(job, Decision(None, (NextEpoch(epoch_at(early)),)), 2.0)
    land(job, Decision(None, restore_to_positions(job, early)), 2.0)
    assert (queue.cursors, queue.requeued, job.training.cursors) == ({}, {}, {"0": 1})
    assert recovery.stage_at(job.spec, Stage.EXPORT, epoch_at(early)) is Stage.TRAIN


def test_a_report_from_before_the_roll_back_is_stale() -> None:
    job = books_of([4, 4], 1, 1)
    ask = AcquireTask(trainer="t", request="r", generation=1, stream=0)
    task = land(job, acquire(job, ask), 0.0).answer.task
    start = [LanePosition(lane=0)]
    job.state = job.state.model_copy(update={"generation": 3, "timeline": 2})
    job.trainers = job.trainers.model_copy(update={"generation": 3})
    land(job, Decision(None, (NextEpoch(epoch_at(start)),)), 1.0)
    land(job, Decision(None, restore_to_positions(job, start)), 1.0)
    again = land(job, acquire(job, ask.model_copy(update={"request": "s", "generation": 3})), 2.0).answer.task
    assert (task.timeline, again.timeline, task.attempt, again.attempt) == (0, 2, 1, 1)
    for report in (
        CompleteTask(trainer="t", attempt=1, epoch=0, timeline=0),
        FailTask(trainer="t", attempt=1, failure=NO, epoch=0, timeline=0),
    ):
        with pytest.raises(
            StaleAttempt, match=r"given in timeline 0, the job has gone back .* in timeline 2"
        ):
            (complete if isinstance(report, CompleteTask) else fail_task)(job, task.task_id, report)


def test_with_parameters_and_queue_restored_the_job_runs_in_a_new_generation() -> None:
    job = books_of([4, 4], 2, 1)
    job.state = RUNNING.model_copy(
        update={"phase": Phase.ROLLING_BACK, "generation": 5, "timeline": 5, "checkpoint": "newest"}
    )
    job.slots = SlotMap(version=1, owners=(0,) * 128)
    start = [LanePosition(lane=lane) for lane in range(2)]
    job.members = members_of(0)
    waiting = recovery.resume(job, epoch_at(start), 40, records=8, seconds=1.25)
    assert waiting == Decision(False)
    job.members = members_of(0, restored=said(5))
    decision = recovery.resume(job, epoch_at(start), 40, records=8, seconds=1.25)
    state = state_after(decision)
    assert (decision.answer, state.phase, state.generation, state.timeline) == (True, Phase.RUNNING, 6, 5)
    assert list_after(decision) == TrainerList(generation=6, lanes=2, names=("a", "b"))
    fields = event_of(decision, "rolled_back").fields
    assert (fields["step"], fields["records_replayed"], fields["seconds"]) == (40, 8, 1.25)
