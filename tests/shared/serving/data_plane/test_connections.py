"""Connections of peers that show no token: they end, and are few; those of trainers stay."""

from __future__ import annotations

import asyncio

import pytest

from tests.equipment.waiting import until
from tests.pserver_service.jobs import JOB, pull_request
from tests.shared.serving.data_plane.servers import TOKEN, accepting
from trainer_agent.data_plane.stream import StreamPserver
from trireme_shared.protocol.errors import DeadlineExceeded
from trireme_shared.protocol.records import PserverMember
from trireme_shared.serving.data_plane.server import ARRIVALS, make_app, serving
from trireme_shared.serving.pserver import Pserver

REQUEST = f"GET /v1/info HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
HEALTH = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
WRONG = REQUEST.replace(TOKEN.encode(), b"wrong")


async def is_over(reader: asyncio.StreamReader, limit_s: float) -> bool:
    """Whether the server closes the connection within that time."""
    try:
        async with asyncio.timeout(limit_s):
            while await reader.read(1 << 16):
                pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


async def test_who_shows_no_token_is_cut_off_and_who_did_stays(monkeypatch):
    monkeypatch.setattr("trireme_shared.platform.security.listening.LOOK_S", 0.05)
    app = make_app(Pserver(JOB, "ps-1", index=0), accepting(TOKEN))
    app[ARRIVALS].patience_s = 0.5
    async with serving(app, "127.0.0.1", 0) as listening:
        said = {"nothing": b"", "half": REQUEST[:40], "health": HEALTH, "wrong": WRONG, "good": REQUEST}
        found = {}
        for name, words in said.items():
            found[name] = await asyncio.open_connection("127.0.0.1", listening.port)
            found[name][1].write(words)
        strangers = (is_over(found[name][0], 10) for name in said if name != "good")
        assert await asyncio.gather(*strangers) == [True] * 4
        assert not await is_over(found["good"][0], 1.0)
        for _, writer in found.values():
            writer.close()


async def test_a_peer_has_few_connections_without_a_token(monkeypatch):
    monkeypatch.setattr("trireme_shared.platform.security.listening.LOOK_S", 0.05)
    app = make_app(Pserver(JOB, "ps-1", index=0), accepting(TOKEN))
    app[ARRIVALS].per_peer = 5
    async with serving(app, "127.0.0.1", 0) as listening:
        _, trainer = good = await asyncio.open_connection("127.0.0.1", listening.port)
        trainer.write(REQUEST)
        await good[0].readuntil(b"\r\n\r\n")
        idle = [await asyncio.open_connection("127.0.0.1", listening.port) for _ in range(40)]
        await until(lambda: app[ARRIVALS].waiting == 5, "the others to be cut")
        trainer.write(REQUEST)
        async with asyncio.timeout(5):
            await good[0].readuntil(b"HTTP/1.1 ")
        for _, writer in [good, *idle]:
            writer.close()


async def test_calls_that_wait_for_one_connection_fail_with_it_and_not_one_after_the_other(monkeypatch):
    monkeypatch.setattr("trainer_agent.data_plane.stream.CONNECT_S", 0.3)
    accepted: list[asyncio.StreamWriter] = []

    async def silent(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.append(writer)

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    member = PserverMember(index=0, url=url, incarnation="frozen", host="elsewhere", pid=1)
    async with StreamPserver(member) as port, asyncio.timeout(1.0):
        calls = [port.pull(pull_request(0, [0]), lambda _: memoryview(b"")) for _ in range(5)]
        failed = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(error) for error in failed] == [DeadlineExceeded] * 5
        assert len(accepted) == 1
        with pytest.raises(DeadlineExceeded):  # a later call tries again
            await port.pull(pull_request(0, [0]), lambda _: memoryview(b""))
        assert len(accepted) == 2
    server.close()
    for writer in accepted:
        writer.close()
