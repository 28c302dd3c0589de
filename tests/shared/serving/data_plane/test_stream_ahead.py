"""References are read ahead of the work they mean, and blocks wait where they lie: what is heard meanwhile,
and where that ends."""

import asyncio
from contextlib import suppress

import pytest
import torch

from tests.pserver_service.jobs import pull_request, push_header
from tests.shared.serving.data_plane.servers import LAYOUT, SIZES, server
from tests.shared.serving.data_plane.streams import (
    all_given_back,
    opening,
    over_shm,
    raw_stream,
    reference,
    versions,
)
from trireme_shared.blocks.buffers import bytes_of
from trireme_shared.protocol.errors import PeerError
from trireme_shared.protocol.wire import codec
from trireme_shared.protocol.wire.messages import PushBlock
from trireme_shared.serving.core.calls import OpenPush
from trireme_shared.serving.data_plane.stream import PserverStream
from trireme_shared.serving.transport.shared_memory import Region

__all__ = ["server"]


async def all_referred(raw) -> Region:
    """A region that the server knows: a gradient of ones for every block."""
    region = Region.create(LAYOUT.vector_bytes)
    torch.frombuffer(region, dtype=torch.float32).fill_(1.0)
    raw.send_map({"id": 1, "call": "share", "message": {"offers": [region.offer(0).model_dump()]}})
    assert (await raw.next())["end"]
    return region


ALL = b"".join(reference(index=index, at=(0, 0, 4 * elements)) for index, elements in SIZES.items())


@over_shm
async def test_what_is_said_behind_references_is_heard_before_they_are_applied(server):
    await server.initialise()
    async with raw_stream(server) as raw:
        region = await all_referred(raw)
        pull = codec.encode({"id": 2, "call": "pull", "message": codec.plain(pull_request(0, ()))})
        raw.send(opening() + ALL + codec.encode({"id": 1, "end": True}) + pull)
        assert [(await raw.next())["id"] for _ in range(2)] == [2, 1]
    assert versions(server) == [1, 1, 1, 1]
    await all_given_back(server)
    del region


@over_shm
@pytest.mark.parametrize(
    "last", [reference(at=(7, 0, 64)), codec.encode({"id": 1, "end": True}) + reference()]
)
async def test_nothing_that_was_read_ahead_is_applied_once_the_stream_is_over(server, last):
    await server.initialise()
    async with raw_stream(server) as raw:
        region = await all_referred(raw)
        raw.send(opening() + ALL + last)
        assert (await raw.next())["error"]["code"] == "BAD_FRAME"
        await all_given_back(server)
    assert versions(server) == [0, 0, 0, 0]
    del region


@over_shm
async def test_references_are_read_ahead_up_to_a_limit(server, monkeypatch):
    await server.initialise()
    ahead, later = [], PserverStream.apply_later

    def noted(self, *arguments):
        later(self, *arguments)
        ahead.append(len(self._ahead))

    monkeypatch.setattr(PserverStream, "apply_later", noted)
    monkeypatch.setattr("trireme_shared.serving.data_plane.stream.MAX_AHEAD", 2)
    async with raw_stream(server) as raw:
        region = await all_referred(raw)
        raw.send(opening() + ALL + codec.encode({"id": 1, "end": True}))
        assert (await raw.next())["message"]["applied"] == 4
    assert ahead == [1, 2, 2, 2]
    await all_given_back(server)
    del region


@over_shm
async def test_an_apply_that_breaks_ends_the_stream_at_once(server, monkeypatch):
    """A bug of ours there: nobody waits for an answer that never comes."""
    await server.initialise()
    told = []

    def breaks(*_):
        raise RuntimeError("a bug")

    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["exception"]))
    monkeypatch.setattr(OpenPush, "apply", breaks)
    async with raw_stream(server) as raw:
        region = await all_referred(raw)
        raw.send(opening() + ALL)
        async with asyncio.timeout(5):
            await raw.over.wait()
    assert [str(error) for error in told] == ["a bug"]
    await all_given_back(server)
    del region


@over_shm
async def test_however_many_streams_there_are_one_block_is_applied_in_a_turn_of_the_event_loop(
    server, monkeypatch
):
    await server.initialise()
    turn, applied_in = 0, []

    def noted(self, *arguments):
        applied_in.append(turn)
        return apply(self, *arguments)

    apply = OpenPush.apply
    monkeypatch.setattr(OpenPush, "apply", noted)
    async with raw_stream(server) as one, raw_stream(server) as other:
        regions = [await all_referred(raw) for raw in (one, other)]
        running = True

        async def counts():
            nonlocal turn
            while running:
                turn += 1
                await asyncio.sleep(0)

        counting = asyncio.ensure_future(counts())
        for raw in (one, other):
            raw.send(opening() + ALL + codec.encode({"id": 1, "end": True}))
        for raw in (one, other):
            assert (await raw.next())["end"]
        running = False
        await counting
    assert len(applied_in) == len(set(applied_in)) == 2 * len(SIZES)
    await all_given_back(server)
    del regions


@over_shm
@pytest.mark.parametrize("ends", [True, False])
async def test_a_block_that_waits_is_copied_when_its_push_ends_or_its_connection(server, ends):
    """Then the trainer may write there again."""
    await server.initialise()

    async def half():
        yield PushBlock(block=0, lanes=(0, 2), count=2), bytes_of(torch.ones(SIZES[0]))
        await asyncio.sleep(0 if ends else 30)

    pushing = asyncio.ensure_future(server.client.push(push_header(0, (0, 1)), half()))
    tree = server.pserver.store.blocks[0].tree
    async with asyncio.timeout(5):
        while not tree.nodes:
            await asyncio.sleep(0.001)
        (node,) = tree.nodes.values()
        assert node.lent, "it is not copied at once"
        if not ends:
            await server.client.stream.close()
        with suppress(PeerError):
            assert (await pushing).applied == 1
        while node.lent:
            await asyncio.sleep(0.001)
    for region in server.client.regions:
        region[:] = bytes(len(region))
    assert len(server.client.regions) == ends
    assert torch.equal(node.value, torch.ones(SIZES[0]))
