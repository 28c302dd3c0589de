"""What all paths have in common: HEAD, OPTIONS, Allow, trailing slashes, unknown parameters, Retry-After; and
the pages for people."""

from __future__ import annotations

import asyncio
import gzip
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from html.parser import HTMLParser
from typing import Any

import httpx
import pytest

from master_service.api.app import make_api
from master_service.api.openapi.document import operations
from master_service.api.openapi.documentation import FILES
from master_service.api.problems import problem_of, problem_response
from master_service.api.render import token_of
from tests.equipment.virtual_loop import run_virtually
from tests.master_service.api.client import check_problem, client_of
from tests.master_service.cluster import MasterCluster, leading, spec_of
from tests.master_service.many_jobs import Jobs
from trireme_shared import __version__
from trireme_shared.protocol.errors import NotLeader


@asynccontextmanager
async def api() -> AsyncIterator[httpx.AsyncClient]:
    async with leading(MasterCluster(spec_of()).master()) as master, client_of(master) as client:
        yield client


def of_one_job(path: str) -> str:
    return re.sub(r"{\w+}", "x", path.replace("{job}", "j"))


async def test_every_path_answers_options_and_names_all_its_methods() -> None:
    async with leading(MasterCluster(spec_of()).master()) as master, client_of(master) as client:
        by_path: dict[str, set[str]] = {}
        for method, path, _ in operations(make_api(master).openapi()):
            by_path.setdefault(path, set()).add(method)
        assert len(by_path) > 25
        for path, methods in by_path.items():
            expected = ", ".join(sorted(methods | {"OPTIONS"} | ({"HEAD"} if "GET" in methods else set())))
            answer = await client.options(of_one_job(path))
            assert (answer.status_code, answer.headers["allow"], answer.content) == (204, expected, b""), path
            assert not [name for name in answer.headers if name.startswith("access-control")]
            wrong = await client.request("PATCH", of_one_job(path))
            check_problem(wrong, 405, "METHOD_NOT_ALLOWED")
            assert wrong.headers["allow"] == expected, path


def test_streams_name_their_methods_and_parameters_too() -> None:
    """They are beside the document: `Allow` was empty."""

    async def main() -> None:
        async with Jobs().leading() as leader, client_of(leader) as client:
            for path in (
                "/v1/jobs/a/events/stream",
                "/v1/jobs/a/logs/trainer-0/stream",
                "/v1/cluster/events/stream",
                "/v1/events/stream",
                "/dashboard/app.js",
                "/openapi.json",
            ):
                refused = await client.post(path)
                check_problem(refused, 405, "METHOD_NOT_ALLOWED")
                assert refused.headers["allow"] == "GET, HEAD, OPTIONS", path
                assert (await client.options(path)).headers["allow"] == "GET, HEAD, OPTIONS", path
            check_problem(await client.get("/v1/jobs/a/events/stream?aftr=1"), 422, "INVALID_ARGUMENT")
            check_problem(await client.get("/v1/jobs/a/events/stream?after=1"), 404, "NOT_FOUND")

    run_virtually(main)


async def test_a_jobs_own_master_has_no_paths_of_a_cluster() -> None:
    async with api() as client:
        for path in ("/v1/cluster/events/stream", "/v1/cluster/events", "/v1/pool"):
            check_problem(await client.options(path), 404, "NOT_FOUND")


async def test_the_document_is_served_small() -> None:
    """It was 293 KB in lines, and not compressed."""
    async with api() as client:
        sent = await client.send(client.build_request("GET", "/openapi.json"), stream=True)
        packed = b"".join([part async for part in sent.aiter_raw()])
        plain = await client.get("/openapi.json", headers={"Accept-Encoding": "gzip;q=0, br"})
        assert (sent.headers["content-encoding"], sent.headers["vary"]) == ("gzip", "Accept-Encoding")
        assert "content-encoding" not in plain.headers
        assert gzip.decompress(packed) == plain.content
        assert b"\n " not in plain.content
        assert len(packed) < 40_000 < len(plain.content) < 230_000
        assert sent.headers["etag"] != plain.headers["etag"], "they are other bytes"
        relative, absolute = plain.json()["servers"]
        assert relative["url"] == "."
        assert absolute["variables"]["port"]["default"] == "8470"


async def test_head_is_get_without_the_body() -> None:
    async with api() as client:
        for path in (
            "/v1/jobs/j",
            "/v1/tasks",
            "/v1/version",
            "/metrics",
            "/healthz",
            "/openapi.json",
            "/docs",
            "/",
        ):
            got, head = await client.get(path), await client.head(path)
            assert (head.status_code, head.content) == (200, b""), path
            assert head.headers["content-type"] == got.headers["content-type"]
            if path not in ("/v1/jobs/j", "/v1/tasks", "/metrics"):  # these may change in between
                assert head.headers["content-length"] == got.headers["content-length"], path
        missing = await client.head("/v1/jobs/other")
        assert (missing.status_code, missing.content) == (404, b"")
        assert (await client.head("/v1/task-leases")).status_code == 405


async def test_a_path_with_a_slash_at_its_end_does_not_exist() -> None:
    async with api() as client:
        for path in ("/v1/jobs/j/", "/v1/tasks/", "/v1/checkpoints/", "/healthz/", "/docs/", "/v1/"):
            check_problem(await client.get(path), 404, "NOT_FOUND")
            check_problem(await client.options(path), 404, "NOT_FOUND")
        check_problem(await client.post("/v1/checkpoints/"), 404, "NOT_FOUND")


async def test_unknown_query_parameters_and_repeated_ones_are_refused() -> None:
    async with api() as client:
        problem = check_problem(await client.get("/v1/tasks?page_sise=5"), 422, "INVALID_ARGUMENT")
        assert problem["errors"][0]["location"] == "query.page_sise"
        assert "page_size" in problem["errors"][0]["message"]
        for path in (
            "/v1/job?x=1",
            "/v1/jobs/j/tasks?page_size=1&page_size=2",
            "/healthz?a",
            "/v1/version?=",
            "/docs?x=1",
        ):
            expected = 200 if path.startswith("/docs") else 422  # the page's own links may have some
            assert (await client.get(path)).status_code == expected, path
        assert (await client.head("/v1/tasks?page_sise=5")).status_code == 422
        ask = {"trainer": "t", "request": "r", "generation": 1}
        check_problem(await client.post("/v1/task-leases?wait=1", json=ask), 422, "INVALID_ARGUMENT")
        assert (await client.get("/v1/tasks?page_size=1&state=TODO")).status_code == 200
        for token in ("x", "-1", "1" * 19, token_of("a"), token_of(-1), token_of(1, 2), "Wy" * 1000):
            refused = await client.get("/v1/tasks", params={"page_token": token})
            assert "next_page_token" in check_problem(refused, 400, "INVALID_ARGUMENT")["detail"], token
        for token in ("\uff11", "W" * 3001):
            refused = await client.get("/v1/tasks", params={"page_token": token})
            check_problem(refused, 422, "INVALID_ARGUMENT")


async def test_what_may_succeed_later_says_when_to_ask_again() -> None:
    standby = MasterCluster(spec_of()).master()
    async with client_of(standby) as client:
        problem = await client.get("/v1/job")
        assert check_problem(problem, 503, "NOT_LEADER")["retryable"]
        assert problem.headers["retry-after"] == "1"
        ask = {"trainer": "t", "request": "r", "generation": 1}
        direct = await client.post("/v1/task-leases", json=ask)  # served in front of FastAPI
        assert (direct.status_code, direct.headers["retry-after"]) == (503, "1")
        assert "retry-after" not in (await client.get("/v1/unknown")).headers


async def test_a_standby_sends_to_the_leader_at_once() -> None:
    cluster = MasterCluster(spec_of())
    standby, stopping = cluster.master("m2"), asyncio.Event()
    async with leading(cluster.master("m1")), client_of(standby) as client:
        waiting = asyncio.ensure_future(standby.run(stopping))
        answers = []
        while not answers or answers[-1].headers["retry-after"] != "0":
            answers.append(await client.get("/v1/job"))
            await asyncio.sleep(0.01)
            assert len(answers) < 1000
        assert check_problem(answers[-1], 503, "NOT_LEADER")["details"]["leader"] == "http://m1"
        stopping.set()
        await waiting


async def test_a_master_whose_lease_is_over_says_how_long_others_wait_for_it() -> None:
    cluster = MasterCluster(spec_of())
    cluster.ttl_s = 40.0
    async with leading(cluster.master()) as master:
        master.term.lease.lost.set()
        with pytest.raises(NotLeader) as refused:
            master.check_leading()
        left_s = refused.value.details["retry_after_s"]
        assert 0 < left_s <= 40
        answer = problem_response(problem_of(refused.value, "r"))
        assert left_s <= int(answer.headers["retry-after"]) < left_s + 1


def test_operations_are_listed_by_state_and_in_pages() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of(mode="sync"))
        async with leading(cluster.master()) as master, client_of(master) as client:
            await cluster.initialise("t1")
            for number in range(3):
                begun = await client.post(
                    "/v1/checkpoints", headers={"Idempotency-Key": f"k{number}"}, json={"limit_s": 5}
                )
                while begun.status_code in {503, 409}:
                    await client.get("/v1/events", params={"wait_s": 1})
                    begun = await client.post(
                        "/v1/checkpoints", headers={"Idempotency-Key": f"k{number}"}, json={"limit_s": 5}
                    )
                assert (begun.status_code, begun.headers["retry-after"]) == (202, "1")
                assert begun.json()["state"] == "RUNNING"
            first = (await client.get("/v1/operations", params={"page_size": 2})).json()
            rest = (
                await client.get("/v1/operations", params={"page_token": first["next_page_token"]})
            ).json()
            found = [each["operation_id"] for page in (first, rest) for each in page["operations"]]
            assert (len(first["operations"]), rest["next_page_token"], len(set(found))) == (2, "", 3)
            ended = await client.get(f"/v1/operations/{found[-1]}", params={"wait_s": 30})
            assert ended.json()["state"] == "FAILED"  # its limit: nobody saves
            failed = (await client.get("/v1/operations", params={"state": "FAILED"})).json()["operations"]
            assert found[-1] in [each["operation_id"] for each in failed]
            check_problem(await client.get("/v1/operations", params={"state": "x"}), 422, "INVALID_ARGUMENT")

    run_virtually(main)


# ------------------------------------------------------------------ pages for people


class Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.inline_scripts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.found += [str(values[name]) for name in ("href", "src") if values.get(name)]
        self.inline_scripts += tag == "script" and "src" not in values
        assert not [name for name in values if name.startswith("on")], "the policy refuses inline handlers"


@pytest.mark.parametrize("page", ["/", "/docs"])
async def test_a_page_needs_nothing_from_elsewhere(page: str) -> None:
    """Also without a token: they tell nothing of a job."""
    async with (
        leading(MasterCluster(spec_of()).master()) as master,
        client_of(master, token="secret") as client,
    ):
        answer = await client.get(page)
        assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "frame-ancestors 'none'" in policy
        links = Links()
        links.feed(answer.text)
        assert not links.inline_scripts
        for link in links.found:
            assert link.startswith("data:") or "//" not in link, link
            if not link.startswith("data:"):  # a browser shows no token when somebody follows one
                found = await client.get(httpx.URL(f"http://master{page}").join(link).raw_path.decode())
                assert found.status_code in (200, 503), link


async def test_the_documentation_page_draws_the_document_of_this_service() -> None:
    async with api() as client:
        start = (await client.get("/docs/start.js")).text
        assert 'url: "openapi.json"' in start
        assert "validatorUrl: null" in start  # else it would ask a server of the internet
        assert (await client.get("/openapi.json")).json()["info"]["version"] == __version__
        bundle = await client.get("/docs/swagger-ui-bundle.js")
        assert len(bundle.content) > 1_000_000
        assert "SwaggerUIBundle" in bundle.text
        for path in FILES:
            answer = await client.get(path)
            again = await client.get(path, headers={"If-None-Match": answer.headers["etag"]})
            assert (answer.status_code, again.status_code, again.content) == (200, 304, b""), path
        for path in (
            "/docs/../../__init__.py",
            "/docs/%2e%2e/document.py",
            "/docs/README.md",
            "/v1/openapi.json",
        ):
            check_problem(await client.get(path), 404, "NOT_FOUND")


def filled_in(parameter: dict[str, Any]) -> Any:
    """What the form of Swagger UI begins with."""
    schema = parameter["schema"]
    return parameter.get("example", schema.get("example", schema.get("default")))


async def test_forms_of_the_documentation_page_begin_with_defaults() -> None:
    """Not with an example: a token of a later page shows an empty list, and with the key of an earlier
    request nothing is done."""
    async with api() as client:
        paths = (await client.get("/openapi.json")).json()["paths"]
    found = {
        (parameter["name"], str(filled_in(parameter)))
        for operations in paths.values()
        for operation in operations.values()
        for parameter in operation.get("parameters", ())
        if not parameter.get("required") and parameter["schema"].get("examples")
    }
    assert {("page_token", ""), ("Idempotency-Key", ""), ("wait_s", "0.0"), ("page_size", "100")} <= found
    assert ("wait_s", "10.0") not in found


def test_the_leader_of_a_cluster_documents_all_its_routes() -> None:
    async def main() -> None:
        jobs = Jobs()
        async with jobs.leading() as leader, client_of(leader) as client:
            document = (await client.get("/openapi.json")).json()
            assert {"/v1/jobs", "/v1/pool", "/v1/schedules"} <= document["paths"].keys()
            assert (await client.options("/v1/jobs/a")).headers["allow"] == "DELETE, GET, HEAD, OPTIONS"
            check_problem(await client.get("/v1/jobs/"), 404, "NOT_FOUND")

    run_virtually(main)
