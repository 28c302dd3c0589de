"""The REST API of a cluster: jobs and the pool."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.equipment.virtual_loop import run_virtually
from tests.equipment.waiting import until
from tests.master_service.api.client import check_problem, client_of
from tests.master_service.many_jobs import Jobs, job_of
from trireme_shared.protocol.records.cluster import Source, Standing

SETTINGS = {
    "dataset": {"kind": "text_lines", "urls": ["train.txt"]},
    "mode": "async",
    "checkpoint_kind": "independent",
    "global_batch_size": 8,
    "records_per_task": 10,
    "max_discarded_fraction": 1.0,
}


def wanted(name: str, **values: Any) -> dict[str, Any]:
    return {"name": name, "settings": SETTINGS, "script": "train.py", **values}


def test_a_schedule_is_created_shown_and_deleted_by_rest() -> None:
    async def main() -> None:
        jobs = Jobs()
        source = {"file_name": "train.py", "text": "print('hello')"}
        async with jobs.leading() as leader, client_of(leader) as client:
            body = {
                **wanted("night", cron="30 2 * * *", time_zone="Europe/Berlin"),
                "script": "",
                "source": source,
            }
            created = await client.post("/v1/schedules", json=body, headers={"Idempotency-Key": "once"})
            assert created.status_code == 201, created.text
            assert created.headers["location"] == "/v1/schedules/night"
            shown = created.json()
            assert (shown["name"], shown["cron"], shown["concurrency"]) == ("night", "30 2 * * *", "forbid")
            assert shown["next_time"][11:16] in ("00:30", "01:30")
            again = await client.post("/v1/schedules", json=body, headers={"Idempotency-Key": "once"})
            assert again.json() == shown
            check_problem(await client.post("/v1/schedules", json={**body, "cron": "* * *"}), 409, "CONFLICT")
            other = {**body, "name": "other"}
            for cron in ("* * *", "0 0 30 2 *", "x" * 201):
                refused = await client.post("/v1/schedules", json={**other, "cron": cron})
                assert refused.status_code in (400, 422), refused.text
            assert (await client.get("/v1/schedules")).json()["schedules"] == [shown]
            assert (await client.get("/v1/schedules/night")).json() == shown
            assert await jobs.etcd.get(jobs.keys.source(Source(**source).digest)) is not None
            assert (await client.delete("/v1/schedules/night")).json() == shown
            assert await jobs.etcd.get(jobs.keys.source(Source(**source).digest)) is None
            check_problem(await client.get("/v1/schedules/night"), 404, "NOT_FOUND")

    run_virtually(main)


def test_a_job_is_submitted_shown_and_deleted_by_rest() -> None:
    async def main() -> None:
        jobs = Jobs()
        source = {"file_name": "train.py", "text": "print('hello')"}
        async with jobs.leading(remove_files=removed([])) as leader, client_of(leader) as client:
            body = {
                **wanted("a", scheduling={"priority": 7, "min_trainers": 2}),
                "script": "",
                "source": source,
            }
            created = await client.post("/v1/jobs", json=body, headers={"Idempotency-Key": "once"})
            assert created.status_code == 201, created.text
            assert created.headers["location"] == "/v1/jobs/a"
            shown = created.json()
            assert (shown["job"], shown["state"], shown["scheduling"]["priority"]) == ("a", "QUEUED", 7)
            again = await client.post("/v1/jobs", json=body, headers={"Idempotency-Key": "once"})
            assert again.json()["create_time"] == shown["create_time"]
            whole = (await client.get("/v1/jobs/a")).json()
            assert (whole["state"], whole["standing"]) == ("QUEUED", "QUEUED")
            assert whole["script"] == Source(**source).script
            assert whole["storage"] == "memory://cluster/a"
            assert {
                name: whole["settings"][name] for name in SETTINGS if name != "dataset"
            }.items() <= SETTINGS.items()
            assert shown == again.json(), "also the settings, which are not kept with the key"
            assert shown.keys() == whole.keys()
            assert shown["settings"] == whole["settings"]
            stored = (await client.get("/v1/jobs/a/source")).json()
            assert stored["text"] == source["text"]
            check_problem(await client.get("/v1/jobs/a/tasks"), 409, "CONFLICT")
            async with jobs.pool(3, 1):
                await until(lambda: leader.state.job("a").standing is Standing.ACTIVE, "the job to start")
                members = (await client.get("/v1/pool-members")).json()["members"]
                pool = (await client.get("/v1/pool")).json()
                assert pool["pservers"] == {"members": 1, "idle": 0, "draining": 0, "needed": 1}
                assert (pool["trainers"]["members"], pool["trainers"]["needed"]) == (3, 2)
                assert [member["member_id"] for member in members] == ["p0", "t0", "t1", "t2"]
                await until(lambda: leader.state.job("a").standing is Standing.COMPLETED, "the job to end")
                await until(lambda: not leader.term.jobs, "its term to end")
            listed = (await client.get("/v1/jobs", params={"state": "COMPLETED"})).json()["jobs"]
            assert [(job["job"], job["state"]) for job in listed] == [("a", "COMPLETED")]
            assert listed[0].keys() == whole.keys()
            done = (await client.get("/v1/jobs/a")).json()
            assert done["progress"]["records_done"] == done["progress"]["records_total"] > 0
            assert listed[0]["progress"] == done["progress"], "lists tell how far jobs were that have ended"
            assert listed[0]["metrics"] == done["metrics"]
            assert (listed[0]["history"], done["history"]) == (None, [])
            assert (await client.get("/v1/jobs", params={"state": "QUEUED"})).json()["jobs"] == []
            begun = await client.delete("/v1/jobs/a", params={"wait_s": 10})
            assert (begun.status_code, begun.json()["state"]) == (202, "DONE")
            check_problem(await client.get("/v1/jobs/a"), 404, "NOT_FOUND")

    run_virtually(main)


def test_a_job_counts_processes_that_have_registered_and_not_those_that_run() -> None:
    """It said `waiting for 1 of 1 parameter servers to register ... pservers 1/1`."""

    async def main() -> None:
        jobs = Jobs(load_s=2.0)
        async with jobs.leading() as leader, client_of(leader) as client, jobs.pool(1, 1) as places:
            await leader.create_job(job_of("a"), None)
            await until(lambda: all(place.member.running == "a" for place in places), "both processes to run")
            await asyncio.sleep(1.0)
            [job] = (await client.get("/v1/jobs")).json()["jobs"]
            assert job["reason"] == "waiting for 1 of 1 parameter servers to register"
            registered = {"trainers": 1, "trainers_desired": 1, "pservers": 0, "pservers_desired": 1}
            assert job["members"] == registered
            await asyncio.sleep(1.2)
            [job] = (await client.get("/v1/jobs")).json()["jobs"]
            assert job["members"] == registered | {"pservers": 1}
            assert (await client.get("/v1/jobs/a")).json()["members"] == job["members"]

    run_virtually(main)


def removed(names: list[str]) -> Any:
    async def remove(spec: Any) -> None:
        names.append(spec.job)

    return remove


def test_bad_requests_are_one_problem_each_and_change_nothing() -> None:
    async def main() -> None:
        jobs = Jobs()
        async with jobs.leading() as leader, client_of(leader) as client:
            source = {"file_name": "train.py", "text": "x = 1"}
            for body, where in (
                (wanted("a/b"), "name"),
                (wanted(".."), "name"),
                (wanted("my_model"), "the nearest one is my-model"),
                (wanted("a", source=source), "source"),
                ({**wanted("a"), "script": ""}, "source"),
                ({**wanted("a"), "colour": 1}, "colour"),
                (wanted("a", scheduling={"min_trainers": 3, "max_trainers": 2}), "max_trainers 2"),
                (wanted("a", scheduling={"priority": 101}), "priority"),
                ({**wanted("a"), "settings": {**SETTINGS, "lanes": 3}}, "lanes"),
                ({**wanted("a"), "settings": {**SETTINGS, "trainers": 100_001}}, "trainers"),
                ({**wanted("a"), "settings": {**SETTINGS, "epochs": 2**63}}, "epochs"),
                ({**wanted("a"), "script": "", "source": {**source, "file_name": "../x.py"}}, "file_name"),
            ):
                problem = check_problem(await client.post("/v1/jobs", json=body), 422, "INVALID_ARGUMENT")
                assert where in str(problem), problem
            for name in ("jobs", "pool", "cluster", "sources", "schedules"):
                response = await client.post("/v1/jobs", json=wanted(name))
                assert response.status_code in (400, 422), response.text
            for path in ("pause", "resume", "cancel"):
                check_problem(await client.post(f"/v1/jobs/none/{path}"), 404, "NOT_FOUND")
            check_problem(await client.delete("/v1/jobs/none"), 404, "NOT_FOUND")
            missing = check_problem(await client.get("/v1/jobs/my_model"), 404, "NOT_FOUND")
            assert missing["hint"].endswith("the nearest one is my-model")
            assert leader.state.jobs == {}
            await client.post("/v1/jobs", json=wanted("a"))
            check_problem(await client.post("/v1/jobs", json=wanted("a")), 409, "CONFLICT")
            check_problem(await client.delete("/v1/jobs/a"), 409, "CONFLICT")

    run_virtually(main)


def test_a_standby_names_the_leader() -> None:
    async def main() -> None:
        jobs = Jobs()
        async with jobs.leading("m1"):
            standby = jobs.master("m2")
            async with client_of(standby) as client:
                check_problem(await client.get("/v1/jobs"), 503, "NOT_LEADER")
                check_problem(await client.get("/readyz"), 503, "NOT_LEADER")
                assert "trireme_master_leading 0.0" in (await client.get("/metrics")).text

    run_virtually(main)


def test_the_pool_is_told_with_what_the_jobs_that_may_run_now_need() -> None:
    async def main() -> None:
        jobs = Jobs()
        async with jobs.leading() as leader, client_of(leader) as client:
            for body in (
                wanted("now", scheduling={"min_trainers": 3}),
                wanted("later", scheduling={"not_before_time": "2100-01-01T00:00:00Z"}),
            ):
                assert (await client.post("/v1/jobs", json=body)).status_code == 201
            pool = (await client.get("/v1/pool")).json()
            assert pool["trainers"] == {"members": 0, "idle": 0, "draining": 0, "needed": 3}
            assert pool["pservers"]["needed"] == 1

    run_virtually(main)


def test_a_job_that_nobody_leads_says_why_and_what_to_do() -> None:
    async def main() -> None:
        jobs = Jobs(tasks=200)
        async with jobs.leading() as leader, client_of(leader) as client:

            async def told(name: str) -> dict[str, Any]:
                answer: dict[str, Any] = (await client.get(f"/v1/jobs/{name}/explanation")).json()
                return answer

            await client.post("/v1/jobs", json=wanted("a", scheduling={"min_trainers": 2}))
            await until(lambda: leader.state.job("a").reason != "was just submitted", "the schedule")
            lacks = await told("a")
            assert lacks["code"] == "WAITS_FOR_MEMBERS"
            assert "at least 2 trainers" in lacks["details"][0]
            assert "The pool has 0 trainers" in lacks["details"][2]
            await client.post("/v1/jobs", json=wanted("b", scheduling={"after": ["a"]}))
            after = await told("b")
            assert (after["code"], after["hints"][0]) == ("WAITS_FOR_JOBS", "trireme explain a")
            later = wanted("c", scheduling={"not_before_time": "2999-01-01T00:00:00Z"})
            await client.post("/v1/jobs", json=later)
            assert (await told("c"))["code"] == "WAITS_FOR_TIME"
            await client.post("/v1/jobs/c/pause")
            assert (await told("c"))["code"] == "JOB_PAUSED"
            await client.post("/v1/jobs/c/cancel")
            assert (await told("c"))["code"] == "JOB_CANCELLED"
            async with jobs.pool(2, 1):
                await until(lambda: len(jobs.taken) > 3, "some tasks")
                assert (await told("a"))["code"] in ("PROGRESS_IS_FINE", "FEWER_TRAINERS")
                await client.post("/v1/jobs", json=wanted("d"))
                await until(lambda: leader.state.job("d").reason != "was just submitted", "the schedule")
                assert "a has 1" in (await told("d"))["details"][1]
            check_problem(await client.get("/v1/jobs/none/explanation"), 404, "NOT_FOUND")

    run_virtually(main)


def test_a_member_is_drained_by_rest_also_for_the_next_leader() -> None:
    async def states(client: Any) -> dict[str, str]:
        members = (await client.get("/v1/pool-members")).json()["members"]
        return {member["member_id"]: member["state"] for member in members}

    async def main() -> None:
        jobs = Jobs(tasks=40)
        async with jobs.pool(2, 1) as places:
            async with jobs.leading() as leader, client_of(leader) as client:
                check_problem(await client.post("/v1/pool-members/none/drain"), 404, "NOT_FOUND")
                await client.post("/v1/jobs", json=wanted("a"))
                await until(lambda: len(jobs.taken) > 4, "the job to train")
                drained = await client.post("/v1/pool-members/t0/drain")
                assert drained.status_code == 200, drained.text
                assert drained.json()["state"] == "draining"
                seen = leader.state.members
                await until(lambda: not seen[("trainer", "t0")].running, "the process of t0 to leave")
                assert (await states(client))["t0"] == "drained"
                assert (await client.get("/v1/pool")).json()["trainers"]["draining"] == 1
            async with jobs.leading("m2") as leader, client_of(leader) as client:
                await until(lambda: len(leader.state.members) == 3, "the pool to be read")
                assert (await states(client))["t0"] == "drained"
                await until(
                    lambda: leader.state.job("a").standing is Standing.COMPLETED, "the job to end", 300
                )
                assert [job for job, _ in places[0].history] == ["a"]
                assert (await client.post("/v1/pool-members/t0/undrain")).json() == {}
                assert (await states(client))["t0"] == "idle"
                assert await jobs.etcd.get(jobs.keys.drain("trainer", "t0")) is None

    run_virtually(main)


def test_a_job_whose_trackers_cannot_work_is_refused_without_showing_credentials(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)

    async def main() -> None:
        jobs = Jobs()
        async with jobs.leading() as leader, client_of(leader) as client:

            async def refused(status: int, trackers: object) -> str:
                answer = await client.post(
                    "/v1/jobs", json=wanted("a", settings={**SETTINGS, "trackers": trackers})
                )
                return str(check_problem(answer, status, "INVALID_ARGUMENT"))

            assert "mlflow does not know its server" in await refused(400, ["mlflow"])
            secret = await refused(422, [{"kind": "mlflow", "uri": "https://me:hunter2@host"}])
            assert "uri has credentials" in secret
            assert "hunter2" not in secret
            made = await client.post("/v1/jobs", json=wanted("a", settings={**SETTINGS, "trackers": ["csv"]}))
            assert made.status_code == 201, made.text
            [tracker] = (await client.get("/v1/jobs/a")).json()["settings"]["trackers"]
            assert tracker["kind"] == "csv"

    run_virtually(main)


def test_pre_and_post_tasks_are_given_and_read_by_rest() -> None:
    async def main() -> None:
        jobs = Jobs()
        async with jobs.leading() as leader, client_of(leader) as client:
            for bad in (
                [{"command": "x", "function": "a:b"}],
                ["echo"] * 9,
                [{"command": "x", "when": "always"}],
            ):
                settings = {**SETTINGS, "pre_tasks": bad}
                refused = await client.post("/v1/jobs", json=wanted("a", settings=settings))
                assert "pre_tasks" in str(check_problem(refused, 422, "INVALID_ARGUMENT"))
            settings = {**SETTINGS, "pre_tasks": ["fetch --all"], "post_tasks": ["publish:main"]}
            await client.post("/v1/jobs", json=wanted("a", settings=settings))
            told = (await client.get("/v1/jobs/a/explanation")).json()
            assert told["code"] == "JOB_TASK_UNFINISHED"
            async with jobs.pool(2, 1):

                def over() -> bool:
                    runs = leader.state.task_runs.get("a", {})
                    return [run.state for run in runs.values()] == ["SUCCEEDED", "SUCCEEDED"]

                await until(over, "both tasks to succeed", 300)
            first, last = (await client.get("/v1/jobs/a/job-tasks")).json()["job_tasks"]
            assert (first["name"], first["command"], first["state"]) == ("pre-0", "fetch --all", "SUCCEEDED")
            assert (first["attempt"], first["exit_code"], first["output"]) == (1, 0, "attempt 1")
            assert (last["name"], last["function"], last["state"]) == ("post-0", "publish:main", "SUCCEEDED")
            check_problem(await client.get("/v1/jobs/none/job-tasks"), 404, "NOT_FOUND")

    run_virtually(main)
