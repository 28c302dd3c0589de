"""Many watches over one connection; what a single watch promises, test_watches.py holds of these as well (its
worlds with `-shared`)."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from structlog.testing import capture_logs

from tests.equipment.etcd.real import embedded_etcd
from tests.equipment.waiting import until
from trireme_shared.platform.etcd import Etcd, Retryable, connect
from trireme_shared.platform.etcd.embedded import EmbeddedEtcd
from trireme_shared.platform.etcd.operations import Body
from trireme_shared.platform.etcd.shared_watches import MOST_WAITING, NOTIFIED, SharedWatches

__all__ = ["embedded_etcd"]
MANY = 300


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


class Followers:
    """Watches of /0/, /1/, ...: what each has seen."""

    def __init__(self, etcd: Etcd) -> None:
        self.etcd = etcd
        self.seen: dict[int, list[bytes]] = {}

    async def follow(self, number: int) -> None:
        async with aclosing(self.etcd.watch(f"/{number}/", prefix=True)) as batches:
            async for batch in batches:
                found = self.seen.setdefault(number, [])
                found += [kv.value for kv in batch.kvs] + [event.kv.value for event in batch.events]


@pytest.mark.parametrize("share", [True, False])
async def test_hundreds_of_watches_take_one_descriptor(embedded_etcd: EmbeddedEtcd, share: bool) -> None:
    etcd = connect([embedded_etcd.url], share_watches=share)
    followers = Followers(etcd)
    await etcd.get("/ready")
    before = open_files()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(etcd.close)
        for number in range(MANY):
            stack.callback(asyncio.ensure_future(followers.follow(number)).cancel)
        await until(lambda: len(followers.seen) == MANY, "every first reading")
        for number in range(MANY):
            await etcd.put(f"/{number}/a", b"%d" % number)
        await until(lambda: all(followers.seen.values()), "every event")
        assert all(followers.seen[number] == [b"%d" % number] for number in range(MANY))
        more = open_files() - before
        assert (more < 40) is share, more  # beside 32 of other calls
        assert share or more >= MANY


async def test_watches_come_and_go_while_others_go_on(embedded_etcd: EmbeddedEtcd) -> None:
    etcd = connect([embedded_etcd.url], share_watches=True)
    followers = Followers(etcd)
    first = asyncio.ensure_future(followers.follow(0))
    try:
        await until(lambda: 0 in followers.seen, "the first watch")
        for turn in range(1, 40):
            following = asyncio.ensure_future(followers.follow(turn))
            await until(lambda number=turn: number in followers.seen, "the next watch")  # type: ignore[misc]
            await etcd.put(f"/{turn}/a", b"x")
            await etcd.put("/0/a", b"%d" % turn)
            await until(lambda number=turn: followers.seen[number] == [b"x"], "its event")  # type: ignore[misc]
            following.cancel()
        await until(lambda: len(followers.seen[0]) == 39, "the events of the first one")
        assert followers.seen[0] == [b"%d" % turn for turn in range(1, 40)]
    finally:
        first.cancel()
        await asyncio.wait([first])
        await etcd.close()


async def test_all_go_on_after_etcd_was_killed_and_miss_nothing(embedded_etcd: EmbeddedEtcd) -> None:
    etcd, other = connect([embedded_etcd.url], share_watches=True), connect([embedded_etcd.url])
    followers = Followers(etcd)
    following = [asyncio.ensure_future(followers.follow(number)) for number in range(20)]
    try:
        await until(lambda: len(followers.seen) == 20, "every first reading")
        for turn in (b"1", b"2"):
            await embedded_etcd.kill()
            await embedded_etcd.start()
            for number in range(20):
                await other.put(f"/{number}/a", turn)
            await until(
                lambda seen=turn: all(found[-1:] == [seen] for found in followers.seen.values()), "all"
            )  # type: ignore[misc]
        assert all(found == [b"1", b"2"] for found in followers.seen.values())
    finally:
        for task in following:
            task.cancel()
        await asyncio.wait(following)
        await etcd.close()
        await other.close()


async def test_where_requests_are_held_back_until_their_end_each_watch_gets_a_connection_of_its_own(
    embedded_etcd: EmbeddedEtcd, tmp_path: Path
) -> None:
    """As a proxy that reads a request whole before it passes it on."""
    path = tmp_path / "proxy"
    real = aiohttp.UnixConnector(embedded_etcd.url.removeprefix("unix://"), limit=0)

    async def pass_on(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        async with session.post(f"http://localhost{request.path}", data=body) as answer:
            response = web.StreamResponse(status=answer.status)
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            return response

    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", pass_on)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    timeout = aiohttp.ClientTimeout(total=None)
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=real, timeout=timeout))
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.UnixSite(runner, str(path)).start()
        etcd = connect([f"unix://{path}"], share_watches=True)
        stack.push_async_callback(etcd.close)
        followers = Followers(etcd)
        with capture_logs() as entries:
            stack.callback(asyncio.ensure_future(followers.follow(0)).cancel)
            await until(lambda: 0 in followers.seen, "the first reading")
            await until(
                lambda: any(each["event"] == "watches_have_connections_of_their_own" for each in entries),
                "it to notice",
                60,
            )
            await etcd.put("/0/a", b"x")
            await until(lambda: followers.seen[0] == [b"x"], "the event")


class Scripted:
    """A stream that gives what the test puts in, and keeps what was sent."""

    def __init__(self) -> None:
        self.sent: list[Body] = []
        self.messages: asyncio.Queue[Body | None] = asyncio.Queue()

    async def open(self, requests: Any) -> Any:
        async def keep() -> None:
            async for request in requests:
                self.sent.append(request)

        keeping = asyncio.ensure_future(keep())
        try:
            while (message := await self.messages.get()) is not None:
                yield message
            raise Retryable("it broke")
        finally:
            keeping.cancel()


async def test_a_refused_watch_is_told_of_it_also_where_etcd_does_not_say_which_one() -> None:
    stream = Scripted()
    shared = SharedWatches(stream.open)
    watches = [shared.watch({"key": b"%d" % number, "progress_notify": True}) for number in range(3)]
    first = [asyncio.ensure_future(anext(watch)) for watch in watches]
    await until(lambda: len(stream.sent) == 3, "the requests")
    stream.messages.put_nowait({"created": True, "watch_id": 1})
    stream.messages.put_nowait({"created": True, "canceled": True, "watch_id": -1, "cancel_reason": "no"})
    stream.messages.put_nowait({"created": True, "watch_id": 3})
    assert [(await each).get("cancel_reason") for each in first] == [None, "no", None]
    with pytest.raises(StopAsyncIteration):
        await anext(watches[1])
    await watches[0].aclose()
    await until(lambda: len(stream.sent) == 4, "the cancellation")
    assert stream.sent[3] == {"cancel_request": {"watch_id": 1}}
    waiting = asyncio.ensure_future(anext(watches[2]))
    stream.messages.put_nowait(None)
    with pytest.raises(Retryable, match="it broke"):
        await waiting
    assert shared.ended
    assert not shared.never_spoke


async def test_of_many_watches_some_are_told_of_progress_and_one_that_takes_nothing_breaks_alone() -> None:
    stream = Scripted()
    shared = SharedWatches(stream.open)
    watches = [shared.watch({"key": b"a", "progress_notify": True}) for _ in range(NOTIFIED + 10)]
    first = [asyncio.ensure_future(anext(watch)) for watch in watches]
    await until(lambda: len(stream.sent) == len(watches), "the requests")
    assert sum(each["create_request"]["progress_notify"] for each in stream.sent) == NOTIFIED
    for number in range(len(watches)):
        stream.messages.put_nowait({"created": True, "watch_id": number + 1})
    for each in first:
        await each
    for _ in range(MOST_WAITING + 5):
        stream.messages.put_nowait({"watch_id": 1})
    stream.messages.put_nowait({"watch_id": 2, "events": []})
    assert await anext(watches[1]) == {"watch_id": 2, "events": []}
    for _ in range(MOST_WAITING):
        await anext(watches[0])
    with pytest.raises(Retryable, match="were not taken"):
        await anext(watches[0])
    for watch in watches:
        await watch.aclose()
    assert shared.ended
