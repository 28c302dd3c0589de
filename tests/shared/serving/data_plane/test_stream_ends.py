"""What ends an upgraded stream, on both event loops: what is malformed, silent, cut or slow; and what is
given back."""

import asyncio
import math

import pytest
import torch

from tests.pserver_service.jobs import item, layout_of, pull_request, push_header, stream
from tests.shared.serving.data_plane.servers import PLAIN, SIZES, STALL_S, Flat, gradients, server
from tests.shared.serving.data_plane.streams import (
    all_given_back,
    block,
    opening,
    over_tcp,
    raw_stream,
    streamed,
    versions,
)
from trireme_shared.protocol.errors import BadFrame, PeerError
from trireme_shared.protocol.wire import codec
from trireme_shared.serving.data_plane import stream as server_stream

__all__ = ["server"]

LONG_S = (
    3 * STALL_S
)  # where something has to happen before the server's patience ends: a virtual machine may halt for a second


def pulling(**fields):
    return codec.encode({"id": 1, "call": "pull", "message": codec.plain(pull_request(1, [0])) | fields})


BAD = [
    (b"GET / HTTP/1.1\r\n\r\n", "BAD_FRAME"),
    (b"\xc1", "BAD_FRAME"),
    (codec.encode({"call": "push"}), "BAD_FRAME"),
    (codec.encode({"id": 1, "call": "dance", "message": {}}), "BAD_FRAME"),
    (codec.encode({"id": 1, "call": "push", "message": {"step": "x"}}), "BAD_FRAME"),
    (codec.encode({"id": 1, "call": "pull", "message": {"blocks": "x"}}), "BAD_FRAME"),
    (pulling(wait_s=math.nan), "BAD_FRAME"),
    (codec.encode({"id": 1, "end": True}), "BAD_FRAME"),
    (block(9), "BAD_FRAME"),
    (opening(1) + opening(1), "BAD_FRAME"),
    (opening(1) + block(1, index=0, block="x"), "BAD_FRAME"),
    (opening(1) + codec.encode_block({"id": 1, "block": 0, "count": 1}, (1 << 18) + 1), "TOO_LARGE"),
    (opening(1) + b"\x92\x80\xc6\xff\xff\xff\xff", "BAD_FRAME"),
    (opening(1) + block(1, index=0, size=1) * 33, "TOO_LARGE"),
    (codec.encode({"id": 1, "x": "y" * (17 << 20)}), "TOO_LARGE"),
    (b"".join(opening(number) for number in range(65)), "TOO_LARGE"),
    (codec.encode({"id": -1, "call": "push", "message": {}}), "BAD_FRAME"),
]


@over_tcp
@pytest.mark.parametrize(("sent", "code"), BAD)
async def test_a_malformed_frame_changes_no_block_and_ends_the_stream_with_its_reason(server, sent, code):
    await server.initialise()
    async with raw_stream(server) as raw:
        raw.send(sent)
        found = await raw.next()
        assert found["error"]["code"] == code, found
        assert "id" not in found
        async with asyncio.timeout(5):
            await raw.over.wait()
        assert versions(server) == [0, 0, 0, 0]
        await all_given_back(server)


@streamed
async def test_a_stream_cut_inside_a_block_keeps_whole_blocks_and_nothing_else(server):
    values = await server.initialise()
    async with raw_stream(server) as raw:
        raw.send(opening() + block(1, 0) + block(1, 1)[:-1000])
        async with asyncio.timeout(5):
            while versions(server)[0] == 0:
                await asyncio.sleep(0.01)
        raw.abort()
        await all_given_back(server)
        assert versions(server) == [1, 0, 0, 0]
        assert torch.equal(server.pserver.store.blocks[1].current.tensor, values[1])
        assert (await server.client.push(push_header(0), gradients())).duplicate == 1


@over_tcp
@pytest.mark.parametrize("cut", [1000, 0])
async def test_a_silent_pusher_is_told_and_cut_off(server, cut):
    """Inside a block after the stall limit, between blocks after the idle limit (twice as long here)."""
    await server.initialise()
    async with raw_stream(server) as raw:
        body = opening() + block(1, 0)
        raw.send(body[:-cut] if cut else body)
        found = await raw.next(limit_s=10)
        assert found["error"]["code"] == "DEADLINE_EXCEEDED"
        what = "no byte of a frame came for 1 s" if cut else "no block of a push came for 2 s"
        assert what in found["error"]["message"]
        await all_given_back(server)
        assert versions(server) == [0 if cut else 1, 0, 0, 0]


@over_tcp
@pytest.mark.stall(LONG_S)
async def test_a_puller_that_does_not_read_is_cut_off_and_blocks_nobody(server):
    layout = layout_of(4_000_000, block_bytes=1 << 20, optimizer=PLAIN)
    await server.initialise(layout)
    async with raw_stream(server) as raw:
        raw.transport.pause_reading()
        raw.send_map({"id": 1, "call": "pull", "message": codec.plain(pull_request(0, range(16)))})
        async with asyncio.timeout(LONG_S):  # before it is cut off
            while not server.pserver.pulls:
                await asyncio.sleep(0.01)
            await server.client.push(
                push_header(0), stream(*(item(k, torch.ones(1 << 18)) for k in range(15)))
            )
        await all_given_back(server)
        raw.abort()


@streamed
async def test_a_cancelled_call_gives_everything_back_and_the_next_one_connects_again(server):
    values, flat = await server.initialise(), Flat()
    pulling = asyncio.ensure_future(server.client.pull(pull_request(1, SIZES, wait_s=30), flat.sink))
    async with asyncio.timeout(5):
        while not server.pserver.pulls:
            await asyncio.sleep(0.01)
    pulling.cancel()
    await all_given_back(server)
    await server.client.push(push_header(0), gradients())
    await server.client.pull(pull_request(1, SIZES), flat.sink)
    assert all(torch.equal(flat.values[k], values[k] - 1) for k in SIZES)


@streamed
async def test_an_exception_of_the_callers_sink_comes_out_of_pull(server):
    await server.initialise()

    def broken(_):
        raise ZeroDivisionError("no place")

    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="no place"):
            await server.client.pull(pull_request(0, SIZES), broken)
        with pytest.raises(BadFrame, match="whose place has 4"):
            await server.client.pull(pull_request(0, SIZES), lambda _: memoryview(bytearray(4)))
    assert (await server.client.pull(pull_request(0, SIZES), Flat().sink)).code == "OK"


@streamed
async def test_a_pserver_that_stops_ends_the_calls_in_flight(server):
    await server.initialise()
    pulling = asyncio.ensure_future(server.client.pull(pull_request(1, SIZES, wait_s=30), Flat().sink))
    async with asyncio.timeout(5):
        while not server.pserver.pulls:
            await asyncio.sleep(0.01)
        await server_stream.close_streams(server.app)
        with pytest.raises(PeerError, match=r"closed the stream|broke off"):
            await pulling
