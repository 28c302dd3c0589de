"""Memory is offered once in a connection: an answer that nobody reads, or a refusal, leaves no later block
that refers to what is not known."""

from __future__ import annotations

import asyncio
import gc
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pserver_service.jobs import pull_request, push_header, stream
from tests.shared.serving.data_plane.servers import LAYOUT, SIZES, Flat, gradients, server
from tests.shared.serving.data_plane.streams import over_shm, versions
from trainer_agent.data_plane.stream import StreamPserver, TrainerStream
from trireme_shared.blocks.buffers import bytes_of
from trireme_shared.protocol.errors import InvalidArgument, PeerError
from trireme_shared.protocol.wire.messages import PushBlock
from trireme_shared.serving.transport.shared_memory import Region

__all__ = ["server"]


def unmappable(*_: Any) -> None:
    """In place of trireme_shared.serving.transport.shared_memory.open_offered."""
    raise InvalidArgument("another PID namespace")


@over_shm
async def test_who_is_cancelled_when_the_offers_have_come_connects_anew(server, monkeypatch):
    values, flat, on_map = await server.initialise(), Flat(), TrainerStream.on_map

    def cancelling(self: TrainerStream, fields: dict[str, Any]) -> None:
        on_map(self, fields)
        pulling.cancel()  # it has its answer, and has not run since

    with monkeypatch.context() as patched:
        patched.setattr(TrainerStream, "on_map", cancelling)
        pulling = asyncio.ensure_future(server.client.pull(pull_request(0, SIZES), Flat().sink))
        with pytest.raises(asyncio.CancelledError):
            await pulling
    assert (await server.client.pull(pull_request(0, SIZES), flat.sink)).code == "OK"
    assert server.client.stream.memory.on
    assert all(torch.equal(flat.values[k], values[k]) for k in SIZES)


@over_shm
async def test_two_pushes_send_their_gradients_if_the_pserver_cannot_map_the_memory_of_both(
    server, monkeypatch
):
    await server.initialise()
    await server.client.pull(pull_request(0, SIZES), Flat().sink)
    region, size = memoryview(Region.create(2 * LAYOUT.vector_bytes)), LAYOUT.vector_bytes

    async def push(lanes: tuple[int, int], free: memoryview) -> int:
        blocks = (
            (PushBlock(block=k, lanes=lanes, count=2), bytes_of(torch.ones(n))) for k, n in SIZES.items()
        )
        moved = server.client.moved(free, stream(*blocks))
        return (await StreamPserver.push(server.client, push_header(0), moved)).applied

    monkeypatch.setattr("trireme_shared.serving.transport.shared_memory.open_offered", unmappable)
    assert await asyncio.gather(push((0, 2), region[:size]), push((2, 4), region[size:])) == [len(SIZES)] * 2
    assert set(versions(server)) == {1}


@over_shm
@pytest.mark.parametrize("way", ["the peer is gone", "a call was given up", "it was closed"])
async def test_a_connection_that_is_over_has_no_memory_of_its_peer_mapped(server, way):
    """At once: a trainer that lives long has had many peers, and the interpreter may find what refers to a
    connection much later."""
    await server.initialise()
    (region,) = {each.name for each in server.pserver.loaded().homes()}
    alone = mapped(region)
    await server.client.pull(pull_request(0, SIZES), Flat().sink)
    used = server.client.stream
    assert mapped(region) == alone + 1
    if way == "the peer is gone":
        used.transport.abort()
    elif way == "a call was given up":
        waiting = asyncio.ensure_future(server.client.pull(pull_request(1, SIZES, wait_s=20), Flat().sink))
        await asyncio.sleep(0.05)
        waiting.cancel()
        await asyncio.wait([waiting])
    else:
        await server.client.close()
    async with asyncio.timeout(5):
        while used.usable:
            await asyncio.sleep(0.01)
    assert mapped(region) == alone, repr(used)


@over_shm
async def test_a_connection_that_ends_right_behind_a_block_takes_no_more_of_the_loop(server):
    """The pserver was not told yet that its block was taken, and no turn will come in which it could be."""
    await server.initialise()
    with pytest.raises(PeerError):
        await server.client.pull(
            pull_request(0, SIZES), Flat().sink, lambda _: server.client.stream.transport.abort()
        )
    before = time.process_time()
    await asyncio.sleep(0.3)
    assert time.process_time() - before < 0.15, (
        "it asks for its turn again and again, as fast as the loop turns"
    )


@over_shm
async def test_parameters_that_are_dropped_leave_no_memory_behind(server):
    """At once, as after each roll-back: it is as large as all blocks of the server."""
    await server.initialise()
    (region,) = {each.name for each in server.pserver.loaded().homes()}
    await server.client.push(push_header(0), gradients(1.0))
    await server.client.close()
    assert mapped(region) == 1
    gc.disable()
    try:
        server.pserver.drop(1)
        async with asyncio.timeout(5):
            while mapped(region):
                await asyncio.sleep(0.01)
    finally:
        gc.enable()


def mapped(region: str) -> int:
    """How often in this process, which has the pserver, too."""
    return sum(f"/memfd:{region} " in line for line in Path("/proc/self/maps").read_text().splitlines())
