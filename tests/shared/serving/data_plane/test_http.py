"""The data plane by sockets and a plain msgpack library: what is answered, what is refused, who is slow."""

import asyncio
import gzip
import json
import math
import socket

import aiohttp
import msgpack
import pytest
import torch

from tests.equipment.metric_names import wrong_metrics
from tests.pserver_service.jobs import (
    JOB,
    init_header,
    item,
    layout_of,
    payload_of,
    pull_request,
    push_header,
    stream,
)
from tests.shared.serving.data_plane.servers import (
    LAYOUT,
    PLAIN,
    SIZES,
    STALL_S,
    TOKEN,
    TRANSPORTS,
    Flat,
    gradients,
    server,
)
from trainer_agent.data_plane.http import HttpPserver
from trireme_shared.blocks.buffers import bytes_of
from trireme_shared.protocol.errors import CallerError, DeadlineExceeded, Unauthorized
from trireme_shared.protocol.wire import codec
from trireme_shared.serving.data_plane.server import make_app, serving
from trireme_shared.serving.pserver import Pserver

__all__ = ["server"]
everywhere = pytest.mark.parametrize("server", TRANSPORTS, indirect=True)
INIT = init_header(LAYOUT, lanes=4).model_dump(mode="json")


def frames(*parts) -> bytes:
    return b"".join(msgpack.packb(part) for part in parts)


def plain_init(*, count: int = 4, end: bool = True) -> bytes:
    blocks = [[{"block": k}, payload_of(torch.ones(SIZES[k]))] for k in range(count)]
    return frames(INIT, *blocks, *([{"end": True}] if end else []))


async def test_who_has_sockets_and_a_msgpack_library_can_train(server):
    values = await server.initialise()
    blocks = [({"block": k, "lanes": [0, 4], "count": 4}, payload_of(torch.ones(SIZES[k]))) for k in SIZES]
    async with server.any_client() as client:
        [end] = await client.answer("push", push_header(0).model_dump(mode="json"), *blocks)
        pushed = {"applied": 4, "duplicate": 0, "first": [0, 1, 2, 3], "refused": [], "generation": 1}
        assert end == {"id": 1, "end": True, "message": pushed}
        last, first, end = await client.answer(
            "pull", pull_request(1, [3, 0]).model_dump(mode="json"), number=2
        )
        assert last == [{"id": 2, "block": 3}, payload_of(values[3] - 1)]
        assert first == [{"id": 2, "block": 0}, payload_of(values[0] - 1)]
        assert (end["id"], end["end"], end["message"]["code"]) == (2, True, "OK")
        assert end["message"]["record"]["version"] == 1
    status, [info] = await server.raw("/v1/info", method="GET")
    assert (status, info["ready"], info["highest"]) == (200, True, 1)
    async with aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {TOKEN}", "Accept": "application/json"}
    ) as session:
        answer = await session.get(server.url + "/v1/info")
        assert (await answer.json())["digest"] == "abc"
        assert "Server" not in answer.headers


@pytest.mark.parametrize("token", ["", "wrong", "boat2"])
async def test_without_the_token_nothing_is_answered(server, token):
    await server.initialise()
    for method, path in [
        ("GET", "/v1/info"),
        ("GET", "/v1/stream"),
        ("POST", "/v1/table"),
        ("POST", "/v1/handoffs"),
        ("POST", "/v1/init"),
        ("POST", "/v1/ledger"),
    ]:
        status, [error] = await server.raw(
            path, plain_init() if method == "POST" else None, token=token, method=method
        )
        assert (status, error["code"], error["retryable"]) == (401, "UNAUTHENTICATED", False)
    assert (await server.client.info()).highest == 0
    async with HttpPserver(server.member, token) as client:
        with pytest.raises(Unauthorized, match="bearer token"):
            await client.init(init_header(LAYOUT), stream())


async def test_a_token_that_is_no_text_is_a_wrong_token(server):
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
    writer.write(
        b"GET /v1/info HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer "
        b"\xe9\xff\r\nConnection: close\r\n\r\n"
    )
    try:
        async with asyncio.timeout(5):
            answer = await reader.read()
    finally:
        writer.close()
    assert answer.startswith(b"HTTP/1.1 401 "), answer


async def test_initial_values_that_end_early_are_not_taken(server):
    for body in (plain_init(count=2)[:-1000], plain_init(count=2, end=False)):
        status, [error] = await server.raw("/v1/init", body)
        assert (status, error["code"]) == (400, "BAD_FRAME")
        assert "broke off after" in error["message"]
        assert server.pserver.store is None
    assert (await server.raw("/v1/init", plain_init()))[0] == 200


async def test_a_connection_that_is_cut_keeps_whole_blocks_and_nothing_else(server):
    await server.initialise()
    body = frames(
        {"id": 1, "call": "push", "message": push_header(0).model_dump(mode="json")},
        *(
            [{"id": 1, "block": k, "lanes": [0, 4], "count": 4}, payload_of(torch.ones(SIZES[k]))]
            for k in range(2)
        ),
    )
    async with server.any_client() as client:
        client.writer.write(body[:-1000])
        await client.writer.drain()
    async with asyncio.timeout(5):
        while server.pserver.store.blocks[0].version == 0 or server.pserver.store.pool.free_bytes == 0:
            await asyncio.sleep(0.01)
    assert [block.version for block in server.pserver.store.blocks.values()] == [1, 0, 0, 0]


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 400, "BAD_FRAME"),
        (b"GET / HTTP/1.1", 400, "BAD_FRAME"),
        (msgpack.packb({"step": 1}), 400, "BAD_FRAME"),
        (frames(INIT, [{"block": "x"}, b""]), 400, "BAD_FRAME"),
        (frames(INIT, [{"block": 0}, bytes((1 << 18) + 1)]), 413, "TOO_LARGE"),
        (frames(INIT, [{"block": 0}, bytes(1000)], {"end": True}), 400, "BAD_FRAME"),
        (frames({"x": "y" * (5 << 20)}), 413, "TOO_LARGE"),
        (frames(INIT) + b"\x92\x80\xc6\xff\xff\xff\xff", 413, "TOO_LARGE"),
        (frames(INIT, *[[{"block": 3}, payload_of(torch.ones(SIZES[3]))]] * 2), 400, "BAD_FRAME"),
    ],
)
async def test_malformed_bodies_are_refused_and_nothing_of_them_stays(server, body, status, code):
    found, [error] = await server.raw("/v1/init", body)
    assert (found, error["code"]) == (status, code), error
    assert set(error) == {"code", "message", "retryable", "hint", "details"}
    assert server.pserver.store is None


async def test_a_payload_of_the_wrong_size_is_refused_per_block(server):
    await server.initialise()
    async with server.any_client() as client:
        wrong = {"block": 0, "lanes": [0, 4], "count": 4}, bytes(1000)
        [end] = await client.answer("push", push_header(0).model_dump(mode="json"), wrong)
    assert [refusal["code"] for refusal in end["message"]["refused"]] == ["LAYOUT_MISMATCH"]


async def test_requests_without_blocks_are_checked(server):
    await server.initialise()
    for path in ("/v1/ledger", "/v1/table"):
        for body in (b"", b"\x93", msgpack.packb({"a": 1}), bytes(17 << 20)):
            status, [error] = await server.raw(path, body)
            assert error["code"] in {"BAD_FRAME", "TOO_LARGE"}, (path, error)
            assert status in {400, 413}


async def test_pulls_are_checked(server):
    await server.initialise()
    async with server.any_client() as client:
        [end] = await client.answer("pull", codec.plain(pull_request(0, [99])))
        assert (end["id"], end["error"]["code"]) == (1, "WRONG_OWNER")
        [end] = await client.answer("pull", codec.plain(pull_request(0, [1, 0, 1])))
        assert end["error"]["code"] == "INVALID_ARGUMENT"
        assert "block 1 is named twice" in end["error"]["message"]


@pytest.mark.parametrize("wait_s", [math.nan, math.inf, -math.inf])
async def test_a_pull_waits_a_finite_time(server, wait_s):
    """Without a limit nobody would ever free it."""
    await server.initialise()
    async with server.any_client() as client:
        [end] = await client.answer(
            "pull", {**pull_request(1, [0]).model_dump(mode="json"), "wait_s": wait_s}
        )
        assert end["error"]["code"] == "BAD_FRAME"
        assert "wait_s" in end["error"]["message"]
    assert not server.pserver.pulls


async def test_unknown_paths_and_methods_are_errors_of_the_same_kind(server):
    status, [error] = await server.raw("/v1/none")
    assert (status, error["code"]) == (404, "BAD_FRAME")
    status, [error] = await server.raw("/v1/init", method="GET")
    assert (status, error["code"]) == (405, "BAD_FRAME")


# ---------------------------------------------------------------- slow and vanished peers


async def test_stalled_initial_values_are_given_up_and_block_nobody(server):
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
    body = plain_init(count=2)
    writer.write(
        "POST /v1/init HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer "
        f"{TOKEN}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    )
    writer.write(body[:-1000])
    await writer.drain()
    await server.initialise()
    async with asyncio.timeout(10):
        assert b"504" in await reader.readline()
    writer.close()


async def test_a_stalled_push_is_given_up_and_blocks_nobody(server):
    await server.initialise()
    async with server.any_client() as client:
        client.send({"id": 1, "call": "push", "message": push_header(0).model_dump(mode="json")})
        blocks = (
            [{"id": 1, "block": k, "lanes": [0, 4], "count": 4}, payload_of(torch.ones(SIZES[k]))]
            for k in (0, 1)
        )
        client.writer.write(frames(*blocks)[:-1000])
        async with asyncio.timeout(STALL_S):
            while server.pserver.store.blocks[0].version == 0:
                await asyncio.sleep(0.01)
            assert (await server.client.push(push_header(0), gradients())).duplicate == 1
        assert (await client.next(10))["error"]["code"] == "DEADLINE_EXCEEDED"


async def test_between_blocks_a_push_may_pause_for_longer_but_not_for_ever(server):
    await server.initialise()

    async def pausing(seconds):
        yield item(0, torch.ones(SIZES[0]))
        await asyncio.sleep(seconds)
        yield item(1, torch.ones(SIZES[1]))

    assert (await server.client.push(push_header(0), pausing(1.2 * STALL_S))).applied == 2
    with pytest.raises(DeadlineExceeded, match="no block of a push came for 2 s"):
        await server.client.push(push_header(0), pausing(60))


@everywhere
async def test_a_waiting_pull_of_a_vanished_trainer_ends(server):
    await server.initialise()
    pulling = asyncio.ensure_future(server.client.pull(pull_request(1, SIZES, wait_s=30), Flat().sink))
    async with asyncio.timeout(5):
        while not server.pserver.pulls:
            await asyncio.sleep(0.01)
        pulling.cancel()
        while server.pserver.pulls:
            await asyncio.sleep(0.01)


@everywhere
async def test_bytes_on_the_wire_are_of_one_version_while_steps_go_on(server):
    """A slow reader gets the values as they were, although their blocks are stepped on meanwhile."""
    layout = layout_of(1_000_000, block_bytes=1 << 20, optimizer=PLAIN)
    values = await server.initialise(layout)

    async def steps():
        for step in range(8):
            items = (item(block.number, torch.ones(block.elements)) for block in layout.blocks())
            await server.client.push(push_header(step), stream(*items))

    async def pulls():
        for _ in range(4):
            flat = {block.number: torch.zeros(block.elements) for block in layout.blocks()}
            versions = {}

            def sink(block, flat=flat, versions=versions):
                versions[block.block] = block.version
                return bytes_of(flat[block.block])

            await server.client.pull(pull_request(None, flat), sink)
            for number, version in versions.items():
                expected, stepped = values[number], round(float(values[number][0] - flat[number][0]))
                assert version in {stepped, None}
                for _ in range(stepped):
                    expected = expected - 1
                assert torch.equal(flat[number], expected)

    async with asyncio.timeout(40):
        await asyncio.gather(steps(), pulls(), pulls())


# ---------------------------------------------------------------- around it


async def test_health_and_readiness_need_no_token_and_metrics_need_one(server):
    async with aiohttp.ClientSession() as session:

        async def get(path, token=""):
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            async with session.get(server.url + path, headers=headers) as answer:
                return answer.status, (await answer.read()).decode(errors="replace")

        assert (await get("/healthz"))[0] == 200
        status, text = await get("/readyz")
        assert (status, json.loads(text)["reason"]) == (503, "no parameters yet")
        server.pserver.loading = True
        assert await get("/healthz") == (200, '{"status": "ok", "incarnation": "ps-1"}')
        assert await get("/readyz") == (503, '{"status": "waiting", "reason": "loads a checkpoint"}')
        server.pserver.loading = False
        await server.initialise()
        await server.client.push(push_header(0), gradients())
        assert await get("/readyz") == (200, '{"status": "ready", "index": 0}')
        for token in ("", "wrong"):
            assert (await get("/metrics", token))[0] == 401
        status, text = await get("/metrics", TOKEN)
        assert status == 200
        assert "trireme_pserver_applied_blocks_total 4.0" in text
        assert "trireme_pserver_version_lowest 1.0" in text
        assert "trireme_pserver_pushed_bytes_total 800000.0" in text
        assert wrong_metrics(text) == []


async def test_a_port_in_use_is_one_clear_message():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            CallerError, match=rf"cannot listen on 127.0.0.1 port {port}: .*in use.*; choose another"
        ):
            async with serving(make_app(Pserver(JOB, "ps-1")), "127.0.0.1", port):
                pass


async def test_a_packed_body_is_not_unpacked(server):
    """A few KiB could become a GiB."""
    await server.initialise()
    for body in (gzip.compress(bytes(1 << 24)), b"\x1f\x8b" + bytes(100)):
        async with (
            aiohttp.ClientSession(
                headers={"Authorization": f"Bearer {TOKEN}", "Content-Encoding": "gzip"}
            ) as session,
            session.post(f"{server.url}/v1/init", data=body) as answer,
        ):
            assert answer.status == 400
            assert msgpack.unpackb(await answer.read())["code"] == "BAD_FRAME"
