"""Checkpoints that save of tables what has changed: chains restore to the same bits, and no file that one
needs is deleted."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.equipment.waiting import until
from tests.pserver_service.checkpoints import parts
from tests.pserver_service.checkpoints.cluster import KEYS, folders, run_scenario
from tests.pserver_service.checkpoints.tables import LAYOUT, TableCluster, expected_rows, rows_in
from trireme_shared.checkpoints import stored
from trireme_shared.protocol.errors import CheckpointUnusable
from trireme_shared.protocol.records.checkpoints import CheckpointRef, Manifest

FIRST = 3  # the first version that is a delta: the steps before it make most rows


async def opened(storage: Path, **spec: object) -> TableCluster:
    cluster = TableCluster(str(storage), **spec)
    await cluster.open()
    await cluster.committed(0)
    return cluster


def manifests(cluster: TableCluster, kept: tuple[CheckpointRef, ...]) -> list[Manifest]:
    return [stored.read_manifest(cluster.storage, parts.JOB, ref) for ref in kept]


def deltas(manifest: Manifest) -> list[int]:
    """In the chain of each part."""
    return [len(part.chain) for part in manifest.parts]


def check(cluster: TableCluster, kept: tuple[CheckpointRef, ...], pservers: int) -> None:
    for ref in kept:
        stored.verify_parts(cluster.storage, ref, stored.read_manifest(cluster.storage, parts.JOB, ref))
        assert rows_in(parts.load(cluster.storage, ref, pservers, digest=LAYOUT.digest)) == expected_rows(
            ref.step
        ), ref


def test_a_base_and_20_deltas_load_at_any_number_of_servers(tmp_path):
    async def scenario():
        cluster = await opened(tmp_path, deltas_per_base=20, keep_checkpoints=1)
        await cluster.checkpointed(0, FIRST + 19)
        latest = await cluster.latest()
        newest, *older = manifests(cluster, latest.kept)
        assert deltas(newest) == [20, 20]
        assert [manifest.step for manifest in older] == list(range(FIRST + 18, FIRST - 2, -1)), (
            "all that it needs"
        )
        assert folders(cluster.storage) == {ref.uuid for ref in latest.kept}
        base = older[-1]
        for part, whole in zip(newest.parts, base.parts, strict=True):
            assert part.bytes < whole.bytes / 2
        check(cluster, latest.kept[::19], 3)
        check(cluster, latest.kept[:1], 1)

    run_scenario(scenario)


def test_only_what_a_kept_chain_needs_stays_and_a_new_base_ends_it(tmp_path):
    async def scenario():
        cluster = await opened(tmp_path, deltas_per_base=2, keep_checkpoints=2)
        kept = {}
        for step in range(1, 9):
            await cluster.checkpointed(step - 1, step)
            latest = await cluster.latest()
            kept[step] = [ref.step for ref in latest.kept]
            assert folders(cluster.storage) == {ref.uuid for ref in latest.kept}
        # whole: 1, 2, 5, 8. Two are kept, those that they need, and the newest one before that needs none of
        # these
        assert {step: kept[step] for step in range(2, 9)} == {
            2: [2, 1],
            3: [3, 2, 1],
            4: [4, 3, 2, 1],
            5: [5, 4, 3, 2],
            6: [6, 5, 4, 3, 2],
            7: [7, 6, 5, 4, 3, 2],
            8: [8, 7, 6, 5],
        }
        check(cluster, latest.kept[::3], 3)

    run_scenario(scenario)


def test_the_first_checkpoint_after_a_rollback_to_another_number_of_servers_is_whole(tmp_path):
    async def scenario():
        cluster = await opened(tmp_path)
        await cluster.checkpointed(0, 6)
        await cluster.etcd.put(KEYS.pservers_desired, b"3")
        await cluster.start("ps-2")
        answers = await cluster.roll_back(pservers=3)
        assert [member.restored.error for member in answers] == ["", "", ""]
        assert rows_in(cluster.stores) == expected_rows(6)
        await cluster.checkpointed(6, 8)
        latest = await cluster.latest()
        found = [deltas(manifest) for manifest in manifests(cluster, latest.kept)]
        assert found == [[1, 1, 1], [0, 0, 0], [4, 4], [3, 3], [2, 2], [1, 1], [0, 0]]
        assert rows_in(cluster.stores) == expected_rows(8)
        check(cluster, latest.kept, 2)

    run_scenario(scenario)


def test_after_a_rollback_to_the_start_nothing_builds_on_what_the_job_left(tmp_path):
    async def scenario():
        cluster = await opened(tmp_path, keep_checkpoints=9)
        await cluster.checkpointed(0, 4)
        [first] = [ref for ref in (await cluster.latest()).kept if not ref.step]
        await cluster.roll_back(checkpoint=first.uuid)
        await cluster.checkpointed(0, 1)
        check(cluster, (await cluster.latest()).kept[:1], 3)

    run_scenario(scenario)


def damage(cluster: TableCluster, ref: CheckpointRef, *, lost: bool) -> None:
    [file] = Path(stored.folder(cluster.storage, ref.uuid)).glob("pserver-1.*")
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    if lost:
        file.unlink()


@pytest.mark.parametrize("lost", [False, True])
def test_what_builds_on_a_damaged_delta_is_refused_and_the_one_before_it_loads(tmp_path, lost):
    async def scenario():
        cluster = await opened(tmp_path)
        await cluster.checkpointed(0, 7)
        refs = {ref.step: ref for ref in (await cluster.latest()).kept}
        damage(cluster, refs[5], lost=lost)
        manifest = stored.read_manifest(cluster.storage, parts.JOB, refs[7])
        with pytest.raises(
            CheckpointUnusable, match=rf"\(step 7\) cannot be used: .*{refs[5].uuid}/pserver-1"
        ):
            stored.verify_parts(cluster.storage, refs[7], manifest)
        damaged: tuple[str, ...] = ()
        for step in (7, 6, 5):
            answers = await cluster.roll_back(checkpoint=refs[step].uuid, damaged=damaged)
            errors = [member.restored.error for member in answers]
            assert any(f"{refs[5].uuid}/pserver-1" in error for error in errors), errors
            damaged += (refs[step].uuid,)
        answers = await cluster.roll_back(checkpoint=refs[4].uuid, damaged=damaged)
        assert [member.restored.error for member in answers] == ["", ""]
        assert rows_in(cluster.stores) == expected_rows(4)
        await cluster.checkpointed(4, 6)
        kept = (await cluster.latest()).kept
        assert {ref.uuid for ref in kept}.isdisjoint(damaged)
        check(cluster, kept, 2)

    run_scenario(scenario)


def test_a_delta_builds_on_the_newest_checkpoint_that_has_all_its_parts(tmp_path):
    async def scenario():
        cluster = await opened(tmp_path)
        await cluster.checkpointed(0, 4)
        failing = cluster.nodes[1].member.checkpointer
        works = failing.offload

        async def full(work, *arguments):
            await asyncio.sleep(0.1)
            raise OSError(28, "No space left on device")

        failing.offload = full
        await cluster.train(4, 5)
        await until(lambda: "step 5 " in cluster.nodes[1].pserver.checkpoint_error, "the failure is seen")
        failing.offload = works
        await cluster.checkpointed(5, 6)
        latest = await cluster.latest()
        [newest, before] = manifests(cluster, latest.kept)[:2]
        assert [part.chain[-1].step for part in newest.parts] == [before.step, before.step] == [4, 4]
        check(cluster, latest.kept, 3)

    run_scenario(scenario)


def test_a_delta_is_not_committed_once_what_it_builds_on_may_be_deleted(tmp_path):
    async def scenario():
        cluster = await opened(tmp_path)
        await cluster.checkpointed(0, 4)
        latest = await cluster.latest()
        await cluster.etcd.put(KEYS.latest, latest.model_copy(update={"kept": ()}).to_bytes())
        await cluster.train(4, 5)
        await until(
            lambda: all(not node.member.checkpointer.busy for node in cluster.nodes.values()),
            "it is given up",
        )
        assert (await cluster.latest()).step == 4
        await cluster.etcd.put(KEYS.latest, latest.to_bytes())
        await cluster.checkpointed(5, 6)
        check(cluster, (await cluster.latest()).kept, 2)

    run_scenario(scenario)


def test_no_deltas_are_made_if_the_job_wants_none(tmp_path):
    async def scenario():
        cluster = await opened(tmp_path, deltas_per_base=0)
        await cluster.checkpointed(0, 5)
        kept = (await cluster.latest()).kept
        assert [deltas(manifest) for manifest in manifests(cluster, kept)] == [[0, 0], [0, 0]]
        tables = [table for store in cluster.stores for table in store.rows.tables]
        assert [table.removed.since(3) for table in tables] == [None] * 4, "nor is it remembered what left"

    run_scenario(scenario)
