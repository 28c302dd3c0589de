"""Checkpoints through etcd while nothing dies: what is committed, what is kept, what is refused."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from tests.equipment.waiting import until
from tests.pserver_service.checkpoints import parts
from tests.pserver_service.checkpoints.cluster import (
    KEYS,
    PserverCluster,
    Slow,
    expected,
    folders,
    run_scenario,
)
from trireme_shared.checkpoints import stored
from trireme_shared.protocol.records import JobState, Phase
from trireme_shared.protocol.records.checkpoints import CheckpointStarted


def test_the_initial_parameters_are_a_checkpoint(tmp_path):
    async def scenario():
        cluster = PserverCluster(str(tmp_path))
        await cluster.open()
        latest = await cluster.committed(0)
        cluster.check_latest(latest)
        assert [ref.step for ref in latest.kept] == [0]

    run_scenario(scenario)


def test_the_newest_two_are_kept_and_nothing_else_stays(tmp_path):
    async def scenario():
        cluster = PserverCluster(str(tmp_path))
        await cluster.open()
        for step in (0, 2, 4, 6):
            if step:
                await cluster.train(step - 2, step)
            latest = await cluster.committed(step)
        assert [ref.step for ref in latest.kept] == [6, 4]
        cluster.check_latest(latest)
        kept = {ref.uuid for ref in latest.kept}
        assert folders(tmp_path) == kept
        tree = await cluster.tree()
        assert set(tree) == {"latest"} | {
            f"{uuid}/{name}" for uuid in kept for name in ("begun", "finished/0", "finished/1")
        }

    run_scenario(scenario)


def test_the_manifest_says_what_a_master_needs_to_go_on(tmp_path):
    async def scenario():
        cluster = PserverCluster(str(tmp_path))
        await cluster.open()
        await cluster.committed(0)
        await cluster.train(0, 2)
        latest = await cluster.committed(2)
        manifest = stored.read_manifest(str(tmp_path), parts.JOB, latest.kept[0])
        assert (manifest.step, manifest.timeline, manifest.generation, manifest.lanes) == (
            2,
            0,
            1,
            parts.LANES,
        )
        assert manifest.record.positions == parts.positions(2)
        assert manifest.record.lane_zero.scheduler == {"last_epoch": 1}
        assert manifest.layout == cluster.layout
        assert manifest.slots == cluster.slots
        assert manifest.spec_digest == stored.spec_digest(cluster.spec)
        assert {part.pserver for part in manifest.parts} == {0, 1}

    run_scenario(scenario)


def test_training_does_not_wait_for_slow_storage_and_the_best_of_what_waits_is_written(tmp_path):
    async def scenario():
        cluster = PserverCluster(str(tmp_path), checkpoint_every_steps=1)
        await cluster.open()
        await cluster.committed(0)
        await cluster.train(0, 9)  # 9 versions within 9 ms; writing one takes 20
        assert [store.lowest for store in cluster.stores] == [9, 9]
        latest = await cluster.committed(8)  # 1 was being written, and 8 has the highest power of two
        cluster.check_latest(latest)
        assert [ref.step for ref in latest.kept] == [8, 1]
        assert [store.skipped for store in cluster.stores] == [7, 7]

    run_scenario(scenario)


def test_all_load_what_is_latest_when_the_job_rolls_back(tmp_path):
    async def scenario():
        cluster = PserverCluster(str(tmp_path), pservers=3)
        await cluster.open()
        await cluster.train(0, 2)
        await cluster.committed(2)
        await cluster.train(2, 3)
        members = await cluster.roll_back()
        assert [m.restored.error for m in members] == ["", "", ""]
        assert parts.state_of(cluster.stores) == expected(cluster.layout, 2)
        for node in cluster.nodes.values():
            info = await node.pserver.info()
            assert (info.ready, info.timeline, info.lowest, info.highest) == (True, 2, 2, 2)
        await cluster.train(2, 4)
        latest = await cluster.committed(4)
        assert (latest.timeline, [ref.step for ref in latest.kept]) == (2, [4, 2])
        cluster.check_latest(latest)

    run_scenario(scenario)


def test_a_pserver_that_loads_has_no_parameters_and_says_so(tmp_path):
    async def scenario():
        cluster = PserverCluster(str(tmp_path))
        await cluster.open()
        await cluster.train(0, 2)
        await cluster.committed(2)
        node = cluster.nodes[1]
        slow, rollback = Slow(node.crash_point.offload), node.member.rollback
        rollback.context = dataclasses.replace(rollback.context, offload=slow)
        rolling = asyncio.ensure_future(cluster.roll_back())
        await slow.asked.wait()
        await until(lambda: cluster.nodes[0].pserver.timeline == 2, "the other one to have loaded", 60.0)
        assert (node.pserver.loading, (await node.pserver.info()).ready) == (True, False)
        slow.answers.set()
        await rolling
        assert (node.pserver.loading, (await node.pserver.info()).ready) == (False, True)

    run_scenario(scenario)


def test_everything_dies_and_the_job_goes_on_with_another_number_of_pservers(tmp_path):
    async def scenario():
        cluster = PserverCluster(str(tmp_path), pservers=3)
        await cluster.open()
        step = 0
        for pservers in (1, 4):
            await cluster.train(step, step + 2)
            step += 2
            await cluster.committed(step)
            for node in cluster.nodes.values():
                node.process.kill()
                cluster.simulated.forget(node.process.name)
            cluster.nodes.clear()
            cluster.simulated.stop()
            cluster.simulated.start()
            while await cluster.members():
                await asyncio.sleep(1.0)
            await cluster.etcd.put(KEYS.pservers_desired, str(pservers).encode())
            for number in range(pservers):
                await cluster.start(f"ps-{number}-of-{pservers}")
            await cluster.roll_back(pservers)
            assert parts.state_of(cluster.stores) == expected(cluster.layout, step)
        await cluster.train(step, step + 2)
        cluster.check_latest(await cluster.committed(step + 2))

    run_scenario(scenario)


def test_a_push_of_before_the_roll_back_is_stale_and_a_pull_of_before_joins_again(tmp_path):
    async def scenario():
        cluster = PserverCluster(str(tmp_path), pservers=1)
        await cluster.open()
        await cluster.train(0, 2)
        await cluster.committed(2)
        old = cluster.state
        await cluster.roll_back()
        new, cluster.state = cluster.state, old
        with pytest.raises(Exception, match="stale"):
            await cluster.push(cluster.nodes[0], 2, 0)
        cluster.state = new
        assert (await cluster.push(cluster.nodes[0], 2, 0)).applied > 0

    run_scenario(scenario)


def test_a_damaged_checkpoint_is_told_and_the_one_before_it_can_be_taken(tmp_path):
    async def scenario():
        cluster = PserverCluster(str(tmp_path))
        await cluster.open()
        await cluster.train(0, 2)
        await cluster.committed(2)
        await cluster.train(2, 4)
        latest = await cluster.committed(4)
        [damaged] = (tmp_path / "checkpoints" / latest.uuid).glob("pserver-1.*")
        damaged.write_bytes(damaged.read_bytes()[:-1])
        errors = [member.restored.error for member in await cluster.roll_back()]
        assert errors[0] == ""
        assert "were written" in errors[1]
        assert str(damaged) in errors[1]
        assert cluster.nodes[1].pserver.store is None  # serves nothing rather than something else
        answers = await cluster.roll_back(checkpoint=latest.kept[1].uuid, damaged=(latest.uuid,))
        assert [member.restored.error for member in answers] == ["", ""]
        assert parts.state_of(cluster.stores) == expected(cluster.layout, 2)

        await cluster.train(2, 4)  # the damaged one counts no more, also not as one of the two that are kept
        newest = await cluster.committed(4)
        assert newest.uuid != latest.uuid
        assert [ref.step for ref in newest.kept] == [4, 2]
        cluster.check_latest(newest)
        assert folders(tmp_path) == {ref.uuid for ref in newest.kept}

    run_scenario(scenario)


def test_a_checkpoint_that_is_not_kept_cannot_be_loaded(tmp_path):
    async def scenario():
        cluster = PserverCluster(str(tmp_path))
        await cluster.open()
        await cluster.committed(0)
        answers = await cluster.roll_back(checkpoint="nowhere")
        assert all("'nowhere' is not among those kept" in member.restored.error for member in answers)

    run_scenario(scenario)


def test_storage_that_cannot_be_written_is_told_and_the_old_checkpoint_stays(tmp_path, monkeypatch):
    async def scenario():
        cluster = PserverCluster(str(tmp_path))
        await cluster.open()
        before = await cluster.committed(0)

        async def full(work, *arguments):
            if work.__name__ == "write_part":
                raise OSError(28, "No space left on device")
            return work(*arguments)

        node = cluster.nodes[1]
        node.member.checkpointer.offload = full
        await cluster.train(0, 2)
        await until(lambda: bool(node.pserver.checkpoint_error), "the error is told")
        error = (await node.pserver.info()).checkpoint_error
        assert "step 2" in error
        assert "No space left on device" in error
        assert str(tmp_path) in error
        told = [
            CheckpointStarted.model_validate_json(v)
            for k, v in (await cluster.tree()).items()
            if k.endswith("/1") and "finished" not in k
        ]
        assert error in [started.error for started in told]
        await cluster.train(2, 3)
        assert await cluster.latest() == before
        cluster.check_latest(before)

        node.member.checkpointer.offload = node.crash_point.offload  # room was made
        await cluster.train(3, 4)
        cluster.check_latest(await cluster.committed(4))
        assert (await node.pserver.info()).checkpoint_error == ""
        assert len(folders(tmp_path)) == 2

    run_scenario(scenario)


def test_nothing_is_committed_while_the_job_rolls_back(tmp_path):
    async def scenario():
        cluster = PserverCluster(str(tmp_path))
        await cluster.open()
        before = await cluster.committed(0)
        node = cluster.nodes[1]
        node.process.freeze()  # shortly: its part is late
        await cluster.train(0, 2)
        await until(lambda: len(folders(tmp_path)) == 2, "the other's part is written")
        rolling = JobState(phase=Phase.ROLLING_BACK, generation=2, timeline=2, checkpoint=before.uuid)
        await cluster.write_state(rolling)
        node.process.thaw()
        await until(lambda: node.pserver.timeline == 2, "it rolls back")
        assert await cluster.latest() == before

    run_scenario(scenario)


def test_an_etcd_outage_delays_checkpoints_and_not_training(tmp_path):
    async def scenario():
        cluster = PserverCluster(str(tmp_path))
        await cluster.open()
        await cluster.committed(0)
        cluster.simulated.stop()
        await cluster.train(0, 5)
        assert [store.lowest for store in cluster.stores] == [5, 5]
        cluster.simulated.start()
        cluster.check_latest(await cluster.committed(4))

    run_scenario(scenario)


def test_lost_answers_of_etcd_change_nothing(tmp_path):
    async def scenario(method, applied):
        cluster = PserverCluster(str(tmp_path / f"{method.replace('/', '-')}-{applied}"))
        await cluster.open()
        await cluster.committed(0)
        for step in (2, 4):
            for name in ("ps-0", "ps-1", "ps-0", "ps-1"):
                (cluster.simulated.lose_answer if applied else cluster.simulated.lose_request)(
                    client=name, method=method
                )
            await cluster.train(step - 2, step)
            cluster.check_latest(await cluster.committed(step, 120.0))

    for method in ("/kv/txn", "/kv/deleterange"):
        for applied in (True, False):
            run_scenario(scenario, method, applied)
