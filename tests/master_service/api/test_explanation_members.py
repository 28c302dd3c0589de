"""As test_explanation.py: progress, silent members, etcd, checkpoints."""

from __future__ import annotations

import asyncio

from master_service.leadership.master import Master
from tests.equipment.virtual_loop import run_virtually
from tests.equipment.waiting import until
from tests.master_service.api.explained import (
    LONG_S,
    also,
    codes,
    explained,
    in_job,
    progressed,
    text,
)
from tests.master_service.cluster import KEYS, MasterCluster, leading, running, spec_of, take
from tests.master_service.control.restoring import checkpoint, rolling_back
from tests.master_service.control.restoring import spec as spec_with_checkpoints
from trireme_shared.protocol.records import (
    Phase,
    TrainerMember,
)
from trireme_shared.protocol.records.job import Paused
from trireme_shared.protocol.records.tasks import TaskProgress


def test_progress_tells_the_speed_and_the_time_left() -> None:
    async def script(cluster: MasterCluster, master: Master) -> None:
        for lane in range(4):
            await take(cluster, master, stream=lane)
        await progressed(master, 4)
        told = await explained(master)
        assert told["code"] == "PROGRESS_IS_FINE"
        assert "6 records/s (0.75 steps/s), 17 s left" in told["summary"]
        assert "4 steps are done." in told["details"]
        assert codes(told)[1:] == ["FEWER_TRAINERS"]

    in_job(script, mode="sync")


def test_a_frozen_member_is_named() -> None:
    async def script(cluster: MasterCluster, master: Master) -> None:
        for lane in range(4):
            await take(cluster, master, stream=lane)
        await progressed(master)
        cluster.renewing[0].cancel()
        await asyncio.sleep(6)
        told = await explained(master)
        assert told["code"] == "MEMBER_SILENT"
        assert told["summary"].startswith("pserver-0 has not been heard for ")

    in_job(script, mode="sync", lease_ttl_s=10.0)


def test_nothing_explains_it() -> None:
    async def script(cluster: MasterCluster, master: Master) -> None:
        await asyncio.sleep(LONG_S)
        told = await explained(master)
        assert codes(told) == ["NO_PROGRESS", "FEWER_TRAINERS"]
        assert "No minibatch was finished for 10 s" in told["summary"]

    in_job(script)


def test_a_minibatch_takes_long() -> None:
    async def script(cluster: MasterCluster, master: Master) -> None:
        task = await take(cluster, master)
        await master.report_progress(task.task_id, TaskProgress(trainer="t1", attempt=1, minibatches=1))
        assert (await explained(master))["code"] == "PROGRESS_IS_FINE"
        await asyncio.sleep(LONG_S)
        told = await explained(master)
        assert told["code"] == "SLOW_MINIBATCH"
        assert "t1 has worked for 10 s" in told["summary"]
        assert "1 minibatch done" in text(told)

    in_job(script)


def test_etcd_is_silent() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of())
        master = cluster.master()
        master.ttl_s = 30.0
        async with leading(master):
            await cluster.initialise("t1")
            await until(lambda: master.job.state.phase is Phase.RUNNING, "the job to run")
            await asyncio.sleep(1)
            cluster.simulated.freeze()
            await asyncio.sleep(15)
            told = await explained(master)
            assert told["code"] == "ETCD_SILENT"
            assert "MEMBER_SILENT" not in codes(told), "nobody can renew a lease"
            assert int(told["summary"].split(" for ")[1].split(" s;")[0]) >= 15
            cluster.simulated.thaw()
            await asyncio.sleep(5)
            assert (await explained(master))["code"] != "ETCD_SILENT"

    run_virtually(main)


def test_etcd_is_out_of_space() -> None:
    async def script(cluster: MasterCluster, master: Master) -> None:
        cluster.simulated.store.out_of_space = True
        told = await explained(master)
        assert told["code"] == "ETCD_OUT_OF_SPACE"
        assert "defrag" in " ".join(told["hints"])

    in_job(script)


# ------------------------------------------------------------------ checkpoints


def test_a_rollback_tells_where_to_since_when_and_who_has_not_loaded() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_with_checkpoints())
        async with running(cluster, "t1") as master:
            await checkpoint(cluster, 40, 30)
            await until(lambda: master.job.members.latest, "the checkpoint to be seen")
            await cluster.lose("pserver-1")
            state = await rolling_back(master, "at-40")
            await asyncio.sleep(12)
            told = await explained(master)
            assert told["code"] == "ROLLING_BACK"
            assert "step 40 (checkpoint at-40)" in told["summary"]
            assert "It began 12 s ago" in text(told)
            assert "Not registered: pserver-1" in text(told)
            assert "Registered and not loaded yet: pserver-0." in text(told)
            await cluster.restore(0, state)
            await cluster.add_pserver(1)
            await until(lambda: 1 in master.job.members.pservers, "pserver-1")
            told = await explained(master)
            assert "Registered and not loaded yet: pserver-1." in text(told)
            await cluster.restore(1, state)
            await until(lambda: master.job.state.phase is Phase.RUNNING, "the job to run again")
            assert "ROLLING_BACK" not in codes(await explained(master))

    run_virtually(main)


def test_a_rollback_waits_for_the_storage() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_with_checkpoints())
        async with running(cluster, "t1") as master:
            await checkpoint(cluster, 40)
            cluster.storage.manifests["at-40"] = ConnectionError("s3 does not answer")
            await until(lambda: master.job.members.latest, "the checkpoint to be seen")
            await cluster.lose("pserver-1")
            await rolling_back(master, "at-40")
            await asyncio.sleep(5)
            told = await explained(master)
            assert codes(told)[:2] == ["STORAGE_UNREACHABLE", "ROLLING_BACK"]
            assert "The master: s3 does not answer" in text(told)
            found = await cluster.etcd.get(KEYS.pserver(0))
            assert found is not None
            waits = cluster.pserver_in(found).model_copy(update={"waits": "part 0 cannot be read: time-out"})
            await cluster.etcd.put(KEYS.pserver(0), waits.to_bytes(), found.lease)
            await asyncio.sleep(1)
            assert "pserver-0: part 0 cannot be read: time-out" in text(await explained(master))

    run_virtually(main)


def test_a_pause_waits_for_a_trainer_then_for_the_copies() -> None:
    async def script(cluster: MasterCluster, master: Master) -> None:
        await until(lambda: master.job.state.phase is Phase.CHECKPOINTING, "a checkpoint to begin")
        told = await explained(master)
        assert told["code"] == "CHECKPOINT_PAUSE"
        assert "it waits for t1, t2 to pause" in told["summary"]
        saving = master.job.state.saving
        assert saving is not None
        for trainer in ("t1", "t2"):
            found = await cluster.etcd.get(KEYS.trainer(trainer))
            assert found is not None
            member = TrainerMember.model_validate_json(found.value).model_copy(
                update={"paused": Paused(uuid=saving.uuid)}
            )
            await cluster.etcd.put(KEYS.trainer(trainer), member.to_bytes(), found.lease)
        await until(lambda: master.job.state.saving and master.job.state.saving.cut, "the cut")
        assert "waits for pserver-0 to copy" in (await explained(master))["summary"]

    in_job(script, "t1", "t2", checkpoint_kind="coordinated", checkpoint_every_seconds=None)


def test_who_cannot_write_checkpoints_and_what_an_operation_waits_for_are_told() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_with_checkpoints())
        async with running(cluster, "t1") as master:
            found = await cluster.etcd.get(KEYS.pserver(1))
            assert found is not None
            troubled = cluster.pserver_in(found).model_copy(update={"trouble": "disk full"})
            await cluster.etcd.put(KEYS.pserver(1), troubled.to_bytes(), found.lease)
            await until(lambda: master.job.members.pservers[1].trouble, "the trouble to be seen")
            await master.term.operations.create_checkpoint("key", "by hand", 600)
            told = await explained(master)
            assert "pserver-1: disk full" in text(also(told, "CHECKPOINTS_FAIL"))
            assert "the next step but one" in text(also(told, "OPERATION_WAITS"))

    run_virtually(main)


def test_an_asynchronous_job_goes_on_without_a_parameter_server() -> None:
    async def main() -> None:
        spec = spec_of(
            pservers=2, checkpoint_kind="coordinated", checkpoint_every_seconds=None, slot_count=128
        )
        cluster = MasterCluster(spec)
        await checkpoint(cluster, 1)
        async with running(cluster, "t1") as master:
            await cluster.lose("pserver-1")
            await until(lambda: master.job.state.absent, "the absence to be noticed")
            told = await explained(master)
            assert "pserver-1 is away; the others go on." in [cause["summary"] for cause in told["also"]]

    run_virtually(main)
