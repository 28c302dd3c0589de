"""Operations of a running master: checkpoints on demand, verification, ways back; limits, take-overs,
idempotency; REST."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from master_service.api import render
from master_service.core.decisions import pause_checkpoint
from master_service.core.decisions.operations import ASK_AGAIN_S
from master_service.core.state.job import KEPT_OPERATIONS
from master_service.leadership.master import Master
from tests.equipment.virtual_loop import run_virtually
from tests.equipment.waiting import until
from tests.master_service.api.client import check_problem, client_of
from tests.master_service.cluster import KEYS, MasterCluster, leading, running, spec_of
from tests.master_service.control.restoring import (
    checkpoint,
    commit,
    create,
    ended,
    names,
    request_of,
    rolling_back,
    spec,
)
from trireme_shared.protocol.errors import CheckpointUnusable, Conflict, NotFound
from trireme_shared.protocol.records import Mode, Phase, PserverMember
from trireme_shared.protocol.records.operations import (
    CheckpointRequest,
    Operation,
    OperationKind,
    OperationState,
)

DONE, FAILED = OperationState.DONE, OperationState.FAILED


def test_a_checkpoint_on_demand_is_done_when_one_that_carries_it_is_the_latest() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec())
        async with running(cluster, "t1") as master:
            begun = await create(master)
            assert begun.reason.startswith("waiting for the next step but one")
            assert await request_of(cluster) == CheckpointRequest(operation=begun.operation_id, attempt=1)
            assert (await create(master)).operation_id == begun.operation_id
            await commit(cluster, 40)  # by schedule: it was under way before
            waited = await master.term.operations.wait(begun.operation_id, 5.0)
            assert waited.running
            await commit(cluster, 42, operation=begun.operation_id)
            done = await master.term.operations.wait(begun.operation_id, 5.0)
            assert (done.state, done.checkpoint_id, done.step) == (DONE, "at-42", 42)
            assert await request_of(cluster) is None
            assert (await create(master)).state is DONE
            assert (names(master).count("checkpoint_asked"), names(master).count("operation_done")) == (1, 1)

    run_virtually(main)


def test_a_request_without_effect_is_repeated_and_fails_at_its_limit_saying_what_it_waited_for() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec())
        async with running(cluster, "t1") as master:
            begun = await create(master, limit_s=4 * ASK_AGAIN_S)
            await until(
                lambda: master.job.operations.find(begun.operation_id).attempt == 3, "the third attempt", 200
            )
            request = await request_of(cluster)
            assert request is not None
            assert request.attempt == 3
            await cluster.lose("t1")
            failed = await ended(master, begun)
            assert (failed.state, failed.error_code) == (FAILED, "DEADLINE_EXCEEDED")
            assert (
                failed.reason == "not done within 120 s: it waited for a trainer: without one no step is made"
            )
            assert await request_of(cluster) is None

    run_virtually(main)


def test_an_operation_outlives_its_master() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec())
        async with running(cluster, "t1") as first:
            begun = await create(first)
        async with leading(cluster.master("m2")) as second:
            assert second.term.operations.get(begun.operation_id).running
            await commit(cluster, 8, operation=begun.operation_id)
            assert (await ended(second, begun)).step == 8

    run_virtually(main)


def test_after_the_last_step_the_last_checkpoint_is_the_answer_and_a_job_that_is_over_refuses() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec())
        async with running(cluster, "t1") as master:
            begun = await create(master)
            await commit(cluster, 99, final=True)
            assert (
                await ended(master, begun)
            ).reason == "the checkpoint is there, the last step's: nothing is left to train"
            master.job.state = master.job.state.model_copy(update={"phase": Phase.COMPLETED})
            for ask in (create(master, "k2"), master.term.operations.restore_checkpoint("k3", "me", "at-99")):
                with pytest.raises(Conflict, match=r"job j is COMPLETED.*newest checkpoint is at-99"):
                    await ask

    run_virtually(main)


def test_independent_checkpoints_are_not_taken_on_demand() -> None:
    async def main() -> None:
        async with running(
            MasterCluster(spec_of(mode=Mode.ASYNC, checkpoint_kind="independent")), "t1"
        ) as master:
            with pytest.raises(
                Conflict, match="needs coordinated checkpoints; job j is async with independent ones"
            ):
                await create(master)

    run_virtually(main)


def test_an_asynchronous_job_pauses_for_a_checkpoint_on_demand() -> None:
    async def main() -> None:
        cluster = MasterCluster(
            spec_of(mode=Mode.ASYNC, checkpoint_kind="coordinated", checkpoint_every_seconds=None)
        )
        async with running(cluster, "t1") as master:
            await until(lambda: master.job.state.phase is Phase.CHECKPOINTING, "the first checkpoint")
            begun = await create(master)
            assert begun.reason.startswith("waiting for all trainers to pause")
            await master.term.writer.decide(
                lambda job, _: pause_checkpoint.give_up(
                    job.state, job.trainers, job.members, "the test says so"
                )
            )
            await until(lambda: master.job.state.saved == 2, "the next pause")
            asked = master.job.operations.find(begun.operation_id)
            assert (asked.running, asked.step, master.job.state.reason) == (
                True,
                2,
                "checkpoint 2 is taken: asked by a test",
            )
            assert master.job.state.saving is not None
            assert master.job.state.saving.operation == begun.operation_id, "it is kept beside the schedule's"
            await commit(cluster, 1)
            await asyncio.sleep(3)
            assert master.term.operations.get(begun.operation_id).running
            await commit(cluster, 2)
            assert (await ended(master, begun)).checkpoint_id == "at-2"

    run_virtually(main)


def test_a_parameter_server_that_leaves_gets_one_checkpoint_and_none_if_its_version_is_saved() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec())
        async with running(cluster, "t1") as master:

            async def drain(index: int, version: int) -> None:
                found = await cluster.etcd.get(KEYS.pserver(index))
                assert found is not None
                member = PserverMember.model_validate_json(found.value).model_copy(
                    update={"draining": version}
                )
                await cluster.etcd.put(KEYS.pserver(index), member.to_bytes(), found.lease)

            await drain(0, 17)
            await until(lambda: master.job.operations.running(), "a request")
            [operation] = master.job.operations.running()
            assert operation.cause == "pserver-0 is about to leave"
            await drain(1, 18)
            await commit(cluster, 19, operation=operation.operation_id)
            await ended(master, operation)
            await until(lambda: not master.job.operations.running(), "no other one")
            assert len(master.job.operations.records) == 1

    run_virtually(main)


# ------------------------------------------------------------------ going back


async def restore(master: Master, which: str, key: str = "r") -> Operation:
    return await master.term.operations.restore_checkpoint(key, "restore asked by a test", which)


async def answered_by_all(cluster: MasterCluster, master: Master, which: str) -> None:
    state = await rolling_back(master, which)
    for index in range(2):
        await cluster.restore(index, state)
    await until(lambda: master.job.state.phase is Phase.RUNNING, "the job to run again")


def test_the_job_goes_back_to_a_named_checkpoint_and_a_later_loss_does_not_take_it_to_one_it_left() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec())
        async with running(cluster, "t1") as master:
            await checkpoint(cluster, 40, 30, 20)
            await until(lambda: master.job.members.latest, "the checkpoints to be seen")
            begun = await restore(master, "at-30")
            state = await rolling_back(master, "at-30")
            assert state.reason == "restore asked by a test: the job goes back to step 30"
            with pytest.raises(Conflict, match="about to go back to step 30 already"):
                await restore(master, "at-20", "other")
            await answered_by_all(cluster, master, "at-30")
            assert (await ended(master, begun)).reason == "the job goes on from step 30"
            assert [
                (c.checkpoint_id, c.state) for c in render.checkpoints(master.job, 100, "").checkpoints
            ] == [
                ("at-30", "KEPT"),
                ("at-20", "KEPT"),
                ("at-40", "LEFT"),
            ]
            await cluster.lose("pserver-1")
            await rolling_back(master, "at-30")
            await cluster.add_pserver(1)
            await answered_by_all(cluster, master, "at-30")
            again = await restore(master, "at-40", "changed my mind")
            await answered_by_all(cluster, master, "at-40")
            assert (await ended(master, again)).state is DONE

    run_virtually(main)


def test_a_damaged_checkpoint_is_refused_before_anything_is_stopped() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec())
        async with running(cluster, "t1") as master:
            await checkpoint(cluster, 40, 30)
            await until(lambda: master.job.members.latest, "the checkpoints to be seen")
            before = master.job.state
            cluster.storage.manifests["at-30"] = CheckpointUnusable("part 1 has another checksum")
            failed = await ended(master, await restore(master, "at-30"))
            assert (failed.state, failed.error_code) == (FAILED, "CHECKPOINT_UNUSABLE")
            assert failed.reason == "part 1 has another checksum"
            assert master.job.state == before
            verified = await master.term.operations.verify_checkpoint("v", "me", "at-40")
            assert (await ended(master, verified)).state is DONE
            with pytest.raises(
                NotFound, match=r"no checkpoint nowhere; there are: at-40 \(step 40\), at-30 \(step 30\)"
            ):
                await restore(master, "nowhere", "n")

    run_virtually(main)


def test_a_checkpoint_found_damaged_while_it_is_loaded_ends_the_operation_the_one_before_is_taken() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec())
        async with running(cluster, "t1") as master:
            await checkpoint(cluster, 40, 30, 20)
            await until(lambda: master.job.members.latest, "the checkpoints to be seen")
            begun = await restore(master, "at-30")
            await cluster.restore(0, await rolling_back(master, "at-30"), error="damaged since")
            await answered_by_all(cluster, master, "at-20")
            failed = await ended(master, begun)
            assert (failed.state, failed.error_code) == (FAILED, "CHECKPOINT_UNUSABLE")
            assert failed.reason.startswith("the job went back to another checkpoint: ")

    run_virtually(main)


def test_a_new_master_continues_a_restoration_at_any_point() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec())
        async with running(cluster, "t1") as first:
            await checkpoint(cluster, 40, 30)
            await until(lambda: first.job.members.latest, "the checkpoints to be seen")
            cluster.storage.manifests["at-30"], whole = OSError("away"), cluster.storage.manifests["at-30"]
            begun = await restore(first, "at-30")
        cluster.storage.manifests["at-30"] = whole
        async with leading(cluster.master("m2")) as second:
            await rolling_back(second, "at-30")
        async with leading(cluster.master("m3")) as third:
            await answered_by_all(cluster, third, "at-30")
            assert (await ended(third, begun)).state is DONE

    run_virtually(main)


def test_only_the_last_ones_that_ended_are_kept() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec())
        async with running(cluster, "t1") as master:
            await checkpoint(cluster, 40)
            await until(lambda: master.job.members.latest, "the checkpoint to be seen")
            for number in range(KEPT_OPERATIONS + 5):
                await ended(
                    master, await master.term.operations.verify_checkpoint(f"v{number}", "me", "at-40")
                )
            assert len(master.job.operations.records) == KEPT_OPERATIONS
            assert len((await cluster.etcd.range(KEYS.operations, prefix=True)).kvs) == KEPT_OPERATIONS

    run_virtually(main)


# ------------------------------------------------------------------ REST


async def test_rest_answers_202_with_the_operation_and_where_to_ask_for_it() -> None:
    cluster = MasterCluster(spec())
    async with running(cluster, "t1") as master, client_of(master) as client:
        request: dict[str, Any] = {"cause": "before the upgrade", "limit_s": 30}
        headers = {"Idempotency-Key": "mine"}
        response = await client.post("/v1/checkpoints", json=request, headers=headers)
        assert response.status_code == 202
        operation = response.json()
        assert (operation["kind"], operation["state"], operation["limit_s"]) == (
            "CREATE_CHECKPOINT",
            "RUNNING",
            30,
        )
        assert response.headers["location"] == f"/v1/jobs/j/operations/{operation['operation_id']}"
        await commit(cluster, 12, operation=operation["operation_id"])
        done = (await client.get(f"{response.headers['location']}?wait_s=5")).json()
        assert (done["state"], done["checkpoint_id"], done["step"]) == ("DONE", "at-12", 12)
        assert (await client.post("/v1/checkpoints", json=request, headers=headers)).json() == done
        check_problem(await client.post("/v1/checkpoints", headers=headers), 422, "IDEMPOTENCY_KEY_REUSED")
        shown = (await client.get("/v1/checkpoints/at-12")).json()
        assert (shown["step"], shown["state"], shown["pservers"]) == (12, "LATEST", 0)
        verified = await client.post("/v1/checkpoints/at-12/verify?wait_s=5")
        assert (verified.status_code, verified.json()["state"]) == (202, "DONE")
        check_problem(await client.get("/v1/operations/nothing"), 404, "NOT_FOUND")
        gone = check_problem(await client.post("/v1/checkpoints/nothing/restore"), 404, "NOT_FOUND")
        assert gone["details"] == {"checkpoints": ["at-12"]}
        clashing = await client.post("/v1/checkpoints", json={}, headers=headers)
        clash = check_problem(clashing, 422, "IDEMPOTENCY_KEY_REUSED")
        assert "asked for createCheckpoint with other values before" in clash["detail"]
        other = await client.post("/v1/checkpoints/at-12/verify?wait_s=5", headers=headers)
        assert other.json()["state"] == "DONE", "each operation has keys of its own"
        back = await client.post("/v1/checkpoints/at-12/restore")
        assert (back.status_code, back.json()["kind"]) == (202, OperationKind.RESTORE_CHECKPOINT)
        await rolling_back(master, "at-12")
