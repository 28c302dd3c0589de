"""What /readyz of a host agent says of the processes of its places: each one's own answer, and no more
requests than one a second."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest

from trireme.launch.processes import Child
from trireme.pool import host_status
from trireme.pool.host_status import HostMetrics, ProcessHealth
from trireme_shared.platform.membership.status_server import StatusServer
from trireme_shared.platform.runtime import service
from trireme_shared.platform.runtime.service import READY_FILE
from trireme_shared.platform.security.access import Access
from trireme_shared.platform.security.tokens import Tokens


class Process:
    """This one, as the parent of a member sees it."""

    def __init__(self, pid: int) -> None:
        self.pid, self.returncode = pid, None

    async def wait(self) -> int:
        return 0

    def send_signal(self, signal: int, /) -> None: ...


@dataclass
class Place:
    short_name: str
    child: Child | None


class Member:
    """A process of a place that answers at a port of its own. `missing`: why it is not ready."""

    def __init__(self, folder: Path, name: str, pid: int = 0) -> None:
        self.missing, self.asked = "", 0
        self.ready_file = folder / f"{name}.ready"

        async def start(*_: object) -> Process:
            return Process(pid or os.getpid())

        log = folder / f"{name}.log"
        self.child = Child(name, ["member"], {READY_FILE: str(self.ready_file)}, log, start)
        self.place = Place(name, self.child)

    def why(self) -> str:
        self.asked += 1
        return self.missing

    @asynccontextmanager
    async def serving(self, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
        await self.child.start()
        server = StatusServer(Access.of(Tokens()), HostMetrics(), self.why)
        async with server.serving("127.0.0.1", 0, None) as port:
            monkeypatch.setenv(READY_FILE, str(self.ready_file))
            service.ready(f"http://127.0.0.1:{port}")
            yield


@asynccontextmanager
async def agent(*members: Member) -> AsyncIterator[str]:
    """The address of an agent with these processes."""
    metrics = HostMetrics()
    metrics.registration = SimpleNamespace(alive=True)
    places = [each.place for each in members]
    async with aiohttp.ClientSession() as client:
        processes = ProcessHealth(lambda: places, client)
        server = StatusServer(Access.of(Tokens()), metrics, metrics.missing, processes.of_all)
        async with server.serving("127.0.0.1", 0, None) as port:
            yield f"http://127.0.0.1:{port}/readyz"


async def said(url: str) -> tuple[int, dict]:
    async with aiohttp.ClientSession() as client, client.get(url) as answer:
        return answer.status, await answer.json()


async def test_a_process_that_loads_is_live_and_not_ready_and_its_agent_stays_ready(tmp_path, monkeypatch):
    monkeypatch.setattr(host_status, "KEPT_S", 0.0)
    member = Member(tmp_path, "pserver-0")
    async with agent(member) as url:
        assert await said(url) == (
            200,
            {
                "status": "ready",
                "processes": {"pserver-0": {"live": False, "ready": False, "reason": "it has ended"}},
            },
        )
        await member.child.start()
        assert (await said(url))[1]["processes"]["pserver-0"] == {
            "live": True,
            "ready": False,
            "reason": "it starts",
        }
        member.child.process = None
        async with member.serving(monkeypatch):
            member.missing = "loads a checkpoint"
            expected = {"live": True, "ready": False, "reason": "loads a checkpoint"}
            assert await said(url) == (200, {"status": "ready", "processes": {"pserver-0": expected}})
            member.missing = ""
            assert (await said(url))[1]["processes"] == {"pserver-0": {"live": True, "ready": True}}
        found = (await said(url))[1]["processes"]["pserver-0"]  # its port is closed
        assert (found["live"], found["ready"]) == (False, False)
        assert "127.0.0.1" in found["reason"]
        member.place.child = None
        assert await said(url) == (200, {"status": "ready", "processes": {}})


async def test_what_an_earlier_process_of_the_place_said_does_not_count(tmp_path, monkeypatch):
    member = Member(tmp_path, "pserver-0", pid=os.getppid())
    async with agent(member) as url, member.serving(monkeypatch):
        assert (await said(url))[1]["processes"]["pserver-0"] == {
            "live": True,
            "ready": False,
            "reason": "it starts",
        }
        assert member.asked == 0


async def test_a_frozen_process_is_not_live_and_holds_nobody_up_for_long(tmp_path, monkeypatch):
    monkeypatch.setattr(host_status, "ANSWER_S", 0.2)
    frozen, well = Member(tmp_path, "trainer-0"), Member(tmp_path, "trainer-1")
    await frozen.child.start()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        frozen.ready_file.write_text(f"{os.getpid()} http://127.0.0.1:{silent.getsockname()[1]}\n")
        async with agent(frozen, well) as url, well.serving(monkeypatch), asyncio.timeout(20):
            found = (await said(url))[1]["processes"]
    assert found["trainer-1"] == {"live": True, "ready": True}
    assert (found["trainer-0"]["live"], found["trainer-0"]["ready"]) == (False, False)
    assert "it has not answered within 0.2 s" in found["trainer-0"]["reason"]


async def test_processes_are_asked_once_however_many_ask_the_agent(tmp_path, monkeypatch):
    monkeypatch.setattr(host_status, "KEPT_S", 3600.0)
    member = Member(tmp_path, "pserver-0")
    async with agent(member) as url, member.serving(monkeypatch):
        answers = await asyncio.gather(*(said(url) for _ in range(20)))
        assert all(answer == answers[0] for answer in answers)
        assert member.asked == 1
