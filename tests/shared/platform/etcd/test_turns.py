"""A process with more requests to etcd than may be under way: each waits for its turn with all of its time
still before it, and a lease does not wait."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from trireme_shared.platform.etcd import Etcd, Put, connect
from trireme_shared.platform.etcd.errors import Retryable
from trireme_shared.platform.etcd.etcd3_transport import CONNECT_TIMEOUT_S, IN_FLIGHT

ANSWER_S = 0.4
HEADER = {"cluster_id": "1", "member_id": "1", "revision": "7", "raft_term": "2"}


class SlowEtcd:
    """It answers transactions `answer_s` late, and renewals at once. `most`: so many were under way
    together."""

    def __init__(self, answer_s: float) -> None:
        self.answer_s, self.under_way, self.most = answer_s, 0, 0
        self.asked: Counter[str] = Counter()

    async def txn(self, request: web.Request) -> web.Response:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            await request.read()
            self.asked["txn"] += 1
            await asyncio.sleep(self.answer_s)
            return web.json_response({"header": HEADER, "succeeded": True})
        finally:
            self.under_way -= 1

    async def grant(self, request: web.Request) -> web.Response:
        return web.json_response({"header": HEADER, "ID": "9", "TTL": "30"})


@asynccontextmanager
async def slow_etcd(folder: Path, answer_s: float) -> AsyncIterator[tuple[SlowEtcd, Etcd]]:
    server, app = SlowEtcd(answer_s), web.Application()
    app.router.add_post("/v3/kv/txn", server.txn)
    app.router.add_post("/v3/lease/grant", server.grant)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, str(folder / "etcd")).start()
    etcd = connect([f"unix://{folder / 'etcd'}"])
    try:
        yield server, etcd
    finally:
        await etcd.close()
        await runner.cleanup()


@pytest.mark.timeout(60)
async def test_requests_that_wait_for_a_turn_are_not_given_up_and_a_lease_does_not_wait(
    tmp_path: Path,
) -> None:
    """The wait for a connection counted as the time to connect: a leader of many jobs gave up most of its
    writes, closed their connections and sent all again, until its lease was lost."""
    rounds = 4
    assert rounds * ANSWER_S > CONNECT_TIMEOUT_S
    async with slow_etcd(tmp_path, ANSWER_S) as (server, etcd):
        writes = [
            asyncio.ensure_future(etcd.txn([], [Put(f"k{number}", b"")]))
            for number in range(rounds * IN_FLIGHT)
        ]
        await asyncio.sleep(ANSWER_S / 2)
        begin = time.monotonic()
        await etcd.grant(30.0)
        assert time.monotonic() - begin < ANSWER_S, "it waited for its turn"
        await asyncio.gather(*writes)
        assert server.most == IN_FLIGHT
        assert server.asked["txn"] == len(writes), "none was sent again"


@pytest.mark.timeout(60)
async def test_a_request_whose_turn_does_not_come_was_not_sent(tmp_path: Path) -> None:
    async with slow_etcd(tmp_path, 1.0) as (server, etcd):
        first = [asyncio.ensure_future(etcd.txn([], [Put(f"k{number}", b"")])) for number in range(IN_FLIGHT)]
        await asyncio.sleep(0.1)
        with pytest.raises(Retryable, match="was not sent"):
            await etcd.txn([], [Put("late", b"")], timeout_s=0.2)
        await asyncio.gather(*first)
        assert server.asked["txn"] == IN_FLIGHT
