"""The REST client against a real socket: error answers become the errors of shared.errors."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from shared.errors import DeadlineExceeded, NotFound, NotLeader, NotReady, PeerError, Unauthorized
from trireme.view.client import Client


@asynccontextmanager
async def answering(handler):
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def problem(status, **fields):
    async def handler(_):
        return web.json_response(fields, status=status, content_type="application/problem+json")

    return handler


async def test_a_page_follows_the_other():
    async def handler(request):
        start = int(request.query.get("page_token") or 0)
        return web.json_response(
            {"members": [{"number": start}], "next_page_token": str(start + 1) if start < 2 else ""}
        )

    async with answering(handler) as url, Client(url) as client:
        assert [member["number"] async for member in client.members()] == [0, 1, 2]


async def test_a_problem_becomes_the_error_it_names():
    stands_by = problem(503, code="NOT_LEADER", detail="stands by", retryable=True, details={"leader": "http://x"})
    async with answering(stands_by) as url, Client(url) as client:
        with pytest.raises(NotLeader, match="stands by") as caught:
            await client.job()
    assert caught.value.details == {"leader": "http://x"}
    async with answering(problem(404, code="NOT_FOUND", detail="no task 9")) as url, Client(url) as client:
        with pytest.raises(NotFound, match="no task 9"):
            await client.task("9")


async def test_a_master_that_takes_over_is_asked_again_until_it_serves():
    asked = []

    async def handler(_):
        asked.append(1)
        if len(asked) < 3:
            return web.json_response({"code": "NOT_READY", "detail": "is taking over", "retryable": True}, status=503)
        return web.json_response({"phase": "RUNNING"})

    async with answering(handler) as url, Client(url) as client:
        assert await client.job() == {"phase": "RUNNING"}
    assert len(asked) == 3
    never = problem(503, code="NOT_READY", detail="is taking over", retryable=True)
    async with answering(never) as url, Client(url, timeout_s=0.5) as client:
        with pytest.raises(NotReady, match="taking over"):
            await client.job()


async def test_an_answer_that_is_no_problem_document_is_a_peers_error():
    async def handler(_):
        return web.Response(status=502, text="bad gateway")

    async with answering(handler) as url, Client(url) as client:
        with pytest.raises(PeerError, match="502"):
            await client.job()


async def test_the_token_travels_and_its_refusal_is_told():
    async def handler(request):
        good = request.headers.get("Authorization") == "Bearer secret"
        return web.Response(status=200 if good else 401, text=json.dumps({"phase": "RUNNING"}))

    async with answering(handler) as url:
        async with Client(url, token="secret") as client:
            assert await client.job() == {"phase": "RUNNING"}
        async with Client(url) as client:
            with pytest.raises(Unauthorized, match="TRIREME_TOKEN"):
                await client.job()


async def test_nobody_there_is_unreachable():
    async with answering(problem(200)) as url:
        pass
    async with Client(url) as client:
        with pytest.raises(PeerError, match="cannot be reached"):
            await client.job()


async def test_a_silent_master_is_not_waited_for_for_ever():
    import asyncio

    async def handler(_):
        await asyncio.sleep(5)
        return web.Response()

    async with answering(handler) as url, Client(url, timeout_s=0.1) as client:
        with pytest.raises(DeadlineExceeded, match="no answer in time"):
            await client.job()
