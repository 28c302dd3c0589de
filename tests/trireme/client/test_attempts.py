"""Calls are repeated where that helps, with the same Idempotency-Key, and only for as long as the caller
said."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import httpx
import pytest

from tests.equipment.virtual_loop import run_virtually
from trireme.client import AsyncClient, Client, CreateJob, JobSettings, TriremeError, Unauthorized
from trireme.data import TextLines
from trireme_shared.protocol.errors import (
    BadFrame,
    Conflict,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    NotLeader,
    NotReady,
    PeerError,
)

VERSION = {"name": "trireme-master", "version": "9", "api": "v1"}
OPERATION = {
    "operation_id": "o",
    "kind": "CREATE_CHECKPOINT",
    "state": "RUNNING",
    "limit_s": 1.0,
    "reason": "a step",
}

Answer = Callable[[httpx.Request], httpx.Response]


def client_of(answer: Answer, urls: str = "http://a", **options: object) -> AsyncClient:
    return AsyncClient(urls, token="", transport=httpx.MockTransport(answer), **options)  # type: ignore[arg-type]


def problem(
    status: int, code: str, headers: dict[str, str] | None = None, **fields: object
) -> httpx.Response:
    document = {"code": code, "detail": code.lower(), "retryable": status >= 500, **fields}
    return httpx.Response(status, json=document, headers=headers)


def test_a_standby_names_the_leader_and_the_leader_is_asked():
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.host)
        if request.url.host == "standby":
            return problem(503, "NOT_LEADER", details={"leader": "http://leader:1/"})
        return httpx.Response(200, json=VERSION)

    async def main() -> None:
        async with client_of(answer, "http://standby") as client:
            assert (await client.get_version()).version == "9"
            await client.get_version()
            assert asked == ["standby", "leader", "leader"]

    run_virtually(main)


def test_a_token_for_https_never_goes_to_http():
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url.scheme == "https"
        return problem(503, "NOT_LEADER", details={"leader": "http://elsewhere"})

    async def main() -> None:
        async with client_of(answer, "https://standby") as client:
            with pytest.raises(NotLeader):
                await client.get_version()

    run_virtually(main)


def test_when_a_host_cannot_be_reached_the_next_address_is_asked_with_the_same_key():
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append((request.url.host, request.headers["Idempotency-Key"]))
        if request.url.host == "a":
            raise httpx.ConnectError("refused", request=request)
        return httpx.Response(202, json=OPERATION)

    async def main() -> None:
        async with client_of(answer, "http://a, http://b/") as client:
            assert (await client.create_checkpoint("digits")).operation_id == "o"
            [(_, first), (_, second)] = asked
            assert ([host for host, _ in asked], first) == (["a", "b"], second)
            assert first
            await client.create_checkpoint("digits")
            assert asked[2][1] != first

    run_virtually(main)


def test_a_lost_answer_is_asked_for_again_with_the_same_key():
    keys = []

    def answer(request: httpx.Request) -> httpx.Response:
        keys.append(request.headers["Idempotency-Key"])
        if len(keys) < 3:
            raise httpx.ReadError("connection reset", request=request)
        return httpx.Response(202, json=OPERATION)

    async def main() -> None:
        async with client_of(answer) as client:
            await client.create_checkpoint("digits")
        assert (len(keys), len(set(keys))) == (3, 1)

    run_virtually(main)


def test_a_pause_that_the_master_asks_for_is_kept():
    times = []

    def answer(_: httpx.Request) -> httpx.Response:
        times.append(asyncio.get_running_loop().time())
        if len(times) == 1:
            return problem(503, "NOT_READY", {"Retry-After": "3"})
        return httpx.Response(200, json=VERSION)

    async def main() -> None:
        async with client_of(answer) as client:
            await client.get_version()
        assert times[1] - times[0] == pytest.approx(3, abs=0.01)

    run_virtually(main)


def test_repetitions_end_with_the_time_limit_and_the_last_error():
    def answer(_: httpx.Request) -> httpx.Response:
        return problem(503, "NOT_READY", request_id="req-1")

    async def main() -> None:
        begun = asyncio.get_running_loop().time()
        async with client_of(answer, timeout_s=4) as client:
            with pytest.raises(NotReady) as caught:
                await client.get_version()
        assert caught.value.details["request_id"] == "req-1"
        assert 3 < asyncio.get_running_loop().time() - begun <= 4

    run_virtually(main)


def test_without_waiting_for_a_leader_only_one_that_takes_over_is_asked_again():
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.host)
        if request.url.host == "away":
            raise httpx.ConnectError("refused")
        if request.url.host == "standby":
            return problem(503, "NOT_LEADER", details={"leader": "http://leader"})
        return problem(503, "NOT_READY") if len(asked) < 5 else httpx.Response(200, json=VERSION)

    async def main() -> None:
        for host, error in (("away", PeerError), ("standby", NotLeader)):
            async with client_of(answer, f"http://{host}", wait_for_leader=False) as client:
                with pytest.raises(error):
                    await client.get_version()
        async with client_of(answer, "http://leader", wait_for_leader=False) as client:
            await client.get_version()
        assert asked == ["away", "standby", "leader", "leader", "leader"]

    run_virtually(main)


def test_what_no_master_takes_is_refused_and_null_is_sent_where_it_is_no_default():
    sent = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(json.loads(request.content))
        return problem(409, "CONFLICT")

    settings = JobSettings(dataset=TextLines("t"), mode="async", checkpoint_every_seconds=None)

    async def main() -> None:
        async with client_of(answer) as client:
            with pytest.raises(InvalidArgument, match="trainers = 1000000: Input should be less than"):
                await client.create_resize("a", trainers=1_000_000)
            with pytest.raises(Conflict):
                await client.create_job(CreateJob(name="a", settings=settings, script="s.py"))
        assert [each["settings"]["checkpoint_every_seconds"] for each in sent] == [None]

    run_virtually(main)


def test_what_can_never_succeed_is_not_repeated_and_says_what_is_wrong():
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(1)
        if request.url.path.endswith("/a"):
            errors = [{"location": "path.job", "message": "too long"}]
            return problem(422, "INVALID_ARGUMENT", request_id="req-7", errors=errors, hint="see errors")
        if request.url.path.endswith("/b"):
            return problem(405, "METHOD_NOT_ALLOWED")
        return httpx.Response(401, text="no")

    async def main() -> None:
        async with client_of(answer) as client:
            with pytest.raises(TriremeError) as caught:
                await client.get_job("a")
            assert caught.value.hint == "see errors"
            assert caught.value.details == {
                "request_id": "req-7",
                "errors": [{"location": "path.job", "message": "too long"}],
            }
            with pytest.raises(TriremeError) as caught:
                await client.get_job("b")
            assert caught.value.details["code"] == "METHOD_NOT_ALLOWED"
            with pytest.raises(Unauthorized, match="refused the token"):
                await client.get_job("c")
        assert len(asked) == 3

    run_virtually(main)


@pytest.mark.parametrize("body", ["<html>", "{}", '{"name": 1}', "[]", ""])
def test_an_answer_of_something_else_is_told_as_such(body: str):
    async def main() -> None:
        async with client_of(lambda _: httpx.Response(200, text=body)) as client:
            with pytest.raises(BadFrame, match="no Version"):
                await client.get_version()

    run_virtually(main)


def test_waiting_for_an_operation_ends_with_it_or_in_time():
    ends = {**OPERATION, "state": "FAILED", "error_code": "NOT_FOUND", "reason": "there is no checkpoint c"}
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(float(request.url.params["wait_s"]))
        return httpx.Response(200, json=ends if len(asked) == 3 else OPERATION)

    async def main() -> None:
        async with client_of(answer) as client:
            with pytest.raises(NotFound, match="there is no checkpoint c"):
                await client.wait_for_operation("a", "o")
            with pytest.raises(DeadlineExceeded, match="waited 0 s for operation o: a step"):
                await client.wait_for_operation("a", "o", timeout_s=0)
        assert asked == [10.0, 10.0, 10.0, 0.0]

    run_virtually(main)


@pytest.mark.parametrize(
    "urls", ["", "localhost:8470", "http://a/v1/jobs/x", "etcd+http://a:1/job", "http://a,"]
)
def test_what_is_no_address_of_a_master_is_refused(urls: str):
    with pytest.raises(InvalidArgument):
        Client(urls)


def test_a_proxy_may_give_the_master_a_path():
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        return httpx.Response(200, json=OPERATION)

    async def main() -> None:
        async with client_of(answer, "http://a/clusters/one/") as client:
            await client.get_operation("j", "o")
        assert asked == ["/clusters/one/v1/jobs/j/operations/o"]

    run_virtually(main)


def test_the_token_comes_from_the_environment_and_is_never_shown(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRIREME_TOKEN", "topsecret")
    given = []

    def answer(request: httpx.Request) -> httpx.Response:
        given.append(request.headers.get("Authorization"))
        return problem(404, "NOT_FOUND")

    transport = httpx.MockTransport(answer)
    for options in ({}, {"token": ""}, {"token": "other"}):
        with Client("http://a", transport=transport, **options) as client:  # type: ignore[arg-type]
            with pytest.raises(NotFound) as caught:
                client.get_version()
            assert "secret" not in f"{client!r}{caught.value}{caught.value.details}"
    assert given == ["Bearer topsecret", None, "Bearer other"]


def test_nobody_there_is_a_peers_error_within_the_time_limit(unused_tcp_port: int):
    client = Client(f"http://127.0.0.1:{unused_tcp_port}", token="", timeout_s=0.3)
    with client, pytest.raises(PeerError, match="cannot be reached"):
        client.get_version()
