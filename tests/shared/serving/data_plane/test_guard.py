"""Who may use a parameter server: every route and every kind of frame without a token, with a wrong one, with
a viewer's."""

from __future__ import annotations

import asyncio
import re
from urllib.parse import urlsplit

import aiohttp
import pytest
import pytest_asyncio

from pserver_service.handoff_client import HttpHandoff
from tests.equipment.tokens import access_by_role, write_tokens
from tests.equipment.waiting import until
from tests.pserver_service.jobs import JOB, pull_request, push_header, settled
from tests.shared.serving.data_plane.servers import SIZES, Server, gradients
from tests.shared.serving.data_plane.streams import Raw, block, opening
from trainer_agent.data_plane.stream import StreamPserver
from trireme_shared.platform.security.tokens import Role
from trireme_shared.protocol.errors import AnotherProcess, Forbidden, PeerError, Unauthorized
from trireme_shared.protocol.wire import codec
from trireme_shared.protocol.wire.messages import HandoffHeader, LookupRequest
from trireme_shared.serving.data_plane.server import OPEN, READ_BY_VIEWERS, make_app, serving
from trireme_shared.serving.pserver import Pserver
from trireme_shared.serving.transport.stream import upgrade

CALLS = {  # what a stream may be asked, by the kinds that its refusal of any other names
    "push": opening(),
    "pull": codec.encode({"id": 2, "call": "pull", "message": pull_request(0, [0]).model_dump()}),
    "lookup": codec.encode(
        {
            "id": 4,
            "call": "lookup",
            "message": LookupRequest(job=JOB, generation=1, version=0, rows=()).model_dump(),
        }
    ),
    "share": codec.encode({"id": 3, "call": "share", "message": {}}),
}
FRAMES = {
    **CALLS,
    "block": opening() + block(),
    "end": opening() + codec.encode({"id": 1, "end": True}),
    "took": codec.encode({"id": 2, "took": 1}),
}
TOKENS = {"": 401, "wrong": 401, "viewer": 403}


@pytest_asyncio.fixture
async def guarded(tmp_path):
    """A pserver with parameters that takes the roles' names as tokens, on TCP and a UNIX socket. `table`: its
    tokens."""
    pserver, table = Pserver(JOB, "ps-1", index=0), tmp_path / "tokens"
    app = make_app(pserver, access_by_role(table), stall_s=0.2)
    async with serving(app, "127.0.0.1", 0, str(tmp_path / "ps.sock")) as listening:
        made = Server(pserver, f"http://127.0.0.1:{listening.port}", listening.uds)
        made.app, made.table = app, table
        made.client = StreamPserver(made.member, "member")
        async with made.client:
            made.values = await made.initialise()
            yield made
    await settled(pserver)


async def exchange(server, uds: str, token: str, frames: bytes, **headers: str) -> bytes:
    """The head of the answer to a request to upgrade with frames right behind it."""
    given = {
        "Host": "localhost",
        "Upgrade": "trireme-frames/1",
        "Connection": "Upgrade",
        "Trireme-Pserver": "ps-1",
    }
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    given |= {"Authorization": f"Bearer {token}"} if token else {}
    head = "\r\n".join(
        ["GET /v1/stream HTTP/1.1", *(f"{name}: {value}" for name, value in given.items() if value)]
    )
    opened = (
        asyncio.open_unix_connection(uds)
        if uds
        else asyncio.open_connection("127.0.0.1", urlsplit(server.url).port)
    )
    reader, writer = await opened
    try:
        async with asyncio.timeout(20):
            writer.write(head.encode() + b"\r\n\r\n" + frames)
            return await reader.readuntil(b"\r\n\r\n")
    finally:
        writer.close()


@pytest.mark.parametrize("over", ["tcp", "unix"])
async def test_no_kind_of_frame_is_read_without_the_token_of_a_member(guarded, over):
    uds = guarded.member.uds if over == "unix" else ""
    before = guarded.pserver.counters
    for token, status in TOKENS.items():
        for name, frames in FRAMES.items():
            answer = await exchange(guarded, uds, token, frames)
            assert answer.startswith(b"HTTP/1.1 %d " % status), (token, name, answer[:80])
            assert b" 101 " not in answer
    assert guarded.pserver.counters == before
    assert guarded.pserver.store.highest == 0
    raw = await upgrade(guarded.url, Raw, "ps-1", uds=uds, token="member")
    try:
        raw.send_map({"id": 9, "call": "?", "message": {}})
        refusal = (await raw.next())["error"]["message"]
    finally:
        raw.abort()
    assert set(re.findall(r"'(\w+)'", refusal)) == set(CALLS), "a new kind of call belongs into this test"


async def test_every_plain_route_asks_for_its_role(guarded):
    routes = {(route.method, route.resource.canonical) for route in guarded.app.router.routes()}
    assert len(routes) >= 12  # GET routes answer HEAD, too
    for method, path in sorted(routes):
        for token in (*TOKENS, "member", "admin"):
            status, _ = await plain(guarded, method, path, token)
            expected = TOKENS.get(token)
            if path in OPEN or (path in READ_BY_VIEWERS and token == "viewer"):
                expected = None
            if expected is None:
                assert status not in (401, 403), (method, path, token)
            else:
                assert status == expected, (method, path, token)
    assert guarded.pserver.store.highest == 0


async def plain(server, method: str, path: str, token: str, **headers: str) -> tuple[int, bytes]:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    given |= {"Authorization": f"Bearer {token}"} if token else {}
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, server.url + path, headers=given) as answer,
    ):
        if answer.status == 401:
            assert answer.headers["WWW-Authenticate"] == 'Bearer realm="trireme"'
        return answer.status, await answer.read()


async def test_clients_are_told_what_was_refused(guarded):
    for token, refusal in [("wrong", Unauthorized), ("", Unauthorized), ("viewer", Forbidden)]:
        async with StreamPserver(guarded.member, token) as client:
            with pytest.raises(refusal):
                await client.push(push_header(0), gradients())
            with pytest.raises(refusal):
                await client.info()


async def test_pages_of_web_sites_reach_nothing(guarded):
    for headers, status in [({"Host": "evil.example"}, 421), ({"Origin": "https://evil.example"}, 403)]:
        assert (await plain(guarded, "GET", "/v1/info", "member", **headers))[0] == status
        assert (await exchange(guarded, "", "member", b"", **headers)).startswith(b"HTTP/1.1 %d " % status)
    assert (await plain(guarded, "POST", "/v1/init", "member", Content_Type="text/plain"))[0] == 415


async def test_frames_for_another_process_are_refused_before_they_are_read(guarded):
    """As if the port of a dead pserver had gone to one of another job or cluster."""
    other = guarded.member.model_copy(update={"incarnation": "ps-of-another-cluster"})
    for uds in ("", other.uds):
        async with StreamPserver(other.model_copy(update={"uds": uds}), "member") as client:
            with pytest.raises(AnotherProcess, match="read its address again"):
                await client.push(push_header(0), gradients())
            with pytest.raises(AnotherProcess, match="read its address again"):
                await client.info()
    handoff = HttpHandoff(other, "member")
    try:
        with pytest.raises(AnotherProcess):
            await handoff.hand_over(
                HandoffHeader(job=JOB, generation=1, migration="m", group=0, source=0, timeline=0), iter(())
            )
    finally:
        await handoff.close()
    assert issubclass(AnotherProcess, PeerError), "so that trainers read the address again"
    nameless = await exchange(guarded, "", "member", FRAMES["push"], Trireme_Pserver="")
    assert nameless.startswith(b"HTTP/1.1 400 "), nameless[:80]
    assert guarded.pserver.store.highest == 0
    assert (await guarded.raw("/v1/info", token="member", method="GET"))[0] == 200, (
        "a plain request may leave it out"
    )


async def test_a_stream_ends_when_its_token_is_revoked_and_a_new_one_opens_another(guarded):
    raw = await upgrade(guarded.url, Raw, "ps-1", token="member")
    try:
        write_tokens(guarded.table, {"newer": Role.MEMBER})
        assert "is not taken any more" in (await raw.next(limit_s=30))["error"]["message"]
        await until(lambda: raw.closed, "the end of the stream")
    finally:
        raw.abort()
    with pytest.raises(Unauthorized):
        await upgrade(guarded.url, Raw, "ps-1", token="member")
    async with StreamPserver(guarded.member.model_copy(update={"uds": ""}), lambda: "newer") as client:
        assert (await client.push(push_header(0), gradients())).applied == len(SIZES)
