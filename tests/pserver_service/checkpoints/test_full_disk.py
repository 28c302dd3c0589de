"""Storage that cannot be written, on real file systems: told once, training goes on, the old checkpoint
stays, nothing is left."""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
from pathlib import Path

import pytest

from tests.equipment.small_disk import fill, mount, small_disk
from tests.equipment.waiting import until
from tests.pserver_service.checkpoints.cluster import Away, PserverCluster, run_scenario
from trireme_shared.protocol.records import PserverMember

__all__ = ["small_disk"]


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


async def troubles(cluster: PserverCluster) -> dict[int, str]:
    return {index: member.trouble for index, member in (await cluster.members()).items()}


async def told(cluster: PserverCluster) -> list[PserverMember]:
    """Every value of ps/<index> since the start that differs from the one before in what it says about
    checkpoints."""
    events = [event for event in cluster.simulated.events() if "/ps/" in event.kv.key and event.type == "put"]
    members = [PserverMember.model_validate_json(event.kv.value) for event in events]
    return [m for m in members if m.trouble]


def test_a_full_disk_is_told_once_and_the_next_checkpoint_after_it_succeeds(small_disk):
    async def scenario():
        cluster = PserverCluster(str(small_disk))
        await cluster.open()
        before = await cluster.committed(0)
        kept = files(small_disk)
        filler = fill(small_disk)
        for first in range(0, 8, 2):
            await cluster.train(first, first + 2)
            wanted = f"step {first + 2} "
            infos = [node.pserver for node in cluster.nodes.values()]
            await until(
                lambda p=infos, w=wanted: all(w in i.checkpoint_error for i in p), "each failure is seen"
            )
        assert [store.lowest for store in cluster.stores] == [8, 8], "training goes on"
        said = await told(cluster)
        assert [member.index for member in sorted(said, key=lambda m: m.index)] == [0, 1], (
            "once each, not per step"
        )
        assert all("No space left on device" in member.trouble for member in said)
        assert all(f"step 2 below {small_disk}/checkpoints" in member.trouble for member in said)
        assert await cluster.latest() == before
        cluster.check_latest(before)
        assert files(small_disk) == kept | {"filler"}, "no temporary file and no part is left"

        filler.unlink()
        await cluster.train(8, 10)
        latest = await cluster.committed(10)
        cluster.check_latest(latest)
        assert [ref.step for ref in latest.kept] == [10, 0]
        await until(lambda: not any(n.pserver.checkpoint_error for n in cluster.nodes.values()), "it is over")
        while any((await troubles(cluster)).values()):
            await cluster.train(10, 10)
        assert {name.split("/")[1] for name in files(small_disk)} == {ref.uuid for ref in latest.kept}

    run_scenario(scenario)


@pytest.mark.parametrize("slow", [0, 1], ids=["it fails after the other has written", "it fails before"])
def test_parts_of_a_checkpoint_that_another_could_not_write_do_not_fill_the_disk(tmp_path, slow):
    """Its owner deletes his own part: the checkpoint will never be whole."""

    async def scenario():
        cluster = PserverCluster(str(tmp_path))
        await cluster.open()
        before = await cluster.committed(0)
        kept = files(tmp_path)
        other, failing = (cluster.nodes[index].member.checkpointer for index in range(2))

        async def full(work, *arguments):
            await asyncio.sleep(1.0 - slow)
            raise OSError(28, "No space left on device")

        async def late(work, *arguments):
            await asyncio.sleep(slow)
            return work(*arguments)

        failing.offload, other.offload = full, late

        def parts_finished():
            keys = [event.kv.key for event in cluster.simulated.events() if event.type == "put"]
            return len([key for key in keys if key.endswith("/finished/0") and before.uuid not in key])

        for number, step in enumerate(range(0, 6, 2), 1):
            await cluster.train(step, step + 2)
            await until(
                lambda s=step: f"step {s + 2} " in cluster.nodes[1].pserver.checkpoint_error, "it fails"
            )
            await until(lambda n=number: parts_finished() == n, "the other's part is written")
            await until(lambda: files(tmp_path) == kept, "the other's part is deleted")
            assert not other.busy, "a member that leaves does not wait for what can never be"
        assert await cluster.latest() == before
        assert not [key for key in await cluster.tree() if "/finished/" in key and before.uuid not in key]

    run_scenario(scenario)


def test_a_read_only_file_system(tmp_path):
    async def scenario():
        cluster = PserverCluster(str(tmp_path))
        await cluster.open()
        before = await cluster.committed(0)
        mount("--bind", str(tmp_path), str(tmp_path))
        try:
            mount("-o", "remount,ro,bind", str(tmp_path))
            await cluster.train(0, 2)
            await until(lambda: all(n.pserver.checkpoint_error for n in cluster.nodes.values()), "it is told")
            assert "Read-only file system" in cluster.nodes[0].pserver.checkpoint_error
            cluster.check_latest(before)
        finally:
            subprocess.run(["umount", "-l", str(tmp_path)], check=True, timeout=20)
        await cluster.train(2, 4)
        cluster.check_latest(await cluster.committed(4))

    run_scenario(scenario)


def test_a_file_in_place_of_the_folder(tmp_path):
    async def scenario():
        (tmp_path / "checkpoints").touch()
        cluster = PserverCluster(str(tmp_path))
        await cluster.open()
        await until(lambda: all(n.pserver.checkpoint_error for n in cluster.nodes.values()), "it is told")
        error = cluster.nodes[0].pserver.checkpoint_error
        assert f"below {tmp_path}/checkpoints: " in error
        assert "make room or give the job a storage that can be written" in error
        (tmp_path / "checkpoints").unlink()
        await cluster.train(0, 2)
        cluster.check_latest(await cluster.committed(2))

    run_scenario(scenario)


def test_a_manifest_that_cannot_be_written_is_told_and_the_next_checkpoint_is_committed(tmp_path):
    async def scenario():
        cluster = PserverCluster(str(tmp_path))
        await cluster.open()
        before = await cluster.committed(0)

        async def full(work, *arguments):
            if work.__name__ == "write_manifest":
                raise OSError(28, "No space left on device")
            return work(*arguments)

        for node in cluster.nodes.values():
            node.member.checkpointer.committer.offload = full
        await cluster.train(0, 2)
        nodes = cluster.nodes.values()
        await until(
            lambda: any("cannot be committed" in n.pserver.checkpoint_error for n in nodes), "it is told"
        )
        assert await cluster.latest() == before
        for node in nodes:
            node.member.checkpointer.committer.offload = node.crash_point.offload
        await cluster.train(2, 4)
        cluster.check_latest(await cluster.committed(4))

    run_scenario(scenario)


def test_a_store_that_is_not_reached_while_the_job_rolls_back_is_waited_for(tmp_path):
    """No checkpoint is given up for it, however long it takes."""

    async def scenario():
        cluster = PserverCluster(str(tmp_path))
        await cluster.open()
        await cluster.train(0, 2)
        latest = await cluster.committed(2)
        away = Away(cluster.nodes[1].crash_point.offload, times=50)
        rollback = cluster.nodes[1].member.rollback
        rollback.context = dataclasses.replace(rollback.context, offload=away)
        members = await cluster.roll_back(checkpoint=latest.uuid)
        assert away.refused == 50
        assert [member.restored.error for member in members] == ["", ""]

    run_scenario(scenario)
