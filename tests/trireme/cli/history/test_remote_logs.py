"""`trireme logs` of a master elsewhere: the lines of its REST API, each once, also through changes of the
master."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest

from master_service.api.app import make_app
from master_service.api.routes.logs import LogSource
from tests.equipment.replaced import replaced
from tests.equipment.waiting import until
from tests.master_service.api.test_logs import logged, virtually, write
from tests.master_service.many_jobs import Jobs, job_of
from trireme.cli import exit_codes
from trireme.cli.history import logs
from trireme.client import AsyncClient
from trireme_shared.platform.runtime.log_files import Line
from trireme_shared.protocol.errors import NotFound, PeerError

SECONDS = "2026-01-01T00:00:{:02}.000+00:00"


class Elsewhere:
    """Whichever master answers; `app` None: none does. `dies_after`: it has given lines of that log."""

    def __init__(self) -> None:
        self.app: Any = None
        self.dies_after = ""
        self.asked: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self.app is None:
            raise httpx.ConnectError("nobody listens")
        self.asked.append(scope["path"])
        await self.app(scope, receive, send)
        if self.dies_after and scope["path"].endswith(self.dies_after):
            self.app, self.dies_after = None, ""

    def client(self, url: str) -> AsyncClient:
        return AsyncClient(url, token="", transport=httpx.ASGITransport(self))


class Shown:
    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def __call__(self, lines: Iterable[Line]) -> None:
        self.lines += [(line.member, line.text) for line in lines]


def test_logs_are_followed_through_a_change_of_the_master_and_none_is_missed(tmp_path: Path) -> None:
    folder = tmp_path / "logs" / "a"
    one, two = (
        write(folder / "h-trainer-0-1.log", logged(1, "begins")),
        write(folder / "h-trainer-1-1.log", "prints"),
    )
    source = LogSource((str(tmp_path / "logs"),), by_job=True)
    elsewhere, shown = Elsewhere(), Shown()

    async def main() -> None:
        jobs = Jobs()
        async with jobs.leading("m1") as leader:
            await leader.create_job(job_of("a"), None)
            elsewhere.app = make_app(leader, None, source)
            following = asyncio.ensure_future(
                logs.follow_logs("http://localhost", "a", "", 10, "", shown, follow=True)
            )
            await until(lambda: len(shown.lines) == 2, "the lines of before")
            write(one, "loss 0.5")
            await until(lambda: len(shown.lines) == 3, "a new line")
            elsewhere.dies_after = "h-trainer-0-1"
            write(one, "loss 0.4")
            write(two, "read by nobody yet")
            await until(lambda: elsewhere.app is None, "the death of the master")
            assert len(shown.lines) == 3
        await asyncio.sleep(40)
        write(one, "loss 0.3")
        write(folder / "h-trainer-2-1.log", "a new member")
        async with jobs.leading("m2") as leader:
            elsewhere.app = make_app(leader, None, source)
            await until(lambda: len(shown.lines) == 7, "what was written meanwhile")
            await asyncio.sleep(5)
            elsewhere.app = None
            with pytest.raises(PeerError):
                await following
        assert sorted(shown.lines) == sorted(
            [
                *(
                    ("h-trainer-0-1", text)
                    for text in (logged(1, "begins"), "loss 0.5", "loss 0.4", "loss 0.3")
                ),
                *(("h-trainer-1-1", text) for text in ("prints", "read by nobody yet")),
                ("h-trainer-2-1", "a new member"),
            ]
        )
        of_one = [text for member, text in shown.lines if member == "h-trainer-0-1"]
        assert of_one[1:] == ["loss 0.5", "loss 0.4", "loss 0.3"]

    with replaced(logs, "AsyncClient", elsewhere.client):
        virtually(main)


def test_more_lines_than_an_answer_holds_are_read_backwards_until_enough_or_too_old(tmp_path: Path) -> None:
    lines = [logged(number // 100, f"line {number}") for number in range(3000)]
    write(tmp_path / "logs" / "a" / "h-trainer-0-1.log", *lines)
    write(tmp_path / "logs" / "a" / "h-pserver-0-1.log", logged(1, "of another member"))
    elsewhere = Elsewhere()

    async def main() -> None:
        async def of(tail: int, since: str = "", wanted: str = "h-trainer") -> list[str]:
            shown = Shown()
            await logs.follow_logs("http://localhost", "a", wanted, tail, since, shown, follow=False)
            return [text for _, text in shown.lines]

        async with Jobs().leading("m1") as leader:
            await leader.create_job(job_of("a"), None)
            elsewhere.app = make_app(leader, None, LogSource((str(tmp_path / "logs"),), by_job=True))
            assert await of(2500) == lines[-2500:]
            assert await of(1_000_000) == lines
            assert await of(0) == []
            assert await of(3, wanted="") == lines[-3:]
            elsewhere.asked.clear()
            assert await of(1_000_000, SECONDS.format(25)) == lines[2500:]
            assert len(elsewhere.asked) == 3, elsewhere.asked  # two listings and the newest 1,000 lines
            with pytest.raises(NotFound, match="it has: h-pserver-0-1, h-trainer-0-1"):
                await of(1, wanted="etcd")

    with replaced(logs, "AsyncClient", elsewhere.client):
        virtually(main)


def test_a_master_that_is_named_is_asked_and_else_the_files_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, str | None, str]] = []

    async def follow(url: str, job: str | None, wanted: str, *_: Any, **__: Any) -> None:
        asked.append((url, job, wanted))

    def code(data_dir: Path | None, url: str | None = None) -> int:
        return logs.logs(
            "trainer-0", "digits", data_dir, url, follow=False, since=None, tail=1, as_json=False
        )

    monkeypatch.setenv("TRIREME_URL", "http://m:1")
    with replaced(logs, "follow_logs", follow):
        assert (code(None), code(tmp_path, "http://n:2")) == (exit_codes.OK, exit_codes.OK)
        assert code(tmp_path) == exit_codes.NOT_FOUND  # no run is there
    assert asked == [("http://m:1", "digits", "trainer-0"), ("http://n:2", "digits", "trainer-0")]
