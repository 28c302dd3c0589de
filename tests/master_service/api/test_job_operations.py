"""Pause, resume, cancel and delete by REST: 202 with an operation that outlives the leader, and the job."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.equipment.virtual_loop import run_virtually
from tests.equipment.waiting import until
from tests.master_service.api.client import check_problem, client_of
from tests.master_service.api.test_cluster_rest import SETTINGS, wanted
from tests.master_service.many_jobs import Jobs
from trireme_shared.protocol.records.cluster import Standing
from trireme_shared.protocol.records.operations import Operation, OperationState

SAVED = {**SETTINGS, "checkpoint_kind": "coordinated"}


def test_a_job_that_runs_is_paused_resumed_and_cancelled() -> None:
    """The answer told where the job was, and nothing told when it was done."""

    async def main() -> None:
        jobs = Jobs(tasks=200, task_s=1.0)
        async with jobs.leading() as leader, client_of(leader) as client, jobs.pool(2, 1):

            async def ask(verb: str, wait_s: float = 0.0) -> dict[str, Any]:
                answer = await client.post(f"/v1/jobs/a/{verb}", params={"wait_s": wait_s})
                assert answer.status_code == 202, answer.text
                found: dict[str, Any] = answer.json()
                assert answer.headers["location"] == f"/v1/jobs/a/operations/{found['operation_id']}"
                assert ("retry-after" in answer.headers) is (found["state"] == "RUNNING")
                assert (await client.get(answer.headers["location"])).json()["kind"] == verb.upper()
                return found

            async def read(operation: dict[str, Any], wait_s: float = 0.0) -> dict[str, Any]:
                path = f"/v1/jobs/a/operations/{operation['operation_id']}"
                found: dict[str, Any] = (await client.get(path, params={"wait_s": wait_s})).json()
                return found

            await client.post("/v1/jobs", json=wanted("a"))
            await until(lambda: len(jobs.taken) > 1, "the first tasks")
            paused = await ask("pause")
            assert (paused["state"], paused["kind"]) == ("RUNNING", "PAUSE")
            assert "checkpoint" in paused["reason"]
            assert (await ask("pause"))["operation_id"] == paused["operation_id"], "it is under way"
            done = await read(paused, 30.0)
            assert (done["state"], leader.state.job("a").standing) == ("DONE", Standing.PAUSED)
            assert done["end_time"] >= done["create_time"]
            assert (await client.get("/v1/jobs/a")).json()["state"] == "PAUSED"
            assert (await ask("resume"))["state"] == "DONE"
            await until(lambda: leader.state.job("a").standing is Standing.ACTIVE, "the job to start")
            paused = await ask("pause")
            resumed = await ask("resume")
            assert (resumed["state"], (await read(paused))["error_code"]) == ("DONE", "CONFLICT")
            assert (await ask("cancel", 30.0))["state"] == "DONE"
            assert leader.state.job("a").standing is Standing.CANCELLED
            listed = (await client.get("/v1/jobs/a/operations")).json()["operations"]
            assert sorted(each["kind"] for each in listed) == ["CANCEL", *["PAUSE"] * 2, *["RESUME"] * 2]
            times = [each["create_time"] for each in listed]
            assert times == sorted(times, reverse=True), "the newest first"
            failed = (await client.get("/v1/operations?state=FAILED")).json()["operations"]
            assert [each["operation_id"] for each in failed] == [paused["operation_id"]]
            check_problem(await client.post("/v1/jobs/a/pause"), 409, "CONFLICT")
            check_problem(await client.get("/v1/jobs/a/operations/none"), 409, "CONFLICT")

    run_virtually(main)


def test_an_operation_ends_with_its_job_whatever_comes_first() -> None:
    async def main() -> None:
        jobs = Jobs(tasks=2, task_s=1.0)
        async with jobs.leading() as leader, client_of(leader) as client, jobs.pool(2, 1):
            await client.post("/v1/jobs", json=wanted("a"))
            await until(lambda: len(jobs.taken) == 2, "the tasks")
            asked = (await client.post("/v1/jobs/a/cancel")).json()
            ended = await client.get(f"/v1/jobs/a/operations/{asked['operation_id']}?wait_s=30")
            standing = str(leader.state.job("a").standing)
            expected = {"CANCELLED": ("DONE", ""), "COMPLETED": ("FAILED", "CONFLICT")}[standing]
            assert (ended.json()["state"], ended.json()["error_code"]) == expected
            assert standing in ended.json()["reason"]

    run_virtually(main)


def test_an_operation_outlives_its_leader() -> None:
    async def main() -> None:
        jobs, may_go_on = Jobs(tasks=200, task_s=1.0), asyncio.Event()

        async def remove(_: Any) -> None:
            await may_go_on.wait()

        async with jobs.leading("m1", remove_files=remove) as leader, client_of(leader) as client:
            await client.post("/v1/jobs", json=wanted("a"))
            cancelled = (await client.post("/v1/jobs/a/cancel")).json()
            begun = (await client.delete("/v1/jobs/a")).json()
            assert (cancelled["state"], begun["state"]) == ("DONE", "RUNNING")
        may_go_on.set()
        async with jobs.leading("m2", remove_files=remove) as leader, client_of(leader) as client:
            path = f"/v1/jobs/a/operations/{begun['operation_id']}"
            done = (await client.get(path, params={"wait_s": 30})).json()
            assert (done["state"], done["reason"]) == ("DONE", "job a is deleted")
            check_problem(await client.get("/v1/jobs/a"), 404, "NOT_FOUND")
            check_problem(await client.get("/v1/jobs/a/operations"), 404, "NOT_FOUND")
            kept = await client.get(f"/v1/jobs/a/operations/{cancelled['operation_id']}")
            assert kept.json()["state"] == "DONE"

    run_virtually(main)


def test_an_operation_that_another_version_has_carried_out_ends() -> None:
    """It was RUNNING for ever, and whoever waited for it waited in vain."""

    async def main() -> None:
        jobs = Jobs()
        async with jobs.leading("m1") as leader, client_of(leader) as client:
            await client.post("/v1/jobs", json=wanted("a"))
            paused = (await client.post("/v1/jobs/a/pause")).json()
        key = jobs.keys.operation("a", paused["operation_id"])
        found = await jobs.etcd.get(key)
        assert found is not None
        running = Operation.from_bytes(found.value).with_fields(state=OperationState.RUNNING, end_time="")
        await jobs.etcd.put(key, running.to_bytes())
        async with jobs.leading("m2") as leader, client_of(leader) as client:
            path = f"/v1/jobs/a/operations/{paused['operation_id']}"
            done = (await client.get(path, params={"wait_s": 30})).json()
            assert (done["state"], done["reason"]) == ("DONE", paused["reason"])
            assert done["end_time"]

    run_virtually(main)


def test_a_deletion_whose_files_stay_says_so_and_can_be_asked_for_again() -> None:
    async def main() -> None:
        jobs, errors = Jobs(), [OSError("disk gone"), ValueError("a library's")]

        async def remove(_: Any) -> None:
            if errors:
                raise errors.pop(0)

        async with jobs.leading(remove_files=remove) as leader, client_of(leader) as client:
            await client.post("/v1/jobs", json=wanted("a"))
            await client.post("/v1/jobs/a/cancel")
            for cause in ("disk gone", "a library's"):
                failed = (await client.delete("/v1/jobs/a", params={"wait_s": 10})).json()
                assert (failed["state"], failed["error_code"]) == ("FAILED", "INTERNAL")
                assert cause in failed["reason"]
            assert leader.state.job("a").wanted == "delete"
            assert (await client.delete("/v1/jobs/a", params={"wait_s": 10})).json()["state"] == "DONE"
            assert leader.state.jobs == {}

    run_virtually(main)
