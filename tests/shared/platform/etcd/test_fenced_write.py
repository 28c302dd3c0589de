"""A write that waits for an etcd that is away says so now and then, not at each attempt."""

from __future__ import annotations

import asyncio

import structlog

from tests.equipment.etcd.simulated import SimulatedEtcd
from tests.equipment.virtual_loop import run_virtually
from trireme_shared.platform.etcd import Compare, Etcd, Get, Put, TxnResult
from trireme_shared.platform.etcd.fenced import FencedWrite


def test_an_unanswered_write_is_logged_at_first_then_ever_more_rarely_and_once_when_it_is_answered() -> None:
    async def main() -> None:
        server = SimulatedEtcd()
        etcd = Etcd(server.transport("writer"))

        async def landed(_: TxnResult) -> int:
            return 0

        write = FencedWrite(
            etcd, [Compare.create("/a", "==", 0)], [Put("/a", b"1")], [Get("/a")], landed, 1.0
        )
        server.stop()
        writing = asyncio.ensure_future(write.until_answered(lambda: None, 0.2))
        await asyncio.sleep(75)
        server.start()
        assert await writing == server.revision

    structlog.reset_defaults()  # another test may have raised the level
    with structlog.testing.capture_logs() as entries:
        run_virtually(main)
    told = [entry for entry in entries if entry["room"] == "etcd.fenced_write"]
    assert [entry["event"] for entry in told] == ["write_unanswered"] * 4 + ["write_answered"]
    assert told[0]["attempts"] == 1
    assert told[-1]["attempts"] > 20
