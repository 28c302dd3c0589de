"""The metrics of a job that is restored to an older checkpoint, and then to a newer one."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from master_service.core.changes import Decision
from master_service.leadership.master import Master
from master_service.storage.series_files import read_all
from tests.equipment.virtual_loop import run_virtually
from tests.equipment.waiting import until
from tests.master_service.api.client import client_of
from tests.master_service.cluster import leading, running
from tests.master_service.control.test_series import Files, World, known, whole
from trireme_shared.protocol.records import SlotMap
from trireme_shared.protocol.records.checkpoints import CheckpointLatest, CheckpointRef

SLOTS = SlotMap(version=1, owners=(0,))


def test_a_restore_of_a_later_checkpoint_has_the_metrics_of_all_steps_before_it_also_at_the_next_master() -> (
    None
):
    """Restore 8, train to step 11, restore 16: steps 11 to 15 were missing, and the loss of the epoch was
    wrong."""

    async def main() -> None:
        world = World()
        refs = (("u16", 16), ("u8", 8))
        kept = tuple(CheckpointRef(uuid=uuid, step=step, timeline=0, manifest="m") for uuid, step in refs)
        latest = CheckpointLatest(
            uuid="u16", step=16, timeline=0, term=1, timestamp="", manifest="m", slots=SLOTS, kept=kept
        )

        async def restore(master: Master, uuid: str, step: int) -> int:
            master.job.members = replace(master.job.members, latest=latest)
            timeline = master.job.state.generation + 1
            back = master.job.state.model_copy(
                update={"generation": timeline, "timeline": timeline, "checkpoint": uuid}
            )
            await master.writer.decide(lambda *_: Decision(None, (back,)))
            master.metrics.rewind(step)
            return timeline

        async with running(world.cluster, "t1") as first:
            await until(lambda: known(first), "the metrics")
            await whole(first, *range(19), store=True)
            line = await restore(first, "u8", 8)
            assert await whole(first, *range(8, 11), timeline=line, store=True) == (11, 11)
        async with leading(world.cluster.master("m2")) as second:
            await until(lambda: known(second), "the metrics")
            line = await restore(second, "u16", 16)
            assert await whole(second, 16, timeline=line) == (17, 8), "what came back is not stored yet"
            async with client_of(second) as client:
                told = (await client.get("/v1/metrics?metric=step_loss")).json()["points"]
                assert [(point["number"], point["loss"]) for point in told] == [
                    (step, float(step)) for step in range(17)
                ]
                [epoch] = (await client.get("/v1/metrics?metric=epoch_loss")).json()["points"]
                assert (epoch["loss"], epoch["records"]) == (8.0, 34)
            assert await whole(second, store=True) == (17, 17)
        files.append(world.files)

    files: list[Files] = []
    run_virtually(main)
    stored = asyncio.run(read_all(files[0]))
    assert [bucket.step for bucket in stored.table.by_name["loss"]] == list(range(17))
    assert stored.steps.next == 17
