"""Parts of a group travel between two parameter servers over a real socket."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from pserver_service.handoff_client import HttpHandoff
from tests.shared.serving.data_plane.servers import accepting
from trireme_shared.protocol.errors import DeadlineExceeded, NotReady, PeerError, Unauthorized
from trireme_shared.protocol.records import PserverMember
from trireme_shared.protocol.wire.messages import HandoffAnswer, HandoffHeader, HandoffPart
from trireme_shared.serving.data_plane.server import make_app, serving
from trireme_shared.serving.pserver import Pserver

HEADER = HandoffHeader(job="ctr", generation=3, migration="op-1.1", group=2, source=0, timeline=0, whole=True)
PAYLOADS = [bytes([number]) * size for number, size in enumerate((1_000_000, 4, 300_000))]


def parts():
    for number, payload in enumerate(PAYLOADS):
        yield (
            HandoffPart(block=number, name="exp_avg" if number else "", dtype="float32"),
            memoryview(payload),
        )


def member_at(port: int) -> PserverMember:
    return PserverMember(index=1, url=f"http://127.0.0.1:{port}", incarnation="ps", host="h", pid=1)


async def handed_over(take, *, token: str = "boat", stall_s: float = 20.0, header=HEADER, items=None):
    pserver = Pserver("ctr", "ps", index=1)
    pserver.handoffs = SimpleNamespace(take=take)
    async with serving(make_app(pserver, accepting("boat")), "127.0.0.1", 0) as listening:
        port = HttpHandoff(member_at(listening.port), token, stall_s=stall_s)
        try:
            return await port.hand_over(header, parts() if items is None else items)
        finally:
            await port.close()


def test_every_part_arrives_as_it_was_sent():
    arrived = []

    async def take(header, items):
        async for part, payload in items:
            arrived.append((part.block, part.name, bytes(payload)))
        return HandoffAnswer(have=header == HEADER)

    assert asyncio.run(handed_over(take)).have
    assert arrived == [
        (number, "exp_avg" if number else "", payload) for number, payload in enumerate(PAYLOADS)
    ]


def test_a_refusal_is_the_error_that_the_target_raised():
    async def take(header, _):
        raise NotReady(f"migration {header.migration} is not known here")

    with pytest.raises((NotReady, PeerError)):
        asyncio.run(handed_over(take))
    with pytest.raises((Unauthorized, PeerError)):
        asyncio.run(handed_over(take, token="wrong"))


def test_a_target_that_does_not_answer_is_given_up():
    async def take(_, items):
        async for _item in items:
            pass
        await asyncio.sleep(60)

    with pytest.raises(DeadlineExceeded, match="nothing moved for"):
        asyncio.run(handed_over(take, stall_s=0.5))


def test_without_a_listener_it_is_a_peers_error():
    async def main():
        port = HttpHandoff(member_at(1))
        try:
            await port.hand_over(HEADER, parts())
        finally:
            await port.close()

    with pytest.raises(PeerError):
        asyncio.run(main())
