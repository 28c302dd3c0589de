"""The upgraded stream, on both event loops: what is answered, what ends it, who is slow, and what is given back."""

import asyncio
import socket
import tracemalloc

import aiohttp
import pytest
import torch
from aiohttp import web

from pserver_service.app import make_app, serving
from pserver_service.core.buffers import bytes_of
from pserver_service.routes import data
from pserver_service.service import Pserver
from shared import wire
from shared.errors import BadFrame, DeadlineExceeded, PeerError, StaleGeneration, Unauthorized
from shared.records import PserverMember
from shared.stream import FrameStream
from shared.upgrade import UpgradeRefused, upgrade
from tests.pserver.jobs import JOB, check_invariants, item, layout_of, pull_request, push_header, stream
from tests.pserver.servers import PLAIN, SIZES, STALL_S, TOKEN, Flat, gradients, server
from trainer_agent.stream import StreamPserver

__all__ = ["server"]
streamed = pytest.mark.parametrize("server", ["stream tcp", "stream unix"], indirect=True)
over_tcp = pytest.mark.parametrize("server", ["stream tcp"], indirect=True)


class Raw(FrameStream):
    """A client that says anything, and collects what comes."""

    def __init__(self):
        super().__init__(wire.Limits(payload_bytes=1 << 20, blocks=0))
        self.maps, self.over = asyncio.Queue(), asyncio.Event()
        self.blocks = []

    def place(self, header, size):
        self.blocks.append(header)
        return memoryview(bytearray(size))

    def on_map(self, fields):
        self.maps.put_nowait(fields)

    def on_block(self, payload):
        pass

    def on_over(self, error):
        self.over.set()

    async def next(self, limit_s=5):
        async with asyncio.timeout(limit_s):
            return await self.maps.get()


async def raw_stream(server) -> Raw:
    return await upgrade(server.url, Raw, uds=server.member.uds, token=TOKEN)


def opening(number=1, step=0, **fields) -> bytes:
    return wire.encode({"id": number, "call": "push", "message": wire.plain(push_header(step, **fields))})


def block(number=1, index=0, size=None, **fields) -> bytes:
    payload = bytes_of(torch.ones(SIZES[index] if size is None else size))
    header = {"id": number, "block": index, "lanes": (0, 4), "count": 4, **fields}
    return wire.encode_block(header, payload.nbytes) + bytes(payload)


def versions(server):
    return [state.version for state in server.pserver.store.blocks.values()]


async def all_given_back(server):
    """Every buffer beyond the values themselves is free again, every pull is forgotten."""
    store = server.pserver.store
    held = {id(buffer) for state in store.blocks.values() for buffer in (state.current, state.previous) if buffer}
    used = sum(b.view.nbytes for s in store.blocks.values() for b in (s.current, s.previous) if b and id(b) in held)
    async with asyncio.timeout(5):
        while store.pool.allocated_bytes - store.pool.free_bytes != used or server.pserver._waiting:
            await asyncio.sleep(0.01)
    check_invariants(server.pserver)


# ---------------------------------------------------------------- calls


@streamed
async def test_all_calls_of_a_trainer_share_one_connection(server):
    values, flat = await server.initialise(), Flat()
    for step in range(4):
        answer, end = await asyncio.gather(
            server.client.push(push_header(step), gradients()),
            server.client.pull(pull_request(step + 1, SIZES, wait_s=5), flat.sink, flat.done),
        )
        assert (answer.applied, end.code, end.record.version) == (4, "OK", step + 1)
    assert len(server.app[data.STREAMS].open) == 1
    assert all(torch.equal(flat.values[k], values[k] - 1 - 1 - 1 - 1) for k in SIZES)
    await all_given_back(server)


@streamed
async def test_a_refused_push_leaves_the_stream_to_the_other_calls(server):
    values, flat = await server.initialise(), Flat()
    await server.client.push(push_header(0, generation=5), gradients())
    pulling = asyncio.ensure_future(server.client.pull(pull_request(2, SIZES, generation=5, wait_s=10), flat.sink))
    connection = server.client._stream
    for _ in range(3):
        with pytest.raises(StaleGeneration, match="generation 4 is stale"):
            await server.client.push(push_header(1, generation=4), gradients())
    await server.client.push(push_header(1, generation=5), gradients())
    assert (await pulling).code == "OK"
    assert server.client._stream is connection
    assert all(torch.equal(flat.values[k], values[k] - 1 - 1) for k in SIZES)


@streamed
async def test_a_generation_that_ends_during_a_push_refuses_the_rest_of_its_blocks(server):
    await server.initialise()

    async def overtaken():
        yield item(0, torch.ones(SIZES[0]))
        while versions(server)[0] == 0:
            await asyncio.sleep(0.01)
        server.pserver.generation = 7
        yield item(1, torch.ones(SIZES[1]))

    answer = await server.client.push(push_header(0), overtaken())
    assert (answer.applied, [refusal.code for refusal in answer.refused]) == (1, ["STALE_GENERATION"])
    assert versions(server) == [1, 0, 0, 0]


@streamed
async def test_pulls_end_as_they_do_in_plain_requests(server):
    await server.initialise()
    assert (await server.client.pull(pull_request(1, SIZES, wait_s=0.05), Flat().sink)).code == "TOO_EARLY"
    for step in range(3):
        await server.client.push(push_header(step), gradients())
    assert (await server.client.pull(pull_request(1, SIZES), Flat().sink)).code == "GONE"
    assert (await server.client.pull(pull_request(2, SIZES), Flat().sink)).code == "OK"
    await all_given_back(server)


@streamed
async def test_two_trainers_push_their_lanes_and_pull_the_same_version(server):
    values, other = await server.initialise(), StreamPserver(server.member, TOKEN)

    async def train(client, lanes):
        flat = Flat()
        for step in range(5):
            blocks = stream(*(item(k, torch.ones(n), lanes=lanes, count=2) for k, n in SIZES.items()))
            answer, end = await asyncio.gather(
                client.push(push_header(step, range(*lanes)), blocks),
                client.pull(pull_request(step + 1, SIZES, wait_s=10), flat.sink),
            )
            assert (answer.applied, end.code) == (4, "OK")
        return flat.values

    async with other:
        found = await asyncio.gather(train(server.client, (0, 2)), train(other, (2, 4)))
    for pulled in found:
        assert all(torch.equal(pulled[k], values[k] - 1 - 1 - 1 - 1 - 1) for k in SIZES)
    await all_given_back(server)


@over_tcp
async def test_steady_steps_allocate_nothing_that_stays(server):
    await server.initialise()
    flat = Flat()
    tensors = {k: torch.ones(n) for k, n in SIZES.items()}

    async def steps(first, last):
        for step in range(first, last):
            blocks = stream(*(item(k, tensor) for k, tensor in tensors.items()))
            await server.client.push(push_header(step), blocks)
            await server.client.pull(pull_request(step + 1, SIZES, wait_s=5), flat.sink)

    await steps(0, 20)
    allocated = server.pserver.store.pool.allocated_bytes
    tracemalloc.start()
    try:
        await steps(20, 30)
        before, _ = tracemalloc.get_traced_memory()
        await steps(30, 80)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert server.pserver.store.pool.allocated_bytes == allocated
    assert after - before < 50_000, "a block is 262,144 bytes"


# ---------------------------------------------------------------- what ends a stream

BAD = [
    (b"GET / HTTP/1.1\r\n\r\n", "BAD_FRAME"),
    (b"\xc1", "BAD_FRAME"),
    (wire.encode({"call": "push"}), "BAD_FRAME"),
    (wire.encode({"id": 1, "call": "dance", "message": {}}), "BAD_FRAME"),
    (wire.encode({"id": 1, "call": "push", "message": {"step": "x"}}), "BAD_FRAME"),
    (wire.encode({"id": 1, "call": "pull", "message": {"blocks": "x"}}), "BAD_FRAME"),
    (wire.encode({"id": 1, "end": True}), "BAD_FRAME"),
    (block(9), "BAD_FRAME"),
    (opening(1) + opening(1), "BAD_FRAME"),
    (opening(1) + block(1, index=0, block="x"), "BAD_FRAME"),
    (opening(1) + wire.encode_block({"id": 1, "block": 0, "count": 1}, (1 << 18) + 1), "TOO_LARGE"),
    (opening(1) + b"\x92\x80\xc6\xff\xff\xff\xff", "BAD_FRAME"),
    (opening(1) + block(1, index=0, size=1) * 33, "TOO_LARGE"),
    (wire.encode({"id": 1, "x": "y" * (17 << 20)}), "TOO_LARGE"),
    (b"".join(opening(number) for number in range(65)), "TOO_LARGE"),
    (wire.encode({"id": -1, "call": "push", "message": {}}), "BAD_FRAME"),
]


@over_tcp
@pytest.mark.parametrize(("sent", "code"), BAD)
async def test_a_malformed_frame_changes_no_block_and_ends_the_stream_with_its_reason(server, sent, code):
    await server.initialise()
    raw = await raw_stream(server)
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
    raw = await raw_stream(server)
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
    raw = await raw_stream(server)
    body = opening() + block(1, 0)
    raw.send(body[:-cut] if cut else body)
    found = await raw.next(limit_s=10)
    assert found["error"]["code"] == "DEADLINE_EXCEEDED"
    what = "no byte of a frame came for 1.5 s" if cut else "no block of a push came for 3 s"
    assert what in found["error"]["message"]
    await all_given_back(server)
    assert versions(server) == [0 if cut else 1, 0, 0, 0]


@over_tcp
async def test_a_puller_that_does_not_read_is_cut_off_and_blocks_nobody(server):
    layout = layout_of(16_000_000, block_bytes=1 << 20, optimizer=PLAIN)
    await server.initialise(layout)
    raw = await raw_stream(server)
    raw._transport.pause_reading()
    raw.send_map({"id": 1, "call": "pull", "message": wire.plain(pull_request(0, range(62)))})
    async with asyncio.timeout(STALL_S):
        while not server.pserver._waiting:
            await asyncio.sleep(0.01)
        await server.client.push(push_header(0), stream(*(item(k, torch.ones(1 << 18)) for k in range(61))))
    await all_given_back(server)
    raw.abort()


@streamed
async def test_a_cancelled_call_gives_everything_back_and_the_next_one_connects_again(server):
    values, flat = await server.initialise(), Flat()
    pulling = asyncio.ensure_future(server.client.pull(pull_request(1, SIZES, wait_s=30), flat.sink))
    async with asyncio.timeout(5):
        while not server.pserver._waiting:
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
        while not server.pserver._waiting:
            await asyncio.sleep(0.01)
        await data.close_streams(server.app)
        with pytest.raises(PeerError, match=r"closed the stream|broke off"):
            await pulling


# ---------------------------------------------------------------- upgrading


@over_tcp
async def test_the_upgrade_needs_its_header_and_the_token(server):
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session,
        session.get(server.url + "/v1/stream") as answer,
    ):
        assert (answer.status, answer.headers["Upgrade"]) == (426, "trireme-frames/1")
    with pytest.raises(UpgradeRefused, match="401"):
        await upgrade(server.url, Raw, token="wrong")
    async with StreamPserver(server.member, "wrong") as stranger:
        with pytest.raises(Unauthorized):
            await stranger.push(push_header(0), gradients())


async def test_a_pserver_that_does_not_upgrade_is_asked_in_plain_requests():
    pserver = Pserver(JOB, "ps-1", index=0)
    app = web.Application()
    modern = make_app(pserver)
    for key in (data.PSERVER, data.PATIENCE):
        app[key] = modern[key]
    app.add_routes(route for route in data.routes if route.path != "/v1/stream")
    async with serving(app, "127.0.0.1", 0) as listening:
        member = PserverMember(index=0, url=f"http://127.0.0.1:{listening.port}", incarnation="i", host="h", pid=1)
        async with StreamPserver(member) as client:
            end = await client.pull(pull_request(0, [], generation=0), Flat().sink)
            assert (end.code, client._refused) == ("NOT_READY", True)


async def test_a_dead_or_silent_pserver_is_a_peer_error():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        member = PserverMember(index=0, url=url, incarnation="i", host="h", pid=1)
        async with StreamPserver(member, stall_s=0.2) as client:
            with pytest.raises(DeadlineExceeded, match=r"did not answer within 0.2 s"):
                await client.push(push_header(0), gradients())
    async with StreamPserver(member) as client:
        with pytest.raises(PeerError, match="ConnectionRefusedError"):
            await client.pull(pull_request(0, SIZES), Flat().sink)


async def test_a_pserver_that_says_nothing_after_the_upgrade_is_given_up():
    async def mute(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\n\r\n")
        await reader.read()
        writer.close()

    async with await asyncio.start_server(mute, "127.0.0.1", 0) as listening:
        url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        member = PserverMember(index=0, url=url, incarnation="i", host="h", pid=1)
        async with StreamPserver(member, stall_s=0.2) as client:
            with pytest.raises(DeadlineExceeded, match=r"nothing moved on the stream for 0.2 s"):
                await client.push(push_header(0), gradients())
            with pytest.raises(DeadlineExceeded, match=r"nothing moved on the stream for 0.4 s"):
                await client.pull(pull_request(0, SIZES, wait_s=0.2), Flat().sink)
