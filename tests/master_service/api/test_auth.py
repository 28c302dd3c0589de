"""Every route of the master, as its document names them: without a token, with a wrong one, with each
role's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from master_service.api.app import make_api, make_app
from master_service.api.middleware import role_needed
from master_service.api.openapi.documentation import PATHS
from master_service.cluster.leader import JobsLed
from tests.equipment.tokens import access_by_role
from tests.equipment.virtual_loop import run_virtually
from tests.master_service.api.client import check_problem
from tests.master_service.cluster import MasterCluster, leading, spec_of
from tests.master_service.many_jobs import Jobs
from trireme_shared.platform.security.access import Access
from trireme_shared.platform.security.tokens import Role, Tokens

METHODS = {"get", "put", "post", "delete", "patch"}
OPEN = {"checkHealth", "checkReadiness"}
BY_CODE = "createLogin"  # test_logins.py
OF_MEMBERS = {
    "acquireTask", "reportTaskProgress", "completeTask", "failTask", "reportMetrics", "reportSuspect",
    "reportFailure",
}  # fmt: skip


def operations(jobs: JobsLed) -> Iterator[tuple[str, str, str]]:
    """operationId, method and path of all that is documented, with something in the place of each
    parameter."""
    document = make_api(jobs).openapi()
    for template, methods in document["paths"].items():
        for method in METHODS & set(methods):
            yield methods[method]["operationId"], method.upper(), re.sub(r"{\w+}", "j", template)


@pytest.fixture
def access(tmp_path: Path) -> Access:
    return access_by_role(tmp_path / "tokens", ["master"])


def client_with(app: Any, token: str | None, **headers: str) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    given = {"Authorization": f"Bearer {token}"} if token is not None else {}
    return httpx.AsyncClient(transport=transport, base_url="http://master", headers={**given, **headers})


async def check_every_route(jobs: JobsLed, access: Access) -> int:
    """Returns how many operations there are."""
    found = list(operations(jobs))
    for operation, method, path in found:
        if operation == BY_CODE:
            assert role_needed(method, path) is None
            continue
        app = make_app(jobs, access)
        needed = None
        if operation not in OPEN:
            needed = (
                Role.VIEWER
                if method == "GET" or operation == "createLoginCode"
                else Role.MEMBER
                if operation in OF_MEMBERS
                else Role.ADMIN
            )
        assert role_needed(method, path) is needed, operation
        for token in (None, "", "wrong", *Role):
            async with client_with(app, token) as client:
                answer = await client.request(method, path)
            if needed is None or (token in set(Role) and Role(str(token)).may(needed)):
                assert answer.status_code not in (401, 403), (operation, token, answer.text)
            elif token in set(Role):
                check_problem(answer, 403, "PERMISSION_DENIED")
            else:
                check_problem(answer, 401, "UNAUTHENTICATED")
                assert answer.headers["www-authenticate"] == 'Bearer realm="trireme"', operation
    return len(found)


async def test_every_route_of_a_jobs_master_asks_for_its_role(access: Access) -> None:
    async with leading(MasterCluster(spec_of()).master()) as master:
        assert await check_every_route(master, access) >= 25


def test_every_route_of_a_clusters_leader_asks_for_its_role(access: Access) -> None:
    async def main() -> None:
        jobs = Jobs()
        async with jobs.leading() as leader:
            assert await check_every_route(leader, access) >= 40

    run_virtually(main)


def test_routes_outside_the_document_need_a_token_too() -> None:
    """Streams of events, say. Pages of documentation, which tell nothing of a job, need none."""
    outside = {
        (method, str(route.path))
        for included in make_api(Jobs().master()).routes
        for route in included.effective_route_contexts()  # type: ignore[attr-defined]
        for method in route.methods
        if not route.include_in_schema
    }
    assert ("GET", "/v1/jobs/{job}/events/stream") in outside
    needless = {
        path for method, path in outside if role_needed(method, re.sub(r"{[\w:]+}", "j", path)) is None
    }
    assert needless == set(PATHS)


def test_the_short_paths_of_the_only_job_need_what_the_long_ones_do() -> None:
    jobs = Jobs()
    for operation, method, path in operations(jobs.master()):
        if path.startswith("/v1/jobs/j/") and operation not in {"pauseJob", "resumeJob", "cancelJob"}:
            assert role_needed(method, path.replace("/jobs/j", "")) is role_needed(method, path), operation


@pytest.mark.parametrize(
    "path",
    ["/v1/unknown", "/v1/jobs/a/unknown", "/v2/task-leases", "task-leases", "", "/", "//v1/task-leases",
     "/v1/jobs/task-leases", "/v1/jobs//task-leasesx", "/v1/members/a/b/suspect", "/v1/members/suspect",
     "/v1/members/a/drain", "/healthz"],
)  # fmt: skip
def test_a_write_to_any_other_path_needs_an_admin(path: str) -> None:
    for method in ("POST", "PUT", "PATCH", "DELETE", "TRACE", "CONNECT", "ANYTHING"):
        assert role_needed(method, path) is Role.ADMIN


async def test_a_web_page_of_another_site_changes_nothing_where_no_token_is_needed() -> None:
    """As a form without a body, which browsers send without asking first, and with the name of another
    host."""
    async with leading(MasterCluster(spec_of()).master()) as master:
        app = make_app(master, Access.of(Tokens(), ["master"]))
        pages: list[tuple[dict[str, str], int, str]] = [
            ({"Origin": "https://evil.example"}, 403, "ORIGIN_NOT_ALLOWED"),
            ({"Origin": "null"}, 403, "ORIGIN_NOT_ALLOWED"),
            ({"Sec-Fetch-Site": "cross-site"}, 403, "ORIGIN_NOT_ALLOWED"),
            ({"Content-Type": "application/x-www-form-urlencoded"}, 415, "UNSUPPORTED_MEDIA_TYPE"),
            ({"Host": "evil.example"}, 421, "HOST_NOT_ALLOWED"),
        ]
        for headers, status, code in pages:
            async with client_with(app, None, **headers) as page:
                for path in ("/v1/checkpoints", "/v1/members/pserver-0/suspect", "/v1/task-leases"):
                    answer = await page.post(path)
                    check_problem(answer, status, code)
                    assert not any(name.startswith("access-control") for name in answer.headers)
                assert (await page.get("/healthz")).status_code == 200
        assert not master.job.operations.records
        for served, origin in (
            (app, "http://master"),
            (make_api(master), "https://evil.example"),
        ):  # the second: unguarded
            async with client_with(served, None, Origin=origin) as client:
                check_problem(
                    await client.post("/v1/checkpoints"), 409, "CONFLICT"
                )  # the route: nothing is trained yet
