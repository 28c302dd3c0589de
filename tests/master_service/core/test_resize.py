"""The decisions about a resize, as values: who may ask, when what follows, and what a death or a cancellation
leaves behind."""

from __future__ import annotations

from dataclasses import replace

import pytest

from master_service.core import placement
from master_service.core.changes import Change, Decision, DesirePservers, DropMigration
from master_service.core.decisions import membership, operations, resize
from master_service.core.queue.file_table import FileTable
from master_service.core.state.job import Job
from tests.master_service.cluster import spec_of
from tests.master_service.core.members import pservers, trainers, whole
from trireme_shared.protocol.errors import Conflict, InvalidArgument, TriremeError
from trireme_shared.protocol.records import Dispatch, JobSpec, JobState, Mode, Phase, SlotMap, TrainerList
from trireme_shared.protocol.records.assignments import GivenNumbers, Handed, Migration, spread
from trireme_shared.protocol.records.checkpoints import CheckpointLatest, CheckpointRef
from trireme_shared.protocol.records.layout import (
    Layout,
    OptimizerSpec,
    RowInit,
    RowOptimizer,
    Segment,
    TableSpec,
)
from trireme_shared.protocol.records.operations import (
    Operation,
    OperationKind,
    OperationState,
    Resize,
    ResizePhase,
    Strategy,
)

ADAM = OptimizerSpec(name="Adam", defaults={"lr": 0.1}, groups=({"lr": 0.1},))
BLOCKS = 16
LAYOUT = Layout(
    segments=(Segment(kind="param", dtype="float32", elements=BLOCKS * 256, group=0),),
    block_bytes=1024,
    digest="d",
    optimizer=ADAM,
    slot_count=128,
)
STAMP = "now"


def job_of(**fields: object) -> Job:
    spec = spec_of(**{"mode": Mode.SYNC, "lanes": 4, "pservers": 2, "slot_count": 128, **fields})
    job = Job.open(spec, FileTable((), 1), None)
    job.state = JobState(phase=Phase.RUNNING, generation=4)
    job.trainers = TrainerList(generation=4, lanes=4, names=("a", "b"))
    job.slots = SlotMap(version=1, owners=spread(128, 2))
    job.members = replace(whole("a", "b"), layout=LAYOUT)
    return job


def asked(job: Job, **numbers: object) -> Operation:
    strategy = numbers.pop("strategy", Strategy.LIVE)
    wanted = resize.wanted(job, numbers.get("trainers"), numbers.get("pservers"), strategy)  # type: ignore[arg-type]
    return Operation(operation_id="op-1", kind=OperationKind.RESIZE, resize=wanted, limit_s=60.0)


def take(job: Job, decision: Decision) -> tuple[Change, ...]:
    for change in decision.changes:
        job.apply(change, 0.0)
    return decision.changes


def step(job: Job) -> tuple[Change, ...]:
    return take(job, operations.advance(job, STAMP))


def progress(job: Job) -> Resize:
    found = job.operations.records["op-1"].resize
    assert found is not None
    return found


def migrating(job: Job, count: int) -> Migration:
    """Asked, begun, all members there, planned."""
    take(job, operations.ask(job, asked(job, pservers=count)))
    step(job)
    there = range(max(count, 2))
    revisions = {index: 5 if index < 2 else 20 for index in there}
    job.members = replace(job.members, pservers=pservers(*there), pserver_revisions=revisions)
    step(job)
    assert job.migration is not None
    return job.migration


def hand_over(job: Job, index: int, **fields: object) -> None:
    assert job.migration is not None
    member = job.members.pservers[index]
    handed = Handed(migration=job.migration.id).model_copy(update=fields)
    changed = {**job.members.pservers, index: member.model_copy(update={"handed": handed})}
    job.members = replace(job.members, pservers=changed)


# -------------------------------------------------------------------- the plan


def test_a_slot_weighs_two_versions_and_the_optimizers_state() -> None:
    assert placement.slot_bytes(LAYOUT, Mode.SYNC)[:BLOCKS] == [4096] * BLOCKS
    assert placement.slot_bytes(LAYOUT, Mode.ASYNC)[0] == 3072
    assert sum(placement.slot_bytes(LAYOUT, Mode.SYNC)) == 4096 * BLOCKS


def test_groups_are_bounded_and_those_of_different_pairs_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "GROUP_BYTES", 8192)
    groups = placement.planned_groups(LAYOUT, Mode.SYNC, SlotMap(version=1, owners=spread(128, 2)), 4)
    pairs = [(group.source, group.target, group.bytes) for group in groups]
    assert pairs == [(0, 2, 8192), (1, 3, 8192)] * 2
    assert [group.number for group in groups] == list(range(len(groups)))
    assert sum(group.bytes for group in groups) == 8 * 4096


def test_groups_grow_with_what_a_source_has_to_send(monkeypatch: pytest.MonkeyPatch) -> None:
    def groups(blocks: int) -> list[int]:
        layout = LAYOUT.model_copy(
            update={"segments": (LAYOUT.segments[0].model_copy(update={"elements": blocks * 256}),)}
        )
        found = placement.planned_groups(layout, Mode.SYNC, SlotMap(version=1, owners=(0,) * 128), 2)
        assert sum(group.bytes for group in found) == blocks // 2 * 4096
        return sorted({group.bytes for group in found})

    for name, value in (("LEAST_GROUP_BYTES", 8192), ("GROUP_BYTES", 4 * 8192), ("GROUPS", 4)):
        monkeypatch.setattr(placement, name, value)
    assert groups(16) == [8192]
    assert groups(32) == [16384]
    assert groups(128) == [4 * 8192]


@pytest.mark.parametrize(
    ("fields", "states"),
    [
        (("SGD", {"momentum": 0}), 0),
        (("SGD", {"momentum": 0.9}), 1),
        (("AdamW", {"amsgrad": True}), 3),
        (("RMSprop", {"centered": True, "momentum": 0.1}), 3),
    ],
)
def test_the_optimizers_tensors_are_known_from_its_options(
    fields: tuple[str, dict[str, object]], states: int
) -> None:
    name, options = fields
    assert placement.states_of(OptimizerSpec(name=name, defaults=options, groups=({},)), 0) == states


def test_a_dry_run_says_what_each_parameter_server_sends_and_changes_nothing() -> None:
    job = job_of()
    found = resize.predict(job, resize.wanted(job, None, 3, Strategy.LIVE))
    assert (found.pservers, found.before_pservers, found.slots, found.bytes) == (3, 2, 5, 5 * 4096)
    assert {each.pserver: (each.sent, each.received) for each in found.by_pserver}[2] == (0, 5 * 4096)
    assert sum(each.sent for each in found.by_pserver) == found.bytes
    assert not job.operations.records


# -------------------------------------------------------------------- asking


@pytest.mark.parametrize(
    ("change", "numbers", "error", "text"),
    [
        ({}, {}, InvalidArgument, "needs a number"),
        ({}, {"trainers": 0}, InvalidArgument, "one of each"),
        ({}, {"pservers": 0}, InvalidArgument, "one of each"),
        ({}, {"trainers": 5}, InvalidArgument, "5 trainers for 4 lanes"),
        ({}, {"pservers": 129}, InvalidArgument, "at most 128"),
        ({"dispatch": Dispatch.ETCD}, {"pservers": 3}, Conflict, "masterless"),
    ],
)
def test_an_impossible_resize_is_refused_and_nothing_changes(
    change: dict[str, object], numbers: dict[str, int], error: type[TriremeError], text: str
) -> None:
    with pytest.raises(error, match=text):
        asked(job_of(**change), **numbers)


def test_a_job_that_ended_or_is_being_resized_is_not_resized() -> None:
    job = job_of()
    take(job, operations.ask(job, asked(job, pservers=3)))
    with pytest.raises(Conflict, match="being resized already"):
        operations.ask(job, asked(job, pservers=4).model_copy(update={"operation_id": "op-2"}))
    job.state = JobState(phase=Phase.COMPLETED)
    with pytest.raises(Conflict, match="COMPLETED"):
        asked(job, pservers=4)


def test_independent_checkpoints_load_only_with_as_many_parameter_servers() -> None:
    job = job_of(mode=Mode.ASYNC, checkpoint_kind="independent")
    with pytest.raises(Conflict, match="independent"):
        asked(job, pservers=3)
    assert asked(job, trainers=5).resize is not None


# -------------------------------------------------------------------- progress


def test_a_resize_writes_the_new_numbers_and_waits_for_the_members() -> None:
    job = job_of()
    take(job, operations.ask(job, asked(job, pservers=3)))
    assert progress(job).phase is ResizePhase.PLANNED
    changes = step(job)
    assert {type(change) for change in changes} == {Operation, JobSpec, GivenNumbers, SlotMap, DesirePservers}
    assert (job.spec.pservers, job.given) == (3, GivenNumbers(trainers=job.spec.trainers, pservers=2))
    assert job.slots == SlotMap(version=2, owners=spread(128, 2), pservers=3)
    assert DesirePservers(3) in changes
    assert step(job) == (), "pserver-2 is not registered yet"


def test_slots_move_once_the_target_has_everything_and_the_job_is_committed_once_the_sources_forgot() -> None:
    job = job_of()
    migration = migrating(job, 3)
    assert job.state.joined == {"2": "p2"}
    assert step(job) == ()
    sources = sorted({group.source for group in migration.groups})
    for index in sources:
        mine = tuple(group.number for group in migration.groups if group.source == index)
        hand_over(job, index, groups=mine, bytes=100, longest_pause_s=0.01 * index)
    before = job.slots
    step(job)
    assert before is not None
    assert job.slots is not None
    assert job.slots.version == before.version + 1
    assert all(job.slots.owners[slot] == 2 for group in migration.groups for slot in group.slots)
    assert step(job) == (), "the sources have not forgotten them"
    for index in sources:
        mine = tuple(group.number for group in migration.groups if group.source == index)
        hand_over(job, index, groups=mine, forgotten=len(mine), bytes=100, longest_pause_s=0.01 * index)
    step(job)
    done = job.operations.records["op-1"]
    assert (done.state, progress(job).phase, job.migration) == (
        OperationState.DONE,
        ResizePhase.COMMITTED,
        None,
    )
    assert progress(job).bytes_moved == 100 * len(sources)


def test_a_parameter_server_that_shall_leave_is_needed_until_its_slots_have_moved() -> None:
    job = job_of()
    assert job.pservers_needed == 2
    migrating(job, 1)
    assert (job.spec.pservers, job.pservers_needed) == (1, 2)
    job.slots = SlotMap(version=2, owners=spread(128, 1), pservers=1)
    assert job.pservers_needed == 1
    job.slots = None
    assert job.pservers_needed == 1


def test_what_another_migration_handed_over_does_not_count() -> None:
    job = job_of()
    migration = migrating(job, 3)
    source = migration.groups[0].source
    hand_over(job, source, migration="op-0.1", groups=(0,))
    assert step(job) == ()


def test_no_slot_moves_while_a_checkpoint_is_taken_or_parameters_are_missing() -> None:
    job = job_of()
    migration = migrating(job, 3)
    hand_over(job, migration.groups[0].source, groups=(migration.groups[0].number,))
    for state in (
        job.state.model_copy(update={"phase": Phase.CHECKPOINTING}),
        job.state.model_copy(update={"absent": (1,)}),
    ):
        running, job.state = job.state, state
        assert step(job) == ()
        job.state = running
    assert step(job)


@pytest.mark.parametrize("why", ["gone", "replaced", "another timeline", "failed"])
def test_a_migration_whose_members_changed_is_planned_again(why: str) -> None:
    job = job_of()
    migration = migrating(job, 3)
    match why:
        case "gone":
            job.members = replace(job.members, pservers=pservers(0, 1))
        case "replaced":
            new = pservers(2)[2].model_copy(update={"incarnation": "new"})
            job.members = replace(job.members, pservers={**pservers(0, 1), 2: new})
        case "another timeline":
            job.state = job.state.model_copy(update={"timeline": 9})
        case "failed":
            hand_over(job, migration.groups[0].source, failed="no route to pserver-2")
    changes = step(job)
    assert DropMigration() in changes
    assert (progress(job).phase, job.migration) == (ResizePhase.STARTING, None)


def test_a_cancelled_resize_leaves_what_has_moved_and_wants_as_many_members_as_that_needs() -> None:
    job = job_of()
    migration = migrating(job, 4)
    first = migration.groups[0]
    hand_over(job, first.source, groups=(first.number,))
    step(job)
    take(job, resize.cancel(job, job.operations.records["op-1"], STAMP))
    assert progress(job).phase is ResizePhase.CANCELLED
    assert job.slots is not None
    assert (job.spec.pservers, job.slots.wanted) == (first.target + 1, first.target + 1)
    assert job.migration is None
    with pytest.raises(Conflict, match="nothing to cancel"):
        resize.cancel(job, job.operations.records["op-1"], STAMP)


def test_a_resize_that_is_too_late_ends_and_says_what_it_waited_for() -> None:
    job = job_of()
    take(job, operations.ask(job, asked(job, pservers=3)))
    step(job)
    changes = take(job, operations.tick(job, 61.0, STAMP))
    done = job.operations.records["op-1"]
    assert (done.state, progress(job).phase, job.spec.pservers) == (
        OperationState.FAILED,
        ResizePhase.FAILED,
        2,
    )
    assert "1 of 3 parameter servers to register" in done.reason
    assert DesirePservers(2) in changes


def test_trainers_alone_are_resized_when_as_many_are_there() -> None:
    job = job_of()
    take(job, operations.ask(job, asked(job, trainers=3)))
    step(job)
    assert job.spec.trainers == 3
    step(job)
    assert job.operations.records["op-1"].running
    job.members = replace(job.members, trainers=trainers("a", "b", "c"))
    job.trainers = TrainerList(generation=5, lanes=4, names=("a", "b", "c"))
    step(job)
    assert job.operations.records["op-1"].state is OperationState.DONE


def test_a_job_started_again_with_other_numbers_ends_the_resize() -> None:
    job = job_of()
    migrating(job, 3)
    job.spec = job.spec.model_copy(update={"pservers": 5})
    step(job)
    assert progress(job).phase is ResizePhase.ROLLED_BACK
    assert "started again with" in job.operations.records["op-1"].reason


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("phase", [Phase.RUNNING, Phase.ROLLING_BACK])
@pytest.mark.parametrize("pservers", [1, 3])
def test_a_job_started_again_while_slots_move_waits_for_no_owner_of_before(
    mode: Mode, phase: Phase, pservers: int
) -> None:
    """With as many parameter servers as the resize wanted, and another number of trainers."""
    job = job_of(mode=mode, checkpoint_kind="coordinated")
    migrating(job, pservers)
    assert job.slots is not None
    assert job.slots.serving == (0, 1)
    saved = CheckpointRef(uuid="c", step=3, timeline=0, manifest="m")
    latest = CheckpointLatest(
        uuid="c", step=3, timeline=0, term=1, timestamp="now", manifest="m", slots=job.slots, kept=(saved,)
    )
    members = replace(job.members, pservers={}, latest=latest)
    job.members, job.state = members, job.state.model_copy(update={"phase": phase, "checkpoint": "c"})
    job.spec = job.spec.model_copy(update={"trainers": 3})
    step(job)
    take(job, membership.reconcile(job.spec, job.state, job.trainers, job.slots, job.members))
    assert job.state.phase is Phase.ROLLING_BACK
    assert job.slots.serving == tuple(range(pservers))
    assert placement.holders(job.spec, job.slots) == tuple(range(pservers))


def test_a_restart_asks_for_a_checkpoint_first() -> None:
    job = job_of()
    take(job, operations.ask(job, asked(job, pservers=1, strategy=Strategy.RESTART)))
    step(job)
    step(job)
    assert progress(job).saving == "op-1-checkpoint"
    assert job.operations.records["op-1-checkpoint"].kind is OperationKind.CREATE_CHECKPOINT
    assert job.migration is None


TABLE = TableSpec(
    name="user", dim=4, optimizer=RowOptimizer(kind="sgd", lr=0.1), init=RowInit(kind="constant", scale=0.0)
)


def with_tables(job: Job, mode: Mode = Mode.SYNC) -> Job:
    job.spec = job.spec.model_copy(update={"mode": mode})
    job.members = replace(job.members, layout=LAYOUT.model_copy(update={"tables": (TABLE,)}))
    return job


@pytest.mark.parametrize("mode", list(Mode))
def test_groups_of_slots_are_planned_with_the_rows_that_parameter_servers_tell_of(mode: Mode) -> None:
    job = with_tables(job_of(), mode)
    without = resize.predict(job, resize.wanted(job, None, 3, Strategy.LIVE))
    # of its blocks: those have one version
    assert without.bytes == 65536 * (3 if mode is Mode.ASYNC else 4) // 4
    for index, size in ((0, 64 << 20), (1, 32 << 20)):
        member = job.members.pservers[index].model_copy(update={"rows_bytes": size})
        job.members = replace(job.members, pservers={**job.members.pservers, index: member})
    found = resize.predict(job, resize.wanted(job, None, 3, Strategy.LIVE))
    assert found.slots == 42  # of 128: rows weigh more than blocks
    sent = {moved.pserver: moved.sent for moved in found.by_pserver}
    assert sent[0] == pytest.approx(2 * sent[1], rel=0.1)
    assert found.bytes == pytest.approx((96 << 20) / 3, rel=0.1)
    assert found.groups > without.groups
