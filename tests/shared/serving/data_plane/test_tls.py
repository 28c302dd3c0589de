"""Parameters and gradients over TLS: streams and plain requests, with and without certificates of clients."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
import torch

from pserver_service.handoff_client import HttpHandoff
from tests.pserver_service.jobs import JOB, pull_request, push_header, settled
from tests.shared.serving.data_plane.servers import SIZES, TOKEN, Flat, Server, accepting, gradients
from trainer_agent.data_plane.stream import StreamPserver
from trireme_shared.platform.security import authority
from trireme_shared.platform.security.tls import Tls
from trireme_shared.protocol.errors import PeerError, Unauthorized
from trireme_shared.protocol.wire.messages import HandoffAnswer, HandoffHeader, HandoffPart
from trireme_shared.serving.data_plane.server import make_app, serving
from trireme_shared.serving.pserver import Pserver


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    authority.create_authority(folder / "ours")
    authority.issue(folder / "ours", "trireme", ("127.0.0.1",), 1)
    made = folder / "ours"
    return Tls(str(made / "ca.pem"), str(made / "trireme.pem"), str(made / "trireme-key.pem"), mutual=True)


@asynccontextmanager
async def served(tls):
    pserver = Pserver(JOB, "ps-1", index=0)
    app = make_app(pserver, accepting(TOKEN), stall_s=20, idle_s=40)
    async with serving(app, "127.0.0.1", 0, tls=tls.server()) as listening:
        made = Server(pserver, f"https://127.0.0.1:{listening.port}", "")
        yield made
    await settled(pserver)


async def test_steps_over_tls_give_what_they_give_without(tls):
    async with served(tls) as server:
        server.client = StreamPserver(server.member, TOKEN, tls=tls.client(), stall_s=20)
        async with server.client as client:
            values, flat = await server.initialise(lanes=4), Flat()
            await asyncio.gather(
                client.push(push_header(0), gradients(0.5)),
                client.pull(pull_request(1, SIZES, wait_s=20), flat.sink),
            )
            for number, value in values.items():
                assert torch.equal(flat.values[number], value - 0.5)


async def test_who_lacks_a_certificate_trusts_another_authority_or_speaks_plain_http_gets_nothing(tls):
    async with served(tls) as server:
        plain = server.member.model_copy(update={"url": server.url.replace("https", "http")})
        cases = ((server.member, Tls(ca=tls.ca).client()), (server.member, None), (plain, None))
        for member, context in cases:
            async with StreamPserver(member, TOKEN, tls=context, stall_s=5) as stranger:
                with pytest.raises(PeerError):
                    await stranger.push(push_header(0), gradients())
                with pytest.raises(PeerError):
                    await stranger.info()
        async with StreamPserver(server.member, "wrong", tls=tls.client(), stall_s=5) as stranger:
            with pytest.raises(Unauthorized):
                await stranger.push(push_header(0), gradients())


async def test_slots_are_handed_over_with_tls(tls):
    async def take(header, parts):
        return HandoffAnswer(have=[part.block async for part, _ in parts] == [7])

    header = HandoffHeader(
        job=JOB, generation=1, migration="op-1.1", group=0, source=1, timeline=0, whole=True
    )
    part = HandoffPart(block=7, name="", dtype="float32"), memoryview(bytes(64))
    async with served(tls) as server:
        server.pserver.handoffs = SimpleNamespace(take=take)
        ours, stranger = (
            HttpHandoff(server.member, TOKEN, tls=tls.client()),
            HttpHandoff(server.member, TOKEN),
        )
        try:
            assert (await ours.hand_over(header, iter([part]))).have
            with pytest.raises(PeerError, match=r"(?i)certificate"):
                await stranger.hand_over(header, iter([part]))
        finally:
            await ours.close()
            await stranger.close()
