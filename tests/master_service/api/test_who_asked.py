"""Who did it: the name of a request's token in events, operations and the log; and refusals in the log."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from master_service.api.app import make_app
from tests.equipment.tokens import access_by_role
from tests.equipment.virtual_loop import run_virtually
from tests.master_service.api.client import check_problem, client_of
from tests.master_service.api.test_auth import client_with
from tests.master_service.api.test_cluster_rest import removed, wanted
from tests.master_service.cluster import MasterCluster, leading, spec_of
from tests.master_service.many_jobs import Jobs
from trireme_shared.platform.security.access import CALLER, REFUSALS_S, Access, Asked, Caller
from trireme_shared.platform.security.tokens import Role
from trireme_shared.protocol.errors import Forbidden, Unauthorized


@pytest.fixture
def access(tmp_path: Path) -> Access:
    return access_by_role(tmp_path / "tokens", ["master"])


def name_of(access: Access, role: Role) -> str:
    found = access.tokens.find(role.value)
    assert found is not None
    return found.name


def of(entries: Any, event: str) -> list[dict[str, Any]]:
    return [dict(entry) for entry in entries if entry["event"] == event]


def test_the_events_of_a_cluster_name_the_token_that_asked(access: Access) -> None:
    async def main() -> None:
        jobs = Jobs()
        admin = name_of(access, Role.ADMIN)
        async with jobs.leading(remove_files=removed([])) as leader:
            async with client_with(make_app(leader, access), "admin") as client:
                assert (await client.post("/v1/jobs", json=wanted("a"))).status_code == 201
                for what in ("pause", "resume", "cancel"):
                    assert (await client.post(f"/v1/jobs/a/{what}?wait_s=10")).status_code == 202
                assert (await client.delete("/v1/jobs/a?wait_s=10")).status_code == 202
                schedule = wanted("s", cron="0 0 * * *")
                assert (await client.post("/v1/schedules", json=schedule)).status_code == 201
                assert (await client.delete("/v1/schedules/s")).status_code == 200
                events = (await client.get("/v1/cluster/events")).json()["events"]
            assert CALLER.get() is None
            async with client_of(leader) as anybody:  # no token is asked for
                assert (await anybody.post("/v1/jobs", json=wanted("b"))).status_code == 201
                others = (await anybody.get("/v1/cluster/events")).json()["events"]
        asked = {each["name"]: each for each in events if "token" in each["fields"]}
        assert list(asked) == [
            "job_created", "job_paused", "job_resumed", "job_cancelled", "job_delete_asked", "job_deleted",
            "schedule_created", "schedule_deleted",
        ]  # fmt: skip
        for each in asked.values():
            assert each["fields"]["token"] == admin
            assert f"; asked by token {admin} at " in each["message"]
        [own] = [each for each in others if each["name"] == "job_created" and each["fields"]["job"] == "b"]
        assert "token" not in own["fields"]
        assert "asked by" not in own["message"]

    run_virtually(main)


async def test_an_operation_names_the_token_that_asked(access: Access) -> None:
    async with leading(MasterCluster(spec_of()).master()) as master:
        caller = Caller(Role.ADMIN, "ci", "10.0.0.7")
        assert str(caller) == "token ci at 10.0.0.7"
        async with client_with(make_app(master, access), "admin") as client:
            problem = check_problem(await client.post("/v1/tasks/none/skip"), 404, "NOT_FOUND")
            assert problem["request_id"]
            asked = await client.post("/v1/resizes", json={"trainers": 3})
            assert asked.status_code == 202, asked.text
            [operation] = (await client.get("/v1/operations")).json()["operations"]
            asking = f"asked by token {name_of(access, Role.ADMIN)} at 127.0.0.1"
            assert operation["cause"] == asking
            events = (await client.get("/v1/events")).json()["events"]
            assert any(each["message"].startswith(asking) for each in events)


async def test_each_answer_that_tells_of_a_failure_is_a_line_with_its_request_id(access: Access) -> None:
    async with leading(MasterCluster(spec_of()).master()) as master:
        app = make_app(master, access)
        async with client_with(app, "admin") as client, client_with(app, "viewer") as viewer:
            with capture_logs() as entries:
                answers = [
                    await client.get("/v1/nothing"),
                    await client.delete("/v1/job"),
                    await client.get("/v1/events", params={"page_sise": 5}),
                    await client.post("/v1/checkpoints", headers={"X-Request-Id": "mine"}),
                    await client.post("/v1/task-leases", json={}),
                    await client.post("/v1/resizes", content=b"x" * ((1 << 20) + 1)),
                    await viewer.get("/v1/tasks/none"),
                    await viewer.head("/v1/tasks/none"),
                ]
            assert [answer.status_code for answer in answers] == [404, 405, 422, 409, 422, 413, 404, 404]
            told = of(entries, "request_failed")
            ids = [answer.headers["x-request-id"] for answer in answers]
            assert [(each["request_id"], each["status"]) for each in told] == [
                (request_id, answer.status_code) for request_id, answer in zip(ids, answers, strict=True)
            ]
            assert ids[3] == "mine"
            assert told[0] | {"log_level": "", "room": ""} == {
                "event": "request_failed",
                "status": 404,
                "code": "NOT_FOUND",
                "cause": "/v1/nothing does not exist",
                "count": 1,
                "method": "GET",
                "path": "/v1/nothing",
                "request_id": ids[0],
                "token": name_of(access, Role.ADMIN),
                "peer": "127.0.0.1",
                "log_level": "",
                "room": "",
            }
            assert told[6]["token"] == name_of(access, Role.VIEWER)


async def test_what_an_admin_changed_is_a_line_and_what_members_report_is_none(access: Access) -> None:
    async with leading(MasterCluster(spec_of()).master()) as master:
        app = make_app(master, access)
        async with client_with(app, "admin") as client, client_with(app, "member") as member:
            with capture_logs() as entries:
                asked = await client.post("/v1/resizes", json={"trainers": 3})
                assert (await client.get("/v1/job")).status_code == 200
                lease = {"trainer": "t", "request": "r", "generation": 0}
                assert (await member.post("/v1/task-leases", json=lease)).status_code == 200
            [told] = of(entries, "request_done")
            assert (told["method"], told["path"], told["status"]) == ("POST", "/v1/resizes", 202)
            assert told["token"] == name_of(access, Role.ADMIN)
            assert told["request_id"] == asked.headers["x-request-id"]
            assert not of(entries, "request_failed")


def test_who_asks_too_early_again_and_again_is_one_line_with_the_number(access: Access) -> None:
    async def main() -> None:
        app = make_app(Jobs().master(), access)  # it neither leads nor stands by
        async with client_with(app, "member") as member:
            with capture_logs() as entries:
                for _ in range(50):
                    check_problem(await member.get("/v1/jobs"), 503, "NOT_LEADER")
                await asyncio.sleep(REFUSALS_S)
                await member.get("/v1/jobs")
        assert [each["count"] for each in of(entries, "request_failed")] == [1, 50]

    run_virtually(main)


def test_refused_tokens_are_in_the_log_of_every_service_but_cannot_fill_it(access: Access) -> None:
    async def main() -> None:
        wrong = Asked("GET", host="master", authorization="Bearer guess", peer="10.0.0.9", request_id="req-1")
        with capture_logs() as entries:
            for _ in range(1000):
                with pytest.raises(Unauthorized):
                    access.admit(wrong, Role.VIEWER)
            with pytest.raises(Forbidden):
                access.admit(Asked("POST", host="master", authorization="Bearer viewer"), Role.ADMIN)
            await asyncio.sleep(REFUSALS_S)
            with pytest.raises(Unauthorized):
                access.admit(wrong, Role.VIEWER)
        told = of(entries, "request_refused")
        assert [(each["code"], each["count"]) for each in told] == [
            ("UNAUTHENTICATED", 1),
            ("PERMISSION_DENIED", 1),
            ("UNAUTHENTICATED", 1000),
        ]
        assert (told[0]["peer"], told[0]["request_id"]) == ("10.0.0.9", "req-1")
        assert f"token {name_of(access, Role.VIEWER)} has the role viewer" in told[1]["cause"]
        assert "guess" not in str(told)

    run_virtually(main)


async def test_the_answer_to_a_refused_request_and_the_log_have_the_same_id(access: Access) -> None:
    async with (
        leading(MasterCluster(spec_of()).master()) as master,
        client_with(make_app(master, access), "wrong") as stranger,
    ):
        with capture_logs() as entries:
            answer = await stranger.get("/v1/job")
        [told] = of(entries, "request_refused")
        assert told["request_id"] == answer.headers["x-request-id"] == answer.json()["request_id"]
