"""The REST API: shapes of answers and problems, paging, tokens, through the real application without a
socket."""

from __future__ import annotations

import asyncio
import importlib.metadata
import re
import tomllib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import trireme
from master_service.api.middleware import MAX_BODY_BYTES
from master_service.leadership.master import Master
from tests.master_service.api.client import check_problem, client_of
from tests.master_service.cluster import MasterCluster, Storage, leading, running, spec_of, until
from trireme_shared.protocol.records import Mode
from trireme_shared.protocol.records.job_choices import AcceptedChange

Api = Callable[..., Any]


@asynccontextmanager
async def api_of(
    tasks: int = 10, **spec: Any
) -> AsyncIterator[tuple[MasterCluster, Master, httpx.AsyncClient]]:
    cluster = MasterCluster(spec_of(**spec), Storage(tasks))
    async with running(cluster, "t1") as master, client_of(master) as client:
        yield cluster, master, client


def ask(request: str = "r1", **values: Any) -> dict[str, Any]:
    return {"trainer": "t1", "request": request, "generation": 1, **values}


async def test_a_task_is_acquired_shown_finished_and_counted() -> None:
    async with api_of() as (_, _, client):
        answer = await client.post("/v1/task-leases", json=ask(), headers={"Idempotency-Key": "r1"})
        task = answer.json()["task"]
        assert (await client.post("/v1/task-leases", json=ask())).json() == answer.json()
        shown = (await client.get(f"/v1/tasks/{task['task_id']}")).json()
        assert (shown["state"], shown["trainer"], shown["attempt"]) == ("PENDING", "t1", 1)
        report = {"trainer": "t1", "attempt": 1}
        progress = await client.post(
            f"/v1/task-leases/{task['task_id']}/progress", json={**report, "minibatches": 1}
        )
        assert (progress.status_code, progress.json()) == (200, {})
        job = (await client.get("/v1/job")).json()
        assert job["progress"]["records_done"] == 8
        finished = await client.post(f"/v1/task-leases/{task['task_id']}/complete", json=report)
        assert (finished.status_code, finished.json()) == (200, {"next": None})
        summary = (await client.get("/v1/task-summary")).json()
        assert summary == {
            "epoch": 0, "epochs": 1, "stage": "TRAIN", "total": 10, "todo": 9, "pending": 0, "done": 1,
            "discarded": 0, "records_total": 100, "records_done": 10, "records_left_out": 0,
            "task_records": 10, "steps_per_epoch": 20, "total_steps": 20,
        }  # fmt: skip


async def test_the_job_tells_state_progress_and_members() -> None:
    async with api_of(epochs=2) as (_, master, client):
        steps = [{"step": n, "epoch": 0, "loss_sum": 4.0, "records": 8} for n in range(1, 4)]
        for step in steps:
            told = await client.post("/v1/metric-batches", json={"trainer": "t1", "steps": [step]})
            assert told.json() == {"next": 0, "stored": 0, "kept": True}, "no whole steps"
        job = (await client.get("/v1/job")).json()
        assert (job["state"], job["phase"], job["standing"]) == ("RUNNING", "RUNNING", "")
        assert (job["stage"], job["generation"], job["mode"]) == ("TRAIN", 1, "async")
        assert job["members"] == {"trainers": 1, "trainers_desired": 2, "pservers": 1, "pservers_desired": 1}
        assert job["master"] == {"master_id": master.name, "url": "http://m1", "term": master.term.number}
        progress = job["progress"]
        assert (progress["step"], progress["loss"]) == (4, 0.5), "steps are numbered from 0, so four are done"
        assert (progress["records_total"], progress["epochs"]) == (200, 2)
        assert progress["records_per_s"] > 0
        assert progress["eta_s"] > 0
        page = (await client.get("/v1/metrics?page_size=2")).json()
        assert [point["number"] for point in page["points"]] == [1, 2]
        rest = (await client.get(f"/v1/metrics?page_size=2&page_token={page['next_page_token']}")).json()
        assert rest["points"] == [{"number": 3, "loss": 0.5, "records": 8, "skipped": 0}]
        assert rest["next_page_token"] == ""


async def test_the_changes_that_the_user_has_accepted_are_shown_with_the_job() -> None:
    changes = (
        AcceptedChange(number=1, time="2027-01-15T08:00:00Z", text="clip_grad_norm None -> 0.5"),
        AcceptedChange(number=2, options=2, time="2027-01-16T08:00:00Z", text="optimizer lr 0.1 -> 0.05"),
    )
    async with api_of(history=changes) as (_, _, client):
        job = (await client.get("/v1/job")).json()
    assert job["history"] == [change.model_dump() for change in changes]
    assert "history" not in job["settings"], "it is no setting that createJob takes"


async def test_a_job_without_a_trainer_or_a_parameter_server_waits() -> None:
    async with api_of(mode=Mode.SYNC) as (cluster, master, client):
        assert (await client.get("/v1/job")).json()["phase"] == "RUNNING"
        await cluster.lose("t1")
        await until(lambda: not master.job.trainers.names, "the trainer to be gone")
        job = (await client.get("/v1/job")).json()
        assert (job["phase"], job["reason"]) == ("WAITING", "waiting for a trainer")


async def test_tasks_are_paged_and_chosen_by_state() -> None:
    async with api_of(tasks=25, shuffle=True) as (_, _, client):
        for n in range(3):
            await client.post("/v1/task-leases", json=ask(f"r{n}"))

        async def ids(query: str) -> list[str]:
            found, token = [], ""
            while True:
                page = (await client.get(f"/v1/tasks?page_size=10{query}&page_token={token}")).json()
                assert len(page["tasks"]) <= 10
                found += [task["task_id"] for task in page["tasks"]]
                token = page["next_page_token"]
                if not token:
                    return found

        assert await ids("") == [str(n) for n in range(25)]
        assert len(await ids("&state=PENDING")) == 3
        assert len(await ids("&state=TODO")) == 22
        assert await ids("&state=DONE") == await ids("&state=DISCARDED") == await ids("&state=REQUEUED") == []


async def test_what_was_discarded_is_listed_with_its_records_and_cause() -> None:
    async with api_of(tasks=10, max_discarded_fraction=0.5, max_task_failures=1) as (_, master, client):
        master.job.budget.started = True
        task = (await client.post("/v1/task-leases", json=ask())).json()["task"]
        failure = {
            "error_type": "ValueError",
            "message": "no",
            "traceback": "Traceback ...\nValueError: no\n",
        }
        report = {"trainer": "t1", "attempt": 1, "failure": failure}
        assert (await client.post(f"/v1/task-leases/{task['task_id']}/fail", json=report)).status_code == 200
        for state in ("DISCARDED", "discarded"):
            [lost] = (await client.get(f"/v1/tasks?state={state}")).json()["tasks"]
            assert (lost["task_id"], lost["state"], lost["failures"]) == (task["task_id"], "DISCARDED", 1)
            assert (lost["file"], lost["first"], lost["count"]) == (
                task["file"],
                task["first"],
                task["count"],
            )
            assert lost["cause"] == "ValueError: no"
        assert (await client.get("/v1/tasks?state=lost")).status_code == 422


async def test_members_are_listed_with_their_lanes_and_tasks() -> None:
    async with api_of(mode=Mode.SYNC, lanes=2) as (_, _, client):
        await client.post("/v1/task-leases", json=ask(stream=0))
        page = (await client.get("/v1/members?page_size=1")).json()
        assert page["members"][0]["member_id"] == "pserver-0"
        page = (await client.get(f"/v1/members?page_token={page['next_page_token']}")).json()
        trainer = page["members"][0]
        assert (trainer["member_id"], trainer["lanes"], len(trainer["tasks"])) == ("t1", [0, 2], 1)
        assert (await client.get("/v1/members/t1")).json() == trainer
        check_problem(await client.get("/v1/members/t9"), 404, "NOT_FOUND")
        assert (await client.post("/v1/members/t1/suspect", json={})).json() == {"dead": False}


async def test_events_are_read_with_a_cursor_and_waited_for() -> None:
    async with api_of() as (cluster, _, client):
        page = (await client.get("/v1/events")).json()
        assert page["events"][-1]["name"] == "job_running"
        after = page["next_after"]
        newest = {"next_after": after, "oldest": page["events"][0]["event_id"], "newest": after}
        assert (await client.get(f"/v1/events?after={after}")).json() == {"events": [], **newest}
        waiting = asyncio.ensure_future(client.get(f"/v1/events?after={after}&wait_s=10"))
        await asyncio.sleep(0.05)
        await cluster.add_trainer("t2")
        page = (await waiting).json()
        assert page["events"][0]["name"] == "generation_changed"
        assert page["next_after"] == after + 1
        for outside in (after + 10, 1):
            problem = check_problem(await client.get(f"/v1/events?after={outside}"), 410, "CURSOR_EXPIRED")
            assert problem["details"]["newest"] == after + 1


async def test_a_users_error_is_reported_once_and_shown_with_its_task() -> None:
    async with api_of() as (_, _, client):
        failure = {"error_type": "ValueError", "message": "no", "traceback": "Traceback ..."}
        for n in (1, 2):
            task = (await client.post("/v1/task-leases", json=ask(f"r{n}"))).json()["task"]
            report = {"trainer": "t1", "attempt": task["attempt"], "failure": failure}
            assert (
                await client.post(f"/v1/task-leases/{task['task_id']}/fail", json=report)
            ).status_code == 200
        job = (await client.get("/v1/job")).json()
        assert job["phase"] == "FAILED"
        assert job["failure"]["traceback"] == "Traceback ..."
        assert job["failure"]["task"].startswith("task ")


async def test_problems_have_one_shape() -> None:
    async with api_of() as (_, _, client):
        missing = check_problem(await client.get("/v1/nothing"), 404, "NOT_FOUND")
        assert missing["detail"] == "/v1/nothing does not exist"
        assert check_problem(await client.get("/v1/tasks/10"), 404, "NOT_FOUND")["retryable"] is False
        invalid = check_problem(await client.post("/v1/task-leases", json={}), 422, "INVALID_ARGUMENT")
        assert [part["location"] for part in invalid["errors"]] == [
            "body.trainer",
            "body.request",
            "body.generation",
        ]
        check_problem(await client.post("/v1/task-leases", content=b"{not json"), 422, "INVALID_ARGUMENT")
        check_problem(await client.get("/v1/tasks?page_token=x"), 400, "INVALID_ARGUMENT")
        check_problem(await client.get("/v1/tasks?page_size=0"), 422, "INVALID_ARGUMENT")
        check_problem(await client.get("/v1/tasks?kind=EVALUATE"), 404, "NOT_FOUND")
        check_problem(await client.get("/v1/metrics?metric=x"), 404, "NOT_FOUND")
        await client.post("/v1/task-leases", json=ask())
        stale = {"trainer": "t1", "attempt": 7}
        pending = (await client.get("/v1/tasks?state=PENDING")).json()["tasks"][0]["task_id"]
        problem = check_problem(
            await client.post(f"/v1/task-leases/{pending}/complete", json=stale), 409, "STALE_ATTEMPT"
        )
        assert "attempt 7 of t1 is stale: attempt 1 of epoch 0 is pending at t1" in problem["detail"]
        other = await client.post("/v1/task-leases", json=ask("r2"), headers={"Idempotency-Key": "r3"})
        check_problem(other, 400, "INVALID_ARGUMENT")
        gone = await client.post("/v1/task-leases", json={**ask("r9"), "trainer": "t9"})
        assert check_problem(gone, 409, "STALE_GENERATION")["details"] == {"generation": 1}


async def test_a_wrong_method_names_all_that_are_possible() -> None:
    async with api_of() as (_, _, client):
        response = await client.delete("/v1/job")
        check_problem(response, 405, "METHOD_NOT_ALLOWED")
        assert response.headers["allow"] == "GET, HEAD, OPTIONS"
        assert (await client.put("/v1/task-leases")).headers["allow"] == "OPTIONS, POST"


@pytest.mark.parametrize("path", ["/v1/job", "/v1/task-leases"])
async def test_a_token_that_is_no_ascii_text_is_compared_as_any_other(path: str) -> None:
    async with running(MasterCluster(spec_of()), "t1") as master:
        for token, given, status in [
            ("secret", "gehéim", 401),
            ("gehéim", "gehéim", 200),
            ("gehéim", "secret", 401),
        ]:
            async with client_of(master, token) as client:
                headers = {"Authorization": f"Bearer {given}".encode()}
                body = {"json": ask()} if path == "/v1/task-leases" else {}
                response = await client.request("POST" if body else "GET", path, headers=headers, **body)
                assert response.status_code == status, (token, given)


async def test_a_bug_is_a_problem_without_a_stack_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    async with api_of() as (_, _, client):
        monkeypatch.setattr("master_service.api.render.job", lambda _: 1 / 0)
        problem = check_problem(await client.get("/v1/job"), 500, "INTERNAL")
        assert "division" not in problem["detail"]


async def test_a_callers_request_id_is_kept_and_a_strange_one_replaced() -> None:
    async with api_of() as (_, _, client):
        kept = await client.get("/v1/nothing", headers={"X-Request-Id": "mine-1"})
        assert kept.json()["request_id"] == "mine-1"
        strange = await client.get("/v1/nothing", headers={"X-Request-Id": "x" * 65})
        assert strange.json()["request_id"].startswith("req-")


async def test_bodies_beyond_the_bound_are_refused() -> None:
    async with api_of() as (_, _, client):
        response = await client.post("/v1/task-leases", content=b" " * (MAX_BODY_BYTES + 1))
        check_problem(response, 413, "TOO_LARGE")

        async def unannounced() -> AsyncIterator[bytes]:
            for _ in range(MAX_BODY_BYTES // 65536 + 2):
                yield b" " * 65536

        for path in ("/v1/task-leases", "/v1/metric-batches"):
            problem = check_problem(await client.post(path, content=unannounced()), 413, "TOO_LARGE")
            assert f"at most {MAX_BODY_BYTES} are taken" in problem["detail"]


async def test_the_token_guards_everything_but_health() -> None:
    cluster = MasterCluster(spec_of())
    async with leading(cluster.master()) as master:
        async with client_of(master, "secret") as stranger:
            problem = check_problem(await stranger.get("/v1/job"), 401, "UNAUTHENTICATED")
            assert problem["hint"] == "give a token in TRIREME_TOKEN or TRIREME_TOKEN_FILE"
            check_problem(await stranger.get("/metrics"), 401, "UNAUTHENTICATED")
            assert (await stranger.get("/healthz")).json() == {"status": "ok"}
        async with client_of(master, "secret", "wrong") as liar:
            check_problem(await liar.get("/v1/job"), 401, "UNAUTHENTICATED")
        async with client_of(master, "secret", "secret") as friend:
            assert (await friend.get("/v1/job")).status_code == 200


async def test_a_standby_answers_not_leader_with_the_leaders_url() -> None:
    cluster = MasterCluster(spec_of())
    standby, stopping = cluster.master("m2"), asyncio.Event()
    async with leading(cluster.master("m1")), client_of(standby) as client:
        waiting = asyncio.ensure_future(standby.run(stopping))
        await asyncio.sleep(0.1)
        for path in ("/v1/job", "/v1/task-summary", "/v1/metrics"):
            problem = check_problem(await client.get(path), 503, "NOT_LEADER")
            assert (problem["details"], problem["retryable"]) == (
                {"leader": "http://m1", "retry_after_s": 0},
                True,
            )
        assert (await client.get("/healthz")).status_code == 200
        assert (await client.get("/readyz")).json() == {"status": "standby"}
        assert "trireme_master_leading 0.0" in (await client.get("/metrics")).text
        stopping.set()
        await waiting
        check_problem(await client.get("/readyz"), 503, "NOT_LEADER")  # without a lease it cannot take over


async def test_prometheus_reads_the_job() -> None:
    async with api_of() as (_, _, client):
        await client.post("/v1/task-leases", json=ask())
        text = (await client.get("/metrics")).text
        assert 'trireme_tasks{job="j",kind="TRAIN",state="pending"} 1.0' in text
        assert 'trireme_phase{job="j",phase="RUNNING",stage="TRAIN"} 1.0' in text
        assert 'trireme_generation{job="j"} 1.0' in text


async def test_the_document_names_operations_and_problems() -> None:
    async with api_of() as (_, _, client):
        document = (await client.get("/openapi.json")).json()
        assert document["openapi"].startswith("3.1")
        operations = [operation for path in document["paths"].values() for operation in path.values()]
        names = {operation["operationId"] for operation in operations}
        assert names >= {
            "acquireTask", "reportTaskProgress", "completeTask", "failTask", "listTasks", "getTask",
            "getTaskSummary", "listMembers", "getMember", "reportSuspect", "reportFailure", "getJob",
            "listEvents", "listMetrics", "reportMetrics", "getVersion",
        }  # fmt: skip
        for operation in operations:
            assert operation["responses"]["default"] == {"$ref": "#/components/responses/Problem"}
            assert len(operation["tags"]) == 1
            assert re.fullmatch(r"[a-z]+[A-Z]\w+", operation["operationId"])
        references = set(
            re.findall(r'"#/components/schemas/([^"]+)"', (await client.get("/openapi.json")).text)
        )
        assert references <= set(document["components"]["schemas"])
        assert "HTTPValidationError" not in document["components"]["schemas"]


async def test_the_version_is_told() -> None:
    async with api_of() as (_, _, client):
        version = (await client.get("/v1/version")).json()
        assert (version["name"], version["api"]) == ("trireme-master", "v1")


async def test_the_version_is_told_where_the_package_is_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def not_installed(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", not_installed)
    async with api_of() as (_, _, client):
        assert (await client.get("/v1/version")).json()["version"] == trireme.__version__
        assert (await client.get("/openapi.json")).json()["info"]["version"] == trireme.__version__


def test_the_version_is_that_of_the_package() -> None:
    project = tomllib.loads(
        (Path(trireme.__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    )
    assert project["project"]["version"] == trireme.__version__


async def test_everything_of_a_job_is_below_its_name_and_another_name_is_not_found() -> None:
    async with api_of() as (_, _, client):
        for path in ("", "/task-summary", "/tasks", "/members", "/checkpoints", "/events", "/metrics"):
            alias = (await client.get(f"/v1{path or '/job'}")).json()
            assert (await client.get(f"/v1/jobs/j{path}")).json().keys() == alias.keys()
            problem = check_problem(await client.get(f"/v1/jobs/other{path}"), 404, "NOT_FOUND")
            assert "other" in problem["detail"]
        given = (await client.post("/v1/jobs/j/task-leases", json=ask())).json()
        assert given["answer"] == "task"
        check_problem(await client.post("/v1/jobs/other/task-leases", json=ask()), 404, "NOT_FOUND")
        check_problem(await client.post("/v1/jobs/other/task-leases/0/complete", json={}), 404, "NOT_FOUND")
