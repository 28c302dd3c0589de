"""What a failed job remembers of its failure, and what follows when the user starts it again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from master_service.core.changes import RestartQueue
from master_service.core.decisions.lifecycle import cause_of, fail, start_again, train_longer
from master_service.store.between_runs import renew
from master_service.store.between_runs import start_again as write_start_again
from master_service.store.schema import read_events
from tests.equipment.etcd.simulated import SimulatedEtcd
from tests.equipment.virtual_loop import VirtualLoop, run
from tests.master_service.core.members import RUNNING, state_after
from trireme_shared.checkpoints.writer import write_manifest
from trireme_shared.platform.etcd import Etcd
from trireme_shared.protocol.errors import Conflict, DatasetError, StorageUnreachable
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import (
    EvaluationSums,
    FailureCause,
    JobSpec,
    JobState,
    Mode,
    Phase,
    SlotMap,
    Stage,
    TaskKind,
    UserFailure,
)
from trireme_shared.protocol.records.checkpoints import CheckpointLatest, CheckpointRef, Manifest
from trireme_shared.protocol.records.datasets import TextLines
from trireme_shared.protocol.records.job import JobResult
from trireme_shared.protocol.records.job_choices import AcceptedChange
from trireme_shared.protocol.records.layout import Layout, OptimizerSpec
from trireme_shared.protocol.records.step import LanePosition, StepRecord

AWAY = RUNNING.model_copy(update={"damaged": ("c1",), "absent": (1,), "timeline": 3, "checkpoint": "c0"})
KEYS = Keys("ctr")


@pytest.mark.parametrize(
    ("error_type", "cause"),
    [
        ("KeyError", FailureCause.SCRIPT),
        ("LAYOUT_MISMATCH", FailureCause.SCRIPT),
        (DatasetError.code, FailureCause.DATASET),
        (StorageUnreachable.code, FailureCause.STORAGE),
    ],
)
def test_the_error_tells_whether_the_script_is_the_cause(error_type: str, cause: FailureCause) -> None:
    assert cause_of(UserFailure(error_type=error_type, message="no")) is cause
    assert cause_of(None) is FailureCause.MEMBERS


@pytest.mark.parametrize("cause", [FailureCause.MEMBERS, FailureCause.STORAGE, FailureCause.DATASET])
def test_a_job_that_did_not_fail_by_its_script_waits_for_members_again_where_it_was(
    cause: FailureCause,
) -> None:
    failed = state_after(fail(AWAY, "pserver-1 did not come back", cause))
    assert (failed.phase, failed.cause) == (Phase.FAILED, cause)
    decision = start_again(failed)
    again = state_after(decision)
    expected = {"phase": Phase.WAITING, "damaged": (), "absent": (), "reason": again.reason}
    assert again == AWAY.model_copy(update=expected)
    assert again.reason == "started again after: pserver-1 did not come back"
    assert len(decision.changes) == 1


@pytest.mark.parametrize("state", [RUNNING, JobState(phase=Phase.FAILED), JobState(phase=Phase.COMPLETED)])
def test_other_jobs_stay_as_they_are(state: JobState) -> None:
    assert not start_again(state).answer
    assert not start_again(state_after(fail(RUNNING, "KeyError", FailureCause.SCRIPT))).answer


def test_tasks_that_ended_the_job_are_given_again() -> None:
    exporting = RUNNING.model_copy(update={"stage": Stage.EXPORT})
    decision = start_again(state_after(fail(exporting, "no space", FailureCause.STORAGE)))
    assert decision.changes[1:] == (RestartQueue(TaskKind.EXPORT),)
    evaluating = RUNNING.model_copy(update={"stage": Stage.EVALUATE})
    decision = start_again(state_after(fail(evaluating, "no file", FailureCause.DATASET)))
    assert decision.changes[1:] == (RestartQueue(TaskKind.EVALUATE), EvaluationSums())


def test_it_is_written_once_and_never_beside_a_master() -> None:
    async def main() -> None:
        etcd = Etcd(SimulatedEtcd().transport("launcher"))
        assert not await write_start_again(etcd, KEYS), "a new job"
        exporting = RUNNING.model_copy(update={"stage": Stage.EXPORT})
        failed = state_after(fail(exporting, "no space", FailureCause.STORAGE))
        await etcd.put(KEYS.state, failed.to_bytes())
        await etcd.put(KEYS.discarded("export-0@0"), b"{}")
        await etcd.put(KEYS.master_lock, b"{}")
        with pytest.raises(Conflict, match="a master runs already"):
            await write_start_again(etcd, KEYS)
        await etcd.delete(KEYS.master_lock)
        assert await write_start_again(etcd, KEYS)
        found = await etcd.get(KEYS.state)
        assert found is not None
        assert JobState.model_validate_json(found.value).phase is Phase.WAITING
        assert await etcd.get(KEYS.discarded("export-0@0")) is None
        assert not await write_start_again(etcd, KEYS)

    rng = random.Random(7)
    run(VirtualLoop(rng), asyncio.wait_for(main(), 60), rng)


def test_a_job_that_ended_waits_for_members_with_more_epochs_and_one_that_trains_stays_as_it_is() -> None:
    result = JobResult(trained_records=640, metrics={"mse": 0.1})
    ended = RUNNING.model_copy(update={"phase": Phase.COMPLETED, "stage": Stage.DONE, "result": result})
    longer = state_after(train_longer(ended, 9))
    told = "it trains longer, to epoch 9"
    update = {"phase": Phase.WAITING, "stage": Stage.TRAIN, "result": JobResult(), "reason": told}
    assert longer == ended.model_copy(update=update)
    assert train_longer(RUNNING, 9).changes == ()
    exporting = RUNNING.model_copy(update={"stage": Stage.EXPORT})
    assert state_after(train_longer(exporting, 9)).stage is Stage.TRAIN


def test_more_epochs_change_nothing_once_stop_early_has_ended_the_job() -> None:
    stopped = RUNNING.model_copy(update={"stage": Stage.DONE, "result": JobResult(stopped_step=70)})
    with pytest.raises(Conflict, match="ended the job at step 70"):
        train_longer(stopped, 9)


def spec_of(folder: Path) -> JobSpec:
    return JobSpec(
        job="ctr",
        script="/s.py",
        storage=str(folder),
        dataset=TextLines("t.txt"),
        evaluation_dataset=TextLines("t.txt"),
        epochs=2,
        lanes=1,
        evaluate_every="epoch",
    )


LAYOUT = Layout(
    segments=(),
    block_bytes=256,
    digest="",
    optimizer=OptimizerSpec(name="SGD", defaults={}, groups=({"lr": 0.1},)),
)


async def at_once(work: Callable[..., Any], *arguments: object) -> Any:
    return work(*arguments)


def saved(folder: Path, position: LanePosition) -> CheckpointLatest:
    """A checkpoint of step 12, at which the only lane's reader has that position."""
    ref = CheckpointRef(uuid="u", step=12, timeline=0, manifest="")
    manifest = Manifest(
        **ref.model_dump(include={"uuid", "step", "timeline"}),
        job="ctr",
        term=1,
        generation=1,
        mode=Mode.SYNC,
        lanes=1,
        seed=0,
        spec_digest="",
        timestamp="",
        slots=SlotMap(version=1, owners=(0,)),
        layout=LAYOUT,
        record=StepRecord(version=12, positions=(position,)),
        parts=(),
    )
    ref = ref.model_copy(update={"manifest": write_manifest(str(folder), manifest)})
    return CheckpointLatest(
        **ref.model_dump(include={"uuid", "step", "timeline", "manifest"}),
        term=1,
        timestamp="",
        slots=manifest.slots,
        kept=(ref,),
        final=True,
    )


def test_a_changed_spec_is_written_once_and_the_last_checkpoint_is_not_the_last_any_more(
    tmp_path: Path,
) -> None:
    spec = spec_of(tmp_path)
    latest = saved(tmp_path, LanePosition(lane=0, epoch=1, exhausted=True))
    longer = spec.model_copy(update={"epochs": 5, "keep_checkpoints": 4, "trainers": 7})

    async def main() -> None:
        etcd = Etcd(SimulatedEtcd().transport("launcher"))
        assert not await renew(etcd, KEYS, spec), "a new job"
        ended = RUNNING.model_copy(update={"phase": Phase.COMPLETED, "stage": Stage.DONE})
        await etcd.put(KEYS.spec, spec.to_bytes())
        await etcd.put(KEYS.state, ended.to_bytes())
        await etcd.put(KEYS.latest, latest.to_bytes())
        assert not await renew(etcd, KEYS, spec), "nothing has changed"
        await etcd.put(KEYS.master_lock, b"{}")
        with pytest.raises(Conflict, match="a master runs already"):
            await renew(etcd, KEYS, longer, at_once)
        await etcd.delete(KEYS.master_lock)
        assert await renew(etcd, KEYS, longer, at_once)
        found = {key: await etcd.get(key) for key in (KEYS.spec, KEYS.state, KEYS.latest)}
        values = [kv.value for kv in found.values() if kv is not None]
        assert JobSpec.model_validate_json(values[0]) == longer.model_copy(update={"trainers": spec.trainers})
        assert JobState.model_validate_json(values[1]).phase is Phase.WAITING
        again = CheckpointLatest.model_validate_json(values[2])
        assert not again.final
        assert [each.evaluation for each in again.kept] == [2], "it is evaluated as in a job of 5 epochs"
        assert not await renew(etcd, KEYS, longer, at_once)

    rng = random.Random(7)
    run(VirtualLoop(rng), asyncio.wait_for(main(), 60), rng)


def test_accepted_changes_are_written_with_their_event_and_the_optimizer_of_the_layout(
    tmp_path: Path,
) -> None:
    spec, other = spec_of(tmp_path), OptimizerSpec(name="SGD", defaults={}, groups=({"lr": 0.2},))
    change = AcceptedChange(number=1, options=1, time="2026-11-30T00:00:00Z", text="optimizer lr 0.1 -> 0.2")
    wanted = spec.with_fields(clip_grad_norm=1.0, history=(change,))

    async def main() -> None:
        etcd = Etcd(SimulatedEtcd().transport("launcher"))
        await etcd.put(KEYS.spec, spec.to_bytes())
        await etcd.put(KEYS.state, RUNNING.to_bytes())
        await etcd.put(KEYS.layout, LAYOUT.to_bytes())
        await etcd.put(KEYS.latest, saved(tmp_path, LanePosition(lane=0, epoch=1, index=1)).to_bytes())
        assert await renew(etcd, KEYS, wanted, at_once, optimizer=other)
        found = [await etcd.get(key) for key in (KEYS.spec, KEYS.layout)]
        values = [kv.value for kv in found if kv is not None]
        assert JobSpec.from_bytes(values[0]) == wanted
        assert Layout.from_bytes(values[1]) == LAYOUT.with_fields(optimizer=other)
        (told,) = (await read_events(etcd, KEYS.events)).after(0, 10)
        assert (told.name, told.event_time) == ("settings_changed", change.time)
        assert told.message == f"from step 12 on with changes that were accepted: {change.text}"
        assert told.fields == {"step": 12, "number": 1, "changes": change.text}
        assert not await renew(etcd, KEYS, wanted, at_once, optimizer=other), "they are accepted once"
        second = change.model_copy(update={"number": 2, "text": "more"})
        assert await renew(etcd, KEYS, wanted.with_fields(history=(change, second)), at_once)
        events = (await read_events(etcd, KEYS.events)).after(0, 10)
        assert [event.event_id - told.event_id for event in events] == [0, 1]

    rng = random.Random(7)
    run(VirtualLoop(rng), asyncio.wait_for(main(), 60), rng)


@pytest.mark.parametrize(
    ("position", "may_change"),
    [
        (LanePosition(lane=0), True),
        (LanePosition(lane=0, epoch=1, index=3, exhausted=True), True),
        (LanePosition(lane=0, epoch=1, index=1), False),
        (LanePosition(lane=0, epoch=1, offset=32), False),
    ],
)
def test_the_global_batch_changes_between_two_epochs_only(
    tmp_path: Path, position: LanePosition, may_change: bool
) -> None:
    spec = spec_of(tmp_path)
    change = AcceptedChange(number=1, time="2026-11-30T00:00:00Z", text="global_batch_size 256 -> 64")
    wanted = spec.with_fields(global_batch_size=64, history=(change,))

    async def main() -> None:
        etcd = Etcd(SimulatedEtcd().transport("launcher"))
        await etcd.put(KEYS.spec, spec.to_bytes())
        await etcd.put(KEYS.state, RUNNING.to_bytes())
        await etcd.put(KEYS.latest, saved(tmp_path, position).to_bytes())
        if may_change:
            assert await renew(etcd, KEYS, wanted, at_once)
            return
        told = (
            r"is 256, and 64 is asked for: it can change between two epochs, .* \(step 12\) is inside epoch 2"
        )
        with pytest.raises(Conflict, match=told):
            await renew(etcd, KEYS, wanted, at_once)
        found = await etcd.get(KEYS.spec)
        assert found is not None
        assert JobSpec.from_bytes(found.value) == spec

    rng = random.Random(7)
    run(VirtualLoop(rng), asyncio.wait_for(main(), 60), rng)
