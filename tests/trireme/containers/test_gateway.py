"""The gateway passes connections on to the master that leads, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from structlog.testing import capture_logs

from tests.equipment.waiting import until
from trireme.containers import gateway
from trireme.containers.gateway import Gateway, Settings
from trireme_shared.platform.security import authority
from trireme_shared.platform.security.tls import Tls


@dataclass
class FakeMaster:
    """Answers at its address as a master does: /readyz says whether it leads."""

    address: str
    leads: bool = False
    silent: bool = False
    streams: list[web.StreamResponse] = field(default_factory=list)

    async def readyz(self, _: web.Request) -> web.Response:
        if self.silent:
            await asyncio.sleep(60)
        return web.json_response({"status": "ok" if self.leads else "standby"})

    async def who(self, _: web.Request) -> web.Response:
        return web.json_response({"who": self.address})

    async def last(self, request: web.Request) -> web.Response:
        answer = await self.who(request)
        answer.force_close()
        return answer

    async def stream(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        self.streams.append(answer)
        await answer.write(b"begin\n")
        await asyncio.sleep(60)
        return answer

    @contextlib.asynccontextmanager
    async def serving(self, port: int, tls: Tls) -> AsyncIterator[None]:
        app = web.Application()
        answers = {"/readyz": self.readyz, "/who": self.who, "/last": self.last, "/stream": self.stream}
        app.add_routes([web.get(path, answer) for path, answer in answers.items()])
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, self.address, port, ssl_context=tls.server()).start()
        try:
            yield
        finally:
            await runner.cleanup()


@contextlib.asynccontextmanager
async def two_masters(
    monkeypatch, tls: Tls | None = None
) -> AsyncIterator[tuple[FakeMaster, FakeMaster, Gateway, str]]:
    """`tls`: of the masters; the gateway trusts its authority."""
    first, second = FakeMaster("127.0.0.2", leads=True), FakeMaster("127.0.0.3")
    with socket.create_server(("127.0.0.2", 0)) as free:
        port = free.getsockname()[1]
    resolve = asyncio.get_running_loop().getaddrinfo

    async def named(host, wanted, **options):
        if host != "masters.test":
            return await resolve(host, wanted, **options)
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (each.address, wanted)) for each in (first, second)
        ]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", named, raising=False)
    monkeypatch.setattr(gateway, "LOOK_S", 0.02)
    monkeypatch.setattr(gateway, "WAIT_S", 0.5)
    settings = Settings(masters=f"masters.test:{port}", host="127.0.0.1", port=0)
    tls = tls or Tls()
    made, stopping = Gateway(settings, Tls(ca=tls.ca)), asyncio.Event()
    async with first.serving(port, tls), second.serving(port, tls):
        running = asyncio.ensure_future(made.run(stopping))
        try:
            await until(lambda: made.leader, "a leader")
            yield first, second, made, f"{tls.scheme}://127.0.0.1:{made.address[1]}"
        finally:
            stopping.set()
            assert await running == 0


async def who(session: aiohttp.ClientSession, url: str) -> str:
    async with session.get(f"{url}/who") as answer:
        return (await answer.json())["who"]


async def test_requests_reach_the_leader_and_the_next_one_after_it(monkeypatch):
    async with two_masters(monkeypatch) as (first, second, made, url), aiohttp.ClientSession() as session:
        assert await who(session, url) == first.address
        async with session.get(f"{url}/stream") as stream:
            assert await stream.content.readline() == b"begin\n"
            first.leads, second.leads = False, True
            with pytest.raises(aiohttp.ClientPayloadError):  # the stream of the one before ends
                async with asyncio.timeout(10):
                    await stream.content.read()
        assert await who(session, url) == second.address
        assert made.leader == second.address


async def test_connections_that_the_leader_has_ended_are_ended_though_their_clients_keep_them(monkeypatch):
    monkeypatch.setattr(gateway, "AFTER_END_S", 0.05)
    async with two_masters(monkeypatch) as (_, _, made, _), asyncio.timeout(20):
        kept = [await asyncio.open_connection(*made.address) for _ in range(3)]
        for reader, writer in kept:
            writer.write(b"GET /last HTTP/1.1\r\nHost: masters.test\r\n\r\n")
            assert b'"who"' in await reader.read()  # up to its end
        await until(lambda: "0 connections" in repr(made), "the connections to be over")
        for _, writer in kept:
            writer.close()


async def test_refused_connections_are_logged_together(monkeypatch):
    monkeypatch.setattr(gateway, "MAX_CONNECTIONS", 0)

    async def refused(made: Gateway) -> None:
        reader, writer = await asyncio.open_connection(*made.address)
        assert await reader.read() == b""
        writer.close()

    with capture_logs() as logs:

        def told() -> list[int]:
            return [line.get("refused", 1) for line in logs if line["event"] == "too_many_connections"]

        async with two_masters(monkeypatch) as (_, _, made, _):
            await refused(made)
            await until(lambda: told() == [1], "the first one to be told at once")
            for _ in range(20):
                await refused(made)
            await asyncio.sleep(0.2)  # it looks ten times meanwhile
            assert told() == [1]
            monkeypatch.setattr(gateway, "TELL_S", 0.0)
            await until(lambda: told() == [1, 20], "the others to be told with their number")


async def test_while_nobody_leads_it_waits_and_says_so(monkeypatch):
    async with two_masters(monkeypatch) as (first, second, made, url), aiohttp.ClientSession() as session:
        first.leads = False
        await until(lambda: not made.leader, "no leader")
        async with session.get(f"{url}/who") as answer:
            assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
            assert (await answer.json(content_type="application/problem+json"))["code"] == "NOT_LEADER"
        waiting = asyncio.ensure_future(who(session, url))
        await asyncio.sleep(0.05)
        second.leads = True
        assert await waiting == second.address


async def test_a_silent_master_does_not_hide_the_leader(monkeypatch):
    monkeypatch.setattr(gateway, "ANSWER_S", 0.2)
    async with two_masters(monkeypatch) as (first, second, _, url), aiohttp.ClientSession() as session:
        first.silent, second.leads = True, True

        async def reached() -> str:
            with contextlib.suppress(aiohttp.ClientError):
                return await who(session, url)
            return ""

        async with asyncio.timeout(20):
            while await reached() != second.address:
                await asyncio.sleep(0.05)


def certificate(folder: Path, host: str) -> Tls:
    authority.create_authority(folder)
    authority.issue(folder, "master", (host,), 1)
    return Tls(*(str(folder / name) for name in ("ca.pem", "master.pem", "master-key.pem")))


async def test_masters_are_asked_by_https_under_tls_and_their_bytes_pass_unread(monkeypatch, tmp_path):
    tls = certificate(tmp_path / "tls", "masters.test")
    async with two_masters(monkeypatch, tls) as (first, second, _, url), aiohttp.ClientSession() as session:
        trusted = Tls(ca=tls.ca).client()

        async def asked() -> str:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"{url}/who", ssl=trusted, server_hostname="masters.test") as answer:
                    return (await answer.json())["who"]
            return ""

        assert await asked() == first.address
        first.leads, second.leads = False, True
        async with asyncio.timeout(20):
            while await asked() != second.address:
                await asyncio.sleep(0.05)


async def test_why_no_master_says_that_it_leads_is_told_once(monkeypatch, tmp_path):
    tls = certificate(tmp_path / "tls", "another.test")
    monkeypatch.setattr(gateway, "LOOK_S", 0.02)
    monkeypatch.setattr(gateway, "WAIT_S", 0.05)
    first = FakeMaster("127.0.0.2", leads=True)
    with socket.create_server((first.address, 0)) as free:
        port = free.getsockname()[1]
    made = Gateway(Settings(masters=f"{first.address}:{port}", host="127.0.0.1", port=0), Tls(ca=tls.ca))
    stopping = asyncio.Event()
    with capture_logs() as logs:
        async with first.serving(port, tls):
            running = asyncio.ensure_future(made.run(stopping))
            await until(lambda: made.address[1], "the gateway to listen")

            def told() -> list[str]:
                return [each["cause"] for each in logs if each["event"] == "master_does_not_answer"]

            await until(told, "the cause to be told")
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"http://127.0.0.1:{made.address[1]}/who") as answer,
            ):
                assert "certificate" in (await answer.json(content_type="application/problem+json"))["detail"]
            stopping.set()
            assert await running == 0
    assert len(told()) == 1
    assert "certificate" in told()[0]


@pytest.mark.parametrize("text", ["", "master", "a b:1", "master:port"])
def test_an_address_without_a_port_is_refused(text, monkeypatch, capsys):
    monkeypatch.setenv("TRIREME_MASTERS", text)
    monkeypatch.setattr("sys.argv", ["gateway"])
    with pytest.raises(SystemExit) as caught:
        gateway.main()
    assert caught.value.code == 2
    assert "TRIREME_MASTERS" in capsys.readouterr().err
