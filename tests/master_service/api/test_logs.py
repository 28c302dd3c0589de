"""Logs of members by REST: from files below the test's folder."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from master_service.api import server_sent
from master_service.api.app import make_api, make_app
from master_service.api.routes import logs as source_of_logs
from master_service.api.routes.logs import LogSource
from tests.equipment.replaced import replaced
from tests.equipment.virtual_loop import VirtualLoop, run_virtually
from tests.equipment.waiting import until
from tests.master_service.api.client import check_problem, client_of
from tests.master_service.api.test_events import Reader
from tests.master_service.cluster import MasterCluster, running, spec_of
from tests.master_service.many_jobs import Jobs, job_of
from trireme_shared.platform.runtime import log_files
from trireme_shared.platform.runtime.log_files import LogFile
from trireme_shared.platform.security.tokens import Role, new_token
from trireme_shared.protocol.errors import DeadlineExceeded, TooManyRequests
from trireme_shared.protocol.records.cluster import PoolMember

SECONDS = "2026-01-01T00:00:{:02}.000+00:00"


def logged(second: int, event: str) -> str:
    return json.dumps({"timestamp": SECONDS.format(second), "event": event})


def write(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)
    return path


def virtually(main: Callable[[], Any]) -> None:
    """What is given to a thread is done at once."""

    def at_once(loop: VirtualLoop, _: Any, function: Callable[..., Any], *arguments: Any) -> Any:
        ended = loop.create_future()
        loop.call_soon(ended.set_result, function(*arguments))
        return ended

    with replaced(VirtualLoop, "run_in_executor", at_once):
        run_virtually(main)


def asks(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost/v1/jobs/j")


def texts(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [line["text"] for line in answer.json()["lines"]]


def test_logs_are_listed_by_page_and_read_from_both_ends_and_tokens_are_masked(tmp_path: Path) -> None:
    log = write(
        tmp_path / "trainer-0.log", logged(1, "begins"), "loss 0.5", f"token {new_token(Role.ADMIN)};", "end"
    )
    write(tmp_path / "pserver-0.log")
    os.utime(log, (0, 1767225600))

    async def main() -> None:
        async with (
            running(MasterCluster(spec_of()), "t1") as master,
            asks(make_app(master, None, LogSource((str(tmp_path),)))) as client,
        ):
            page = (await client.get("/logs?page_size=1")).json()
            assert [each["log"] for each in page["logs"]] == ["pserver-0"]
            rest = (await client.get("/logs", params={"page_token": page["next_page_token"]})).json()
            size = log.stat().st_size
            assert rest == {
                "logs": [{"log": "trainer-0", "bytes": size, "write_time": "2026-01-01T00:00:00.000+00:00"}],
                "next_page_token": "",
            }
            found = (await client.get("/logs/trainer-0?tail=2")).json()
            time = SECONDS.format(1)
            assert found["lines"] == [
                {"time": time, "text": "token trireme_admin_***;"},
                {"time": time, "text": "end"},
            ]
            assert (found["log"], found["next_after"]) == ("trainer-0", size)
            earlier = (
                await client.get("/logs/trainer-0", params={"before": found["next_before"], "tail": 9})
            ).json()
            assert [line["text"] for line in earlier["lines"]] == [logged(1, "begins"), "loss 0.5"]
            assert [line["time"] for line in earlier["lines"]] == [time, time]
            assert (earlier["next_before"], earlier["next_after"]) == (0, found["next_before"])
            forward = (await client.get("/logs/trainer-0", params={"after": found["next_before"]})).json()
            assert [line["time"] for line in forward["lines"]] == [time, time]
            assert [line["text"] for line in forward["lines"]] == [line["text"] for line in found["lines"]]
            assert (await client.get("http://localhost/v1/logs/trainer-0-9f2c51ab03de")).json()[
                "log"
            ] == "trainer-0"
            check_problem(await client.get("/logs/trainer-0?after=1&before=2"), 400, "INVALID_ARGUMENT")
            check_problem(await client.get("/logs/trainer-0?tail=1001"), 422, "INVALID_ARGUMENT")

    virtually(main)


def test_a_request_waits_for_whole_lines_and_a_cursor_of_a_file_that_was_cut_begins_again(
    tmp_path: Path,
) -> None:
    log = write(tmp_path / "trainer-0.log", "one")

    async def main() -> None:
        async with (
            running(MasterCluster(spec_of()), "t1") as master,
            asks(make_app(master, None, LogSource((str(tmp_path),)))) as client,
        ):
            cursor = (await client.get("/logs/trainer-0")).json()["next_after"]
            waiting = asyncio.ensure_future(client.get(f"/logs/trainer-0?after={cursor}&wait_s=30"))
            await asyncio.sleep(5)
            with log.open("a") as file:
                file.write("tw")
            await asyncio.sleep(5)
            assert not waiting.done()
            with log.open("a") as file:
                file.write("o\n")
            async with asyncio.timeout(1):
                assert texts(await waiting) == ["two"]
            log.write_text("new\n")
            found = await client.get(f"/logs/trainer-0?after={cursor + 4}")
            assert (texts(found), found.json()["next_after"]) == (["new"], 4)
            begun = asyncio.get_running_loop().time()
            assert texts(await client.get("/logs/trainer-0?after=4&wait_s=3")) == []
            assert asyncio.get_running_loop().time() - begun == pytest.approx(3, abs=0.1)

    virtually(main)


def test_no_name_reaches_another_file_and_a_master_without_logs_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    write(folder / "trainer-0.log", "mine")
    (folder / "link.log").symlink_to(write(tmp_path / "secret.log", "secret"))
    (folder / "folder.log").mkdir()
    os.mkfifo(folder / "pipe.log")

    async def main() -> None:
        async with running(MasterCluster(spec_of()), "t1") as master:
            async with asks(make_app(master, None, LogSource((str(folder),)))) as client:
                assert [each["log"] for each in (await client.get("/logs")).json()["logs"]] == ["trainer-0"]
                names = (
                    "link",
                    "folder",
                    "pipe",
                    "..%2Fsecret",
                    "%2E%2E%2Fsecret",
                    "trainer-1",
                    "trainer-0.log",
                    "*",
                )
                for name in (*names, "trainer-0%00", "trainer-", f"{'x' * 299}", "%2Fetc%2Fpasswd"):
                    check_problem(await client.get(f"/logs/{name}"), 404, "NOT_FOUND")
                    check_problem(await client.get(f"/logs/{name}/stream"), 404, "NOT_FOUND")
                check_problem(await client.get("http://localhost/v1/jobs/other/logs"), 404, "NOT_FOUND")
            async with client_of(master) as client:
                for path in (
                    "/v1/jobs/j/logs",
                    "/v1/jobs/j/logs/trainer-0",
                    "/v1/jobs/j/logs/trainer-0/stream",
                ):
                    problem = check_problem(await client.get(path), 404, "NOT_FOUND")
                    assert "TRIREME_LOGS" in problem["detail"]
                    assert "host agent" in problem["hint"]

    virtually(main)


def test_of_a_clusters_jobs_the_logs_of_all_host_agents_are_served_and_others_are_told_where(
    tmp_path: Path,
) -> None:
    for place in (
        "host/logs/a/h-trainer-0-1",
        "hosts/trainers-0/logs/a/h2-trainer-0-2",
        "host/logs/b/h-trainer-0-1",
    ):
        write(tmp_path / f"{place}.log", place)
    write(tmp_path / "host/logs/a/h-trainer-0-10.log", "the last epoch")
    folders = (str(tmp_path / "host/logs"), str(tmp_path / "hosts/*/logs"))
    member = PoolMember(member="far-trainer-0", kind="trainer", host="node-7", agent="far", pid=1)

    async def main() -> None:
        async with Jobs().leading("m1") as leader:
            await leader.create_job(job_of("a"), None)  # it is queued: nobody leads it
            leader.state.members["trainer", "far-trainer-0"] = member
            app = make_app(leader, None, LogSource(folders, by_job=True))
            async with httpx.AsyncClient(
                transport=httpx.ASGITransport(app), base_url="http://localhost"
            ) as client:
                page = (await client.get("/v1/jobs/a/logs")).json()
                assert [each["log"] for each in page["logs"]] == [
                    "h-trainer-0-1",
                    "h-trainer-0-10",
                    "h2-trainer-0-2",
                ]
                assert texts(await client.get("/v1/jobs/a/logs/h-trainer-0-1")) == [
                    "host/logs/a/h-trainer-0-1"
                ]
                assert texts(await client.get("/v1/jobs/a/logs/h-trainer-0-9f2c51ab03de")) == [
                    "the last epoch"
                ]
                problem = check_problem(await client.get("/v1/jobs/a/logs/far-trainer-0-3"), 404, "NOT_FOUND")
                assert problem["details"] == {"host": "node-7", "agent": "far"}
                assert "far on node-7" in problem["detail"]
                # no job of this cluster
                for job in ("b", "%2E%2E", "..%2F..%2Fhosts%2Ftrainers-0%2Flogs%2Fa"):
                    check_problem(await client.get(f"/v1/jobs/{job}/logs"), 404, "NOT_FOUND")

    virtually(main)


# ------------------------------------------------------------------ bounds


def test_an_answer_is_bounded_in_lines_and_bytes_and_the_cursors_lead_through_all_of_it(
    tmp_path: Path,
) -> None:
    lines = [f"{number} {'x' * (number % 7 * 9_000)}" for number in range(3_000)]
    log = write(tmp_path / "trainer-0.log", *lines)
    source = LogSource((str(tmp_path),))
    sizes: list[int] = []

    def note(file: LogFile, found: list[log_files.Line]) -> tuple[list[str], int, int]:
        sizes.append(sum(len(line.text) + 1 for line in found))
        assert len(found) <= source_of_logs.ANSWER_LINES
        return [line.text for line in found], file.cursor, file.begin

    async def main() -> None:
        forward, cursor = [], 0
        while cursor < log.stat().st_size:
            found, cursor, _ = await source.lines(LogFile(log), cursor, None, 1, note)
            forward += found
        assert forward == lines
        backward, begin = [], log.stat().st_size
        while begin:
            found, _, begin = await source.lines(LogFile(log), None, begin, 1000, note)
            backward = found + backward
        assert backward == lines
        assert max(sizes) <= source_of_logs.ANSWER_BYTES + 64_000

    virtually(main)


def test_ten_gigabytes_are_not_read(tmp_path: Path) -> None:
    """Most of the file is a hole; how much of it is read is counted."""
    log = tmp_path / "trainer-0.log"
    with log.open("wb") as file:
        file.truncate(10 << 30)
    write(log, *(f"line {number}" for number in range(2000)))
    source, count, pread = LogSource((str(tmp_path),)), 0, os.pread

    def counted(descriptor: int, size: int, place: int) -> bytes:
        nonlocal count
        count += size
        return pread(descriptor, size, place)

    async def main() -> None:
        with replaced(log_files.os, "pread", counted):
            found = await source.lines(
                LogFile(log), None, None, 1000, lambda _, lines: [line.text for line in lines]
            )
            assert found == [f"line {number}" for number in range(1000, 2000)]
            assert count < 1 << 20
            file = LogFile(log)
            assert await source.lines(file, 5 << 30, None, 1, lambda _, lines: lines) == []  # within a line
            assert file.cursor == (5 << 30) - 1 + source_of_logs.ANSWER_BYTES
            assert await source.lines(file, None, 5 << 30, 100, lambda _, lines: lines) == []
            assert file.begin < 5 << 30
            assert count < 100 << 20

    virtually(main)


def test_a_token_is_masked_whatever_the_cursor_and_the_cut_of_a_line(tmp_path: Path) -> None:
    token = new_token(Role.ADMIN)
    log = write(
        tmp_path / "trainer-0.log", f"a {token}", "x" * (log_files.LINE_BYTES - 20) + f" {token} end", "b"
    )
    secret = token.removeprefix("trireme_admin_")[:5]
    for place in (*range(80), *range(65_400, 65_700), log.stat().st_size):
        for lines in (
            LogFile(log).news_after(place, count=9, most=1 << 18),
            LogFile(log).last(9, before=place),
        ):
            assert not [line for line in lines if secret in line.text or token[-5:] in line.text], place


async def test_a_thread_that_reads_gives_way_to_the_event_loop(tmp_path: Path) -> None:
    write(tmp_path / "trainer-0.log", *(f"line {number}" for number in range(1000)))
    source, ways = LogSource((str(tmp_path),)), list[str]()

    with replaced(source_of_logs, "_give_way", lambda: ways.append(threading.current_thread().name)):
        file = await source.find("j", "trainer-0")
        assert file is not None
        assert await source.lines(file, None, None, 1000, lambda _, lines: len(lines)) == 1000
    assert ways == ["logs_0"] * 20


async def test_files_are_read_in_a_thread_and_one_that_hangs_takes_no_request_with_it(tmp_path: Path) -> None:
    log, goes_on = write(tmp_path / "trainer-0.log", "one"), threading.Event()
    source = LogSource((str(tmp_path),), most=3)
    readers: set[str] = set()

    def hangs(*_: Any) -> str:
        readers.add(threading.current_thread().name)
        goes_on.wait(30)
        return "read"

    with ExitStack() as stack:
        stack.callback(goes_on.set)
        stack.enter_context(replaced(source_of_logs, "READ_S", 0.05))  # type: ignore[arg-type]
        for _ in range(3):
            with pytest.raises(DeadlineExceeded):
                await source.lines(LogFile(log), None, None, 1, hangs)
        with pytest.raises(TooManyRequests):
            await source.lines(LogFile(log), None, None, 1, hangs)
    async with asyncio.timeout(30):
        while "0 reads" not in repr(source):
            await asyncio.sleep(0.01)
    assert await source.lines(LogFile(log), None, None, 1, lambda _, lines: lines[0].text) == "one"
    assert readers == {"logs_0"}


# ------------------------------------------------------------------ as a stream


@pytest.fixture
def streamed(tmp_path: Path) -> Path:
    return write(tmp_path / "trainer-0.log", logged(1, "begins"), "loss 0.5")


def test_a_stream_goes_on_after_the_last_event_id_and_ends_with_the_term(streamed: Path) -> None:
    async def main() -> None:
        async with running(MasterCluster(spec_of()), "t1") as master:
            api = make_api(master, LogSource((str(streamed.parent),)))
            reader = Reader(api, "/v1/jobs/j/logs/trainer-0/stream")
            await until(lambda: "loss 0.5" in reader.text, "what was written before")
            await asyncio.sleep(server_sent.HEARTBEAT_S + 2)
            assert reader.text.endswith(": still here\n\n")
            first = (
                f'id: {streamed.stat().st_size}\ndata: {{"time":"{SECONDS.format(1)}","text":"loss 0.5"}}\n\n'
            )
            assert first in reader.text
            place = str(streamed.stat().st_size).encode()
            write(streamed, "loss 0.4")
            await until(lambda: "loss 0.4" in reader.text, "what is written now")
            again = Reader(api, "/v1/logs/trainer-0/stream", (b"last-event-id", place))
            await until(lambda: "loss 0.4" in again.text, "what came after it")
            assert (again.status, "loss 0.5" in again.text) == (200, False)
            api.state.streams.most = 2
            third = Reader(api, "/v1/jobs/j/logs/trainer-0/stream")
            await third.running
            assert (third.status, json.loads(third.text)["code"]) == (429, "TOO_MANY_REQUESTS")
        await until(lambda: reader.ended and again.ended, "the ends of the streams", 2)
        await asyncio.gather(reader.running, again.running)
        refused = Reader(api, "/v1/jobs/j/logs/trainer-0/stream")
        await refused.running
        assert (refused.status, json.loads(refused.text)["code"]) == (503, "NOT_LEADER")

    virtually(main)
