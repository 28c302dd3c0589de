"""Paused checkpoints from the master's side: who is waited for, what ends a pause, and what a lost pserver
costs."""

from __future__ import annotations

import asyncio

from master_service.control.pause_runner import ANSWER_S, COPY_LIMIT_S, LOOK_S, SILENT_S, seconds_between
from master_service.core.decisions.queue_at_checkpoint import moved_losses, read_cut
from master_service.leadership.master import Master
from tests.equipment.virtual_loop import run_virtually
from tests.equipment.waiting import until
from tests.master_service.cluster import KEYS, MasterCluster, Storage, done, leading, running, take
from tests.master_service.control.pausing import checkpointing, copy, copy_slowly, cut_of, names, pause, spec
from tests.master_service.control.restoring import LAYOUT, checkpoint
from trireme_shared.platform.runtime import clock
from trireme_shared.protocol.errors import CheckpointUnusable
from trireme_shared.protocol.records import Mode, Phase, Restored, SlotMap, TaskMeta
from trireme_shared.protocol.records.assignments import spread
from trireme_shared.protocol.records.checkpoints import CheckpointRef, Manifest
from trireme_shared.protocol.records.job import Losses
from trireme_shared.protocol.records.layout import RowInit, RowOptimizer, Segment, TableSpec


def test_a_pause_waits_for_all_trainers_then_for_all_copies_and_is_confirmed() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec())
        async with running(cluster, "t1", "t2") as master:
            state = await checkpointing(master)
            assert state.saving is not None
            uuid = state.saving.uuid
            found = await cluster.etcd.get(KEYS.pause)
            assert found is not None
            assert found.lease, "it ends with the master"
            assert (await master.acquire_task(cluster.ask(master))).answer == "wait"
            await pause(cluster, "t1", uuid)
            await asyncio.sleep(ANSWER_S / 2)
            assert await cut_of(cluster, uuid) is None
            await cluster.lose("t2")
            await until(lambda: master.job.state.saving and master.job.state.saving.cut, "the cut")
            assert master.job.state.generation == state.generation + 1, "pushes of before are stale"
            await copy(cluster, 0, uuid)
            await asyncio.sleep(ANSWER_S / 4)
            cut = await cut_of(cluster, uuid)
            assert cut is not None
            assert not cut.copied
            await copy(cluster, 1, uuid)
            await until(lambda: master.job.state.phase is Phase.RUNNING, "training to go on")
            cut = await cut_of(cluster, uuid)
            assert cut is not None
            assert (cut.copied, cut.operation) == (True, "")
            assert await cluster.etcd.get(KEYS.pause) is None
            assert "checkpoint_copied" in names(master)

    run_virtually(main)


def test_a_trainer_that_does_not_pause_in_time_is_left_out_until_the_pause_is_over() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec(checkpoint_every_seconds=12.0))
        async with running(cluster, "t1", "t2") as master:
            began, held = clock.monotonic(), None
            for step in (1, 2):
                state = await checkpointing(master)
                assert state.saving is not None
                uuid = state.saving.uuid
                if step == 2:
                    assert clock.monotonic() - began <= seconds_between(12.0)
                await pause(cluster, "t1", uuid)
                await until(
                    lambda: master.job.state.saving and master.job.state.saving.cut, "the cut", 2 * ANSWER_S
                )
                cutting, listed = master.job.state, master.job.trainers.names
                assert (listed, cutting.generation) == (("t1",), state.generation + 1), (
                    "t2's pushes are stale"
                )
                for index in range(2):
                    await copy(cluster, index, uuid)
                await until(lambda: master.job.state.phase is Phase.RUNNING, "training to go on")
                after = master.job.state
                assert (set(master.job.trainers.names), after.generation) == (
                    {"t1", "t2"},
                    cutting.generation + 1,
                )
                cut = await cut_of(cluster, uuid)
                assert cut is not None
                assert (cut.copied, cut.trainers) == (True, ("t1",))
                assert "left_out_of_pause" in names(master)
                if held is None:
                    held = await take(cluster, master, "t2")
                assert held.task_id in master.job.training.pending, "it goes on when it wakes"

    run_virtually(main)


async def answer_pauses(cluster: MasterCluster, master: Master) -> None:
    """What the members do, until cancelled."""
    while True:
        state = await checkpointing(master)
        assert state.saving is not None
        for trainer in master.job.trainers.names:
            await pause(cluster, trainer, state.saving.uuid)
        await until(lambda: master.job.state.saving and master.job.state.saving.cut, "the cut")
        for index in range(2):
            await copy(cluster, index, state.saving.uuid)
        await until(lambda: master.job.state.phase is Phase.RUNNING, "training to go on")


def test_a_task_that_nobody_works_on_runs_over_its_time_however_often_the_job_pauses() -> None:
    """Its trainer never heard of it, for example because its request was sent twice."""

    async def main() -> None:
        cluster = MasterCluster(
            spec(checkpoint_every_seconds=3.0, task_timeout_floor_s=20.0, task_timeout_ceiling_s=20.0)
        )
        async with running(cluster, "t1") as master:
            answering = asyncio.create_task(answer_pauses(cluster, master))
            await until(
                lambda: master.job.state.saved == 1 and master.job.state.phase is Phase.RUNNING, "one pause"
            )
            held, began = await take(cluster, master, "t1"), clock.monotonic()
            await until(lambda: held.task_id not in master.job.training.pending, "the task to go back")
            assert clock.monotonic() - began > 20.0
            assert master.job.state.saved > 4
            answering.cancel()

    run_virtually(main)


def test_checkpoints_are_at_most_so_far_apart() -> None:
    assert seconds_between(60.0) == 60.0 + ANSWER_S + 2 * LOOK_S
    assert seconds_between(1.0) == 11 * (ANSWER_S + LOOK_S) + LOOK_S, (
        "after a pause training goes on for nine times as long"
    )
    given_up = SILENT_S + LOOK_S
    assert seconds_between(60.0, frozen_s=1.0) == seconds_between(60.0) + 10 * given_up + LOOK_S
    assert seconds_between(60.0, frozen_s=99.0) == seconds_between(60.0) + given_up + 99.0 + LOOK_S


def test_a_member_that_is_too_slow_or_dies_ends_the_pause_and_nothing_of_it_counts() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec())
        async with running(cluster, "t1") as master:
            state = await checkpointing(master)
            assert state.saving is not None
            await pause(cluster, "t1", state.saving.uuid)
            async with asyncio.TaskGroup() as group:
                copying = [group.create_task(copy_slowly(cluster, index)) for index in range(2)]
                await asyncio.sleep(COPY_LIMIT_S + 2)
                for task in copying:
                    task.cancel()
            assert master.job.state.phase is Phase.RUNNING
            assert (
                master.job.state.reason
                == "checkpoint 1 was given up: pserver-0, pserver-1 did not copy within 60 s"
            )
            await until(
                lambda: master.job.state.saved == 2, "it to be tried again, much later", 10 * COPY_LIMIT_S
            )
            again = (await checkpointing(master)).saving
            assert again is not None
            await pause(cluster, "t1", again.uuid)
            await until(lambda: master.job.state.saving and master.job.state.saving.cut, "the cut")
            await checkpoint(cluster, 1)
            await until(lambda: master.job.members.latest, "the checkpoint to be seen")
            await cluster.lose("pserver-1")
            await until(lambda: "pserver_lost" in names(master), "the loss to be noticed")
            assert await cut_of(cluster, again.uuid) is None
            assert await cluster.etcd.get(KEYS.pause) is None
            assert (master.job.state.phase, master.job.state.absent) == (Phase.RUNNING, (1,))

    run_virtually(main)


def test_a_new_master_gives_up_the_pause_of_the_last_one_and_takes_another() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec())
        async with running(cluster, "t1") as first:
            state = await checkpointing(first)
        async with leading(cluster.master("m2")) as second:
            await until(lambda: "checkpoint_given_up" in names(second), "the pause to end")
            await until(lambda: second.job.state.saved == 2, "another checkpoint to begin")
            assert second.job.state.saving != state.saving

    run_virtually(main)


def test_a_returned_pserver_is_charged_for_closed_tasks_and_old_reports_put_their_task_back() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec(checkpoint_every_epochs=None, records_per_task=10, global_batch_size=4))
        meta = TaskMeta(epoch=0, digest="d", seed=0, tasks=10).to_bytes().decode()
        async with running(cluster, "t1") as master:
            state = await checkpointing(master)
            assert state.saving is not None
            await pause(cluster, "t1", state.saving.uuid)
            await until(lambda: master.job.state.saving and master.job.state.saving.cut, "the cut")
            for index in range(2):
                await copy(cluster, index, state.saving.uuid)
            await until(lambda: master.job.state.phase is Phase.RUNNING, "training to go on")
            await checkpoint(cluster, 1)
            manifest = cluster.storage.manifests["at-1"]
            assert not isinstance(manifest, Exception)
            queue = {"meta": meta}
            cluster.storage.manifests["at-1"] = manifest.model_copy(
                update={"queue": queue, "mode": Mode.ASYNC}
            )
            closed, open_task = await take(cluster, master), await take(cluster, master)
            late = await take(cluster, master)
            before = master.job.state.generation
            await master.complete_task(closed.task_id, done(closed, generation=before))
            await until(lambda: master.job.members.latest, "the checkpoint to be seen")
            await cluster.lose("pserver-1")
            await until(lambda: master.job.state.absent == (1,), "the loss")
            said = Restored(timeline=0, checkpoint="at-1", rejoined=True, blocks=3)
            await cluster.add_pserver(1, restored=said)
            await until(lambda: master.job.state.absent == (), "the return")
            assert master.job.losses.lost == {"1": 3}, "10 records are 3 minibatches of at most 4"
            assert master.job.state.mended == before + 1
            await master.complete_task(late.task_id, done(late, generation=before))
            assert late.task_id in master.job.training.requeued
            fresh = done(open_task, generation=before + 1, skipped={"0": 2})
            await master.complete_task(open_task.task_id, fresh)
            assert master.job.losses.skipped == {"0": 2}
        async with leading(cluster.master("m2")) as second:
            assert second.job.losses.lost == {"1": 3}

    run_virtually(main)


def test_a_pserver_that_loaded_a_checkpoint_that_is_deleted_loads_again() -> None:
    """A newer checkpoint, begun before its death, was committed while it loaded the one before, which was
    deleted."""

    async def main() -> None:
        cluster = MasterCluster(spec())
        async with running(cluster, "t1") as master:
            await checkpoint(cluster, 2)
            await until(lambda: master.job.members.latest, "the checkpoint to be seen")
            await cluster.lose("pserver-1")
            await until(lambda: master.job.state.absent == (1,), "the loss")
            await cluster.add_pserver(
                1, restored=Restored(timeline=0, checkpoint="at-1", rejoined=True, blocks=3)
            )
            async with asyncio.timeout(60.0):
                while await cluster.etcd.get(KEYS.pserver(1)) is not None:
                    await asyncio.sleep(0.01)
            assert not master.job.state.phase.final
            assert master.job.state.absent == (1,)
            meta = TaskMeta(epoch=0, digest="d", seed=0, tasks=10).to_bytes().decode()
            manifest = cluster.storage.manifests["at-2"]
            assert not isinstance(manifest, Exception)
            cluster.storage.manifests["at-2"] = manifest.model_copy(
                update={"queue": {"meta": meta}, "mode": Mode.ASYNC}
            )
            await cluster.add_pserver(
                1, restored=Restored(timeline=0, checkpoint="at-2", rejoined=True, blocks=3)
            )
            await until(lambda: master.job.state.absent == (), "the return")

    run_virtually(main)


class CountingStorage(Storage):
    reads = 0

    async def read_manifest(self, ref: CheckpointRef) -> Manifest:
        self.reads += 1
        return await super().read_manifest(ref)


def test_a_job_that_failed_since_a_pserver_came_back_from_a_damaged_checkpoint_reads_it_no_more() -> None:
    async def main() -> None:
        storage = CountingStorage()
        cluster = MasterCluster(spec(), storage)
        async with running(cluster, "t1") as master:
            await checkpoint(cluster, 1)
            await until(lambda: master.job.members.latest, "the checkpoint to be seen")
            storage.manifests["at-1"] = CheckpointUnusable("its manifest is damaged")
            await cluster.lose("pserver-1")
            await until(lambda: master.job.state.absent == (1,), "the loss")
            await cluster.add_pserver(
                1, restored=Restored(timeline=0, checkpoint="at-1", rejoined=True, blocks=3)
            )
            await until(lambda: master.job.state.phase is Phase.FAILED, "the failure")
            assert "what pserver-1 lost cannot be counted" in master.job.state.reason
            before = storage.reads
            await asyncio.sleep(5)
            assert storage.reads <= before + 1

    run_virtually(main)


class SlowStorage(Storage):
    """Reads a manifest once `gate` is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()

    async def read_manifest(self, ref: CheckpointRef) -> Manifest:
        await self.gate.wait()
        return await super().read_manifest(ref)


def test_members_join_and_leave_while_a_slow_storage_is_read() -> None:
    async def main() -> None:
        storage = SlowStorage()
        cluster = MasterCluster(spec(), storage)
        async with running(cluster, "t1") as master:
            await checkpoint(cluster, 1)
            await until(lambda: master.job.members.latest, "the checkpoint to be seen")
            manifest = storage.manifests["at-1"]
            assert not isinstance(manifest, Exception)
            meta = TaskMeta(epoch=0, digest="d", seed=0, tasks=10).to_bytes().decode()
            storage.manifests["at-1"] = manifest.model_copy(
                update={"queue": {"meta": meta}, "mode": Mode.ASYNC}
            )
            await cluster.lose("pserver-1")
            await until(lambda: master.job.state.absent == (1,), "the loss")
            await cluster.add_pserver(
                1, restored=Restored(timeline=0, checkpoint="at-1", rejoined=True, blocks=3)
            )
            await asyncio.sleep(0.5)
            await cluster.add_trainer("t2")
            await until(lambda: master.job.trainers.names == ("t1", "t2"), "t2 to join", 2)
            await cluster.lose("t1")
            await until(lambda: master.job.trainers.names == ("t2",), "t1 to leave", 2)
            assert master.job.state.absent == (1,)
            storage.gate.set()
            await until(lambda: master.job.state.absent == (), "the return")

    run_virtually(main)


def test_the_queue_of_a_cut_is_read_from_the_manifest() -> None:
    pending = b'{"attempt":2,"trainer":"t","stream":"0","epoch":1,"index":3,"remaining_s":1.0}'.decode()
    meta = TaskMeta(epoch=1, digest="d", seed=0, tasks=9).to_bytes().decode()
    cut = read_cut({"meta": meta, "cursor/0": "4", "pending/7": pending, "losses": '{"lost":{"1":5}}'})
    assert (cut.epoch, cut.cursor, cut.losses.lost) == (1, 4, {"1": 5})
    assert (cut.open["7"].attempts, cut.open["7"].index) == (2, 3)


def test_losses_move_with_the_blocks_to_other_parameter_servers() -> None:
    losses = Losses(lost={"1": 5}, skipped={"0": 2})
    eight_blocks = (Segment(kind="param", dtype="float32", elements=8 * 64, group=0),)
    manifest = Manifest.model_construct(
        slots=SlotMap(version=1, owners=spread(128, 2)),
        layout=LAYOUT.model_copy(update={"segments": eight_blocks}),
    )
    for pservers, lost, skipped in (
        (2, {"1": 5}, {"0": 2}),
        (1, {"0": 5}, {"0": 2}),
        (4, {"1": 5, "3": 5}, {"0": 2, "2": 2}),
        (3, {"0": 5, "1": 5, "2": 5}, {"0": 2, "1": 2, "2": 2}),
    ):
        moved = moved_losses(losses, manifest, SlotMap(version=2, owners=spread(128, pservers)))
        assert (moved.lost, moved.skipped) == (lost, skipped), pservers


def test_losses_of_rows_move_with_slots_that_have_no_block() -> None:
    one_block = (Segment(kind="param", dtype="float32", elements=64, group=0),)
    table = TableSpec(
        name="user",
        dim=4,
        optimizer=RowOptimizer(kind="sgd", lr=0.1),
        init=RowInit(kind="constant", scale=0.0),
    )
    for tables, lost in (((), {"0": 5}), ((table,), {"0": 5, "1": 5})):
        manifest = Manifest.model_construct(
            slots=SlotMap(version=1, owners=(0,) * 128),
            layout=LAYOUT.model_copy(update={"segments": one_block, "tables": tables}),
        )
        moved = moved_losses(Losses(lost={"0": 5}), manifest, SlotMap(version=2, owners=spread(128, 2)))
        assert moved.lost == lost
