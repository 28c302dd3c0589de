"""A job whose storage is S3, by real HTTP: the same protocol as on a disk, nothing half there, nothing left
behind."""

from __future__ import annotations

import asyncio

import pytest

from tests.equipment.s3 import BUCKET, S3Server, refusal, s3
from tests.equipment.waiting import until
from tests.pserver_service.checkpoints import parts
from tests.pserver_service.checkpoints.cluster import PserverCluster, expected, run_scenario
from trireme_shared.checkpoints import stored
from trireme_shared.checkpoints.schedule import Schedule
from trireme_shared.platform.storage import files, object_store
from trireme_shared.protocol.errors import CheckpointUnusable

__all__ = ["s3"]


def place(s3: S3Server) -> str:
    return files.join(s3.url, "runs", "job")


def folders(s3: S3Server) -> set[str]:
    return {key.split("/")[3] for key in s3.objects()}


def test_a_job_checkpoints_keeps_two_and_rolls_back(s3):
    async def scenario():
        cluster = PserverCluster(place(s3))
        await cluster.open()
        for step in (0, 2, 4, 6):
            if step:
                await cluster.train(step - 2, step)
            latest = await cluster.committed(step)
        assert [ref.step for ref in latest.kept] == [6, 4]
        assert folders(s3) == {ref.uuid for ref in latest.kept}
        assert s3.uploads() == []
        await cluster.train(6, 7)
        members = await cluster.roll_back(pservers=None)
        assert [member.restored.error for member in members] == ["", ""]
        assert parts.state_of(cluster.stores) == expected(cluster.layout, 6)
        return latest

    latest = run_scenario(scenario, offline=False)
    manifest = stored.read_manifest(place(s3), parts.JOB, latest.kept[0])
    assert manifest.record.positions == parts.positions(6)
    s3.requests.clear()
    refs, unreadable = stored.found(place(s3))
    assert (refs, unreadable) == (list(latest.kept), [])
    read = [request for request in s3.requests if request.startswith("GET") and "/manifest-" in request]
    assert len(read) == len(refs)
    assert len(s3.requests) <= len(read) * 2 + 4, s3.requests


def test_a_damaged_object_is_noticed_and_the_checkpoint_before_it_is_taken(s3):
    async def scenario():
        cluster = PserverCluster(place(s3))
        await cluster.open()
        await cluster.committed(0)
        await cluster.train(0, 2)
        latest = await cluster.committed(2)
        [key] = [key for key in s3.objects() if latest.uuid in key and "pserver-1" in key]
        url = f"s3://{BUCKET}/{key}"
        content = bytearray(files.read_bytes(url))
        content[-3] ^= 1
        files.write_bytes(url, content)
        errors = [member.restored.error for member in await cluster.roll_back()]
        assert errors[0] == ""
        assert url in errors[1]
        assert "has checksum" in errors[1]
        answers = await cluster.roll_back(checkpoint=latest.kept[1].uuid)
        assert [member.restored.error for member in answers] == ["", ""]
        assert parts.state_of(cluster.stores) == expected(cluster.layout, 0)

    run_scenario(scenario, offline=False)


def test_a_missing_object_is_noticed(s3):
    layout = parts.layout_of()
    stores = parts.fresh(layout, 1, Schedule(every_steps=2, every_epochs=None, epochs=9))
    parts.train(layout, stores, 0, 2)
    ref = parts.save(place(s3), layout, parts.snapshots(stores), parts.slot_map(1))
    files.remove_tree(stored.folder(place(s3), ref.uuid))
    with pytest.raises(CheckpointUnusable, match="cannot be read"):
        parts.load(place(s3), ref, 1)


def test_a_store_that_refuses_is_told_once_and_used_again_when_it_takes_files(s3):
    """Also what it refused leaves nothing: no object, no upload, once a newer checkpoint is committed."""

    async def scenario():
        cluster = PserverCluster(place(s3))
        await cluster.open()
        before = await cluster.committed(0)
        s3.before = lambda environ: (
            ("403 Forbidden", refusal("AccessDenied"))
            if environ["REQUEST_METHOD"] == "PUT" and "pserver-1" in environ["PATH_INFO"]
            else None
        )
        await cluster.train(0, 2)
        node = cluster.nodes[1]
        await until(lambda: bool(node.pserver.checkpoint_error), "the error is told")
        error = (await node.pserver.info()).checkpoint_error
        assert "cannot write its part of the checkpoint of step 2" in error
        assert "refuses access to tester (AccessDenied" in error
        assert await cluster.latest() == before
        s3.before = lambda _: None
        await cluster.train(2, 4)
        latest = await cluster.committed(4)
        cluster.check_latest(latest)
        assert (await node.pserver.info()).checkpoint_error == ""
        assert folders(s3) == {ref.uuid for ref in latest.kept}
        assert s3.uploads() == []

    run_scenario(scenario, offline=False)


def test_the_upload_of_a_pserver_that_was_killed_goes_with_the_next_checkpoint(s3):
    async def scenario():
        cluster = PserverCluster(place(s3))
        await cluster.open()
        await cluster.committed(0)
        node = cluster.nodes[1]

        async def die_half_way(work, *arguments):
            if work.__name__ == "write_part":
                key = arguments[0].removeprefix(f"s3://{BUCKET}/")
                object_store.filesystem().call_s3("create_multipart_upload", Bucket=BUCKET, Key=key)
                node.process.kill()
                await asyncio.sleep(3600.0)
            return work(*arguments)

        node.member.checkpointer.offload = die_half_way
        await cluster.train(0, 2)
        await until(lambda: node.process.dead, "it dies while it writes")
        assert len(s3.uploads()) == 1
        cluster.simulated.forget(node.process.name)
        await cluster.start("ps-1-new")
        await cluster.roll_back()
        await cluster.train(0, 2)
        cluster.check_latest(await cluster.committed(2))
        assert s3.uploads() == []

    run_scenario(scenario, offline=False)


def test_memory_and_file_urls_hold_checkpoints_as_well(tmp_path):
    async def scenario(url):
        cluster = PserverCluster(url)
        await cluster.open()
        await cluster.committed(0)
        await cluster.train(0, 4)
        latest = await cluster.committed(4)
        await cluster.roll_back()
        assert parts.state_of(cluster.stores) == expected(cluster.layout, 4)
        assert {name.split("-")[0] for name in files.names(stored.folder(url, latest.uuid))} == {
            "pserver",
            "manifest",
        }

    for url in ("memory://checkpoints-of-a-test/job", (tmp_path / "with space").as_uri()):
        run_scenario(scenario, url)
    files.remove_tree("memory://checkpoints-of-a-test")
