"""The task routes are served in front of FastAPI. The same requests in the same order get, byte for byte,
what FastAPI alone answers."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from master_service.api.app import make_api, make_app
from master_service.api.middleware import MAX_BODY_BYTES
from master_service.api.routes.tasks import DirectTaskLeases
from master_service.leadership.master import Master
from tests.master_service.cluster import MasterCluster, running, spec_of

JSON = {"Content-Type": "application/json"}
TASK = "/v1/task-leases"
FAILED = {"error_type": "ValueError", "message": "no", "traceback": "Traceback"}

Call = tuple[str, str, bytes, dict[str, str]]


def post(path: str, body: Any, **headers: str) -> Call:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return "POST", path, content, {**JSON, "Authorization": "Bearer secret", "X-Request-Id": "mine", **named}


def ask(request: str, **values: Any) -> dict[str, Any]:
    return {"trainer": "t1", "request": request, "generation": 1, **values}


def report(attempt: int = 1, **values: Any) -> dict[str, Any]:
    return {"trainer": "t1", "attempt": attempt, **values}


SERVED = [
    post(TASK, ask("r1")),
    post(TASK, ask("r1"), Idempotency_Key="r1"),
    post(TASK, ask("ü")),
    post(TASK, ask("r2", unknown=[1, {"deep": None}], generation="1")),
    post(TASK, ask("r4", generation=2**63 - 1)),
    post(TASK, ask("lane", stream=0)),
    post(TASK, ask("late", trainer="stranger")),
    post(f"{TASK}/0/progress", report(minibatches=1)),
    post(f"{TASK}/0/progress", report(9, minibatches=1)),
    post(
        f"{TASK}/0/complete",
        report(records=10, sums={"seen": 1e300}, next={"request": "n1", "generation": 1}),
    ),
    post(f"{TASK}/0/complete", report(records=10, next={"request": "n1", "generation": 1})),
    post(f"{TASK}/1/complete", report(2)),
    post(f"{TASK}/1/complete", report(epoch=0, timeline=0)),
    post(f"{TASK}/2/fail", report(failure=FAILED)),
    post(f"{TASK}/99/complete", report()),
    post(f"{TASK}/evaluate-1/complete", report()),
    post(f"{TASK}/%20x/fail", report(failure=FAILED)),
    post(TASK, ask("again"), X_Request_Id="x" * 65),
]

LEFT_TO_FASTAPI = [
    post(TASK, ask("r3"), Content_Type="text/plain"),
    post(TASK, ask("r3"), Content_Type="application/json; charset=utf-8"),
    post(TASK, ask("r3"), Idempotency_Key="other"),
    post(TASK, ask("k" * 201), Idempotency_Key="k" * 201),
    post(TASK, b"{"),
    post(TASK, b""),
    post(TASK, b"[]"),
    post(TASK, {"trainer": 1}),
    post(TASK, ask("r4", generation=10**400)),
    post(TASK, b" " * (MAX_BODY_BYTES + 1)),
    post(f"{TASK}/0/complete", report(attempt=None)),
    post(f"{TASK}/0/complete", report(next={"request": "n1"})),
    post(f"{TASK}/0/complete", report(skipped={"pserver-0": 1})),
    post(f"{TASK}/0/complete", report(skipped={"0": -1})),
    post(f"{TASK}/0/complete", report(skipped={str(index): 1 for index in range(129)})),
    post(f"{TASK}/0/fail", report()),
    post(f"{TASK}/0/progress", report(minibatches="many")),
    post(f"{TASK}/", ask("r5")),
    post(f"{TASK}/0/", report()),
    post(f"{TASK}/0/renew", report()),
    post(f"{TASK}/a/b/complete", report()),
    post(f"{TASK}//complete", report()),
    post(f"{TASK}s", ask("r5")),
    ("GET", TASK, b"", {"Authorization": "Bearer secret", "X-Request-Id": "mine"}),
    ("PUT", f"{TASK}/0/complete", b"{}", {"Authorization": "Bearer secret", "X-Request-Id": "mine"}),
]


class Counting:
    """An application that counts what it is given."""

    def __init__(self, app: ASGIApp) -> None:
        self._app, self.requests = app, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.requests += 1
        await self._app(scope, receive, send)


async def answers(app: ASGIApp, calls: list[Call]) -> list[tuple[int, dict[str, str], bytes]]:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    found = []
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for method, path, content, headers in calls:
            response = await client.request(method, path, content=content, headers=headers)
            seen = dict(response.headers)
            if not seen["x-request-id"].startswith("req-"):
                assert seen["x-request-id"] == "mine"
            body = response.content.replace(seen.pop("x-request-id").encode(), b"id")
            found.append((response.status_code, seen, body))
    return found


async def both(calls: list[Call]) -> tuple[int, list[Any], list[Any]]:
    """How many requests FastAPI served behind the direct routes; what was answered with them; and by FastAPI
    alone."""

    async def cluster(make: Any) -> list[Any]:
        async with running(MasterCluster(spec_of()), "t1") as master:
            return await answers(make(master), calls)

    counted: list[Counting] = []

    def direct(master: Master) -> ASGIApp:
        counted.append(Counting(make_api(master)))
        return DirectTaskLeases(counted[0], master)

    mine, theirs = await cluster(direct), await cluster(make_api)
    return counted[0].requests, mine, theirs


async def test_requests_for_every_task_are_answered_like_fastapi_but_without_it() -> None:
    passed_on, mine, theirs = await both(SERVED)
    for call, given, expected in zip(SERVED, mine, theirs, strict=True):
        assert given == expected, call
    assert passed_on == 0
    assert {status for status, _, _ in mine} == {200, 400, 404, 409}


async def test_unusual_requests_go_to_fastapi() -> None:
    passed_on, mine, theirs = await both(LEFT_TO_FASTAPI)
    for call, given, expected in zip(LEFT_TO_FASTAPI, mine, theirs, strict=True):
        assert given == expected, call
    assert passed_on == len(LEFT_TO_FASTAPI)
    assert all(status != 500 for status, _, _ in mine)


LONE_SURROGATES = [
    post(TASK, rb'{"trainer": "\ud800", "request": "r", "generation": 1}'),
    post(TASK, rb'{"trainer": "t1", "request": "\udc00x", "generation": 1}'),
    post(f"{TASK}/0/complete", rb'{"trainer": "t1", "attempt": 1, "sums": {"\uD800": 1}}'),
    post(
        f"{TASK}/0/fail",
        rb'{"trainer": "t1", "attempt": 1, "failure": {"error_type": "E", "message": "\uDFFF"}}',
    ),
    post("/v1/members/t1/failures", rb'{"error_type": "E", "message": "\ud83d\u0020"}'),
]


async def test_text_that_cannot_be_encoded_again_is_refused_and_the_master_goes_on() -> None:
    for make in (make_app, make_api):
        async with running(MasterCluster(spec_of()), "t1") as master:
            app = make(master)
            for call, (status, _, body) in zip(
                LONE_SURROGATES, await answers(app, LONE_SURROGATES), strict=True
            ):
                problem = json.loads(body)
                assert (status, problem["code"]) == (422, "INVALID_ARGUMENT"), call
                assert "surrogate" in problem["detail"], call
            whole = rb'{"trainer": "t1", "request": "\ud83d\ude00", "generation": 1}'
            assert [status for status, _, _ in await answers(app, [post(TASK, whole)])] == [200]
            assert list(master.job.training.repeats.asks) == [("t1", "\U0001f600")]


async def test_a_bug_behind_the_direct_routes_is_a_problem_too(monkeypatch: Any) -> None:
    async with running(MasterCluster(spec_of()), "t1") as master:

        async def broken(_: object) -> float:
            return 1 / 0

        monkeypatch.setattr(master, "acquire_task", broken)
        calls = [post(TASK, ask("r1"))]
        bugs = [(await answers(make(master), calls))[0] for make in (make_app, make_api)]
        assert bugs[0] == bugs[1]
        assert (bugs[0][0], json.loads(bugs[0][2])["code"]) == (500, "INTERNAL")


@pytest.mark.parametrize("path", [TASK, f"{TASK}/0/complete", "/v1/metric-batches"])
async def test_a_request_whose_connection_closes_before_its_end_costs_nothing_more(path: str) -> None:
    """Nobody waits for its answer, so no route sees it, and nothing is decided on half of a body."""
    whole = json.dumps(ask("r1")).encode()
    for body in (whole, whole[:10]):
        _, _, _, headers = post(path, body)
        raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        raw.append((b"content-length", b"500"))
        messages = [{"type": "http.request", "body": body, "more_body": True}, {"type": "http.disconnect"}]
        left, sent = iter(messages), list[Any]()

        async def receive(left: Any = left) -> Any:
            return next(left)

        async def send(message: Any, sent: list[Any] = sent) -> None:
            sent.append(message)

        scope: dict[str, Any] = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http",
            "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
            "headers": [*raw, (b"host", b"localhost")], "root_path": "", "client": ("c", 1),
            "server": ("s", 2),
        }  # fmt: skip
        async with running(MasterCluster(spec_of()), "t1") as master:
            await make_app(master)(scope, receive, send)
            assert sent == []
            assert not master.job.training.pending


DEEP = [
    b"[" * 5000 + b"]" * 5000,
    json.dumps(ask("deep"))[:-1].encode() + b', "unknown": ' + b"[" * 300 + b"]" * 300 + b"}",
    json.dumps(ask("deep"))[:-1].encode()
    + b', "unknown": '
    + b'{"a":' * 50_000
    + b"1"
    + b"}" * 50_000
    + b"}",
]


@pytest.mark.parametrize(
    "path", [TASK, f"{TASK}/0/complete", "/v1/metric-batches", "/v1/members/t1/failures"]
)
async def test_json_that_is_nested_too_deep_is_refused_alike_on_every_path(path: str) -> None:
    calls = [post(path, body) for body in DEEP]
    async with running(MasterCluster(spec_of()), "t1") as master:
        for status, _, body in await answers(make_app(master), calls):
            problem = json.loads(body)
            assert (status, problem["code"]) == (422, "INVALID_ARGUMENT"), problem
            assert "nested too deep" in problem["detail"]
