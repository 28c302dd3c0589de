"""The upgraded stream, on both event loops: what is answered, who shares it, and how a connection is
upgraded."""

import asyncio
import socket
from contextlib import suppress

import aiohttp
import pytest
import torch
from aiohttp import web

from tests.pserver_service.jobs import JOB, init_header, item, layout_of, pull_request, push_header, stream
from tests.shared.serving.data_plane.servers import LAYOUT, PLAIN, SIZES, TOKEN, Flat, gradients, server
from tests.shared.serving.data_plane.streams import Raw, all_given_back, growth, over_tcp, streamed, versions
from trainer_agent.data_plane.stream import StreamPserver, fields_of
from trireme_shared.blocks.buffers import bytes_of
from trireme_shared.protocol.errors import (
    DeadlineExceeded,
    Forbidden,
    NotReady,
    PeerError,
    StaleGeneration,
    Unauthorized,
)
from trireme_shared.protocol.records import PserverMember
from trireme_shared.protocol.records.step import NodeResult
from trireme_shared.protocol.wire import codec
from trireme_shared.protocol.wire.messages import PushBlock
from trireme_shared.serving.core.stores import store_of
from trireme_shared.serving.data_plane import stream as server_stream
from trireme_shared.serving.data_plane.server import ARRIVALS, make_app, serving
from trireme_shared.serving.pserver import Pserver
from trireme_shared.serving.transport.stream import FrameStream, upgrade

__all__ = ["server"]


# ---------------------------------------------------------------- calls


def test_nothing_that_a_trainer_says_of_a_block_is_lost_on_the_way() -> None:
    """The header of a block is written without Record.model_dump: what requires a gradient was left out."""
    result = NodeResult(
        loss_sum=1.5,
        records=3,
        skipped=1,
        metrics={"seen": (1.0, 2.0, 0.5, 1.0)},
        frozen=((0, 2),),
        unused=((5, 7),),
        resting=((8, 9),),
    )
    told = PushBlock(
        block=4,
        lanes=(2, 4),
        count=3,
        version=7,
        dtype="bfloat16",
        result=result,
        rows=(1, 2),
        slots=9,
    )
    for record in (result, told):
        assert record.model_fields_set == type(record).model_fields.keys(), "give the new field a value here"
    assert codec.read(PushBlock, codec.decode(codec.encode(fields_of(7, told)))) == told


@streamed
async def test_all_calls_of_a_trainer_share_one_connection(server):
    values, flat = await server.initialise(), Flat()
    for step in range(4):
        answer, end = await asyncio.gather(
            server.client.push(push_header(step), gradients()),
            server.client.pull(pull_request(step + 1, SIZES, wait_s=5), flat.sink, flat.done),
        )
        assert (answer.applied, end.code, end.record.version) == (4, "OK", step + 1)
    assert len(server.app[server_stream.STREAMS].open) == 1
    assert all(torch.equal(flat.values[k], values[k] - 1 - 1 - 1 - 1) for k in SIZES)
    await all_given_back(server)


@streamed
async def test_a_refused_push_leaves_the_stream_to_the_other_calls(server):
    values, flat = await server.initialise(), Flat()
    await server.client.push(push_header(0, generation=5), gradients())
    pulling = asyncio.ensure_future(
        server.client.pull(pull_request(2, SIZES, generation=5, wait_s=10), flat.sink)
    )
    connection = server.client.stream
    for _ in range(3):
        with pytest.raises(StaleGeneration, match="generation 4 is stale"):
            await server.client.push(push_header(1, generation=4), gradients())
    await server.client.push(push_header(1, generation=5), gradients())
    assert (await pulling).code == "OK"
    assert server.client.stream is connection
    assert all(torch.equal(flat.values[k], values[k] - 1 - 1) for k in SIZES)


@streamed
async def test_a_push_that_is_refused_and_cancelled_at_once_leaves_the_stream_to_the_next(server):
    """As when a rollback refuses it and another pserver's death ends the step."""
    await server.initialise()
    await server.client.push(push_header(0, generation=5), gradients())
    connection = server.client.stream

    async def blocks():
        await asyncio.sleep(60)
        yield

    pushing = asyncio.ensure_future(server.client.push(push_header(1, generation=4), blocks()))
    async with asyncio.timeout(5):
        while not connection.calls:
            await asyncio.sleep(0)
    connection.calls[1].answer.add_done_callback(lambda _: pushing.cancel())
    with pytest.raises(asyncio.CancelledError):
        await pushing
    assert (await server.client.push(push_header(1, generation=5), gradients())).applied == 4
    assert server.client.stream is connection
    await all_given_back(server)


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
async def test_pulls_end_with_the_reason_why_nothing_comes(server):
    await server.initialise()
    assert (await server.client.pull(pull_request(1, SIZES, wait_s=0.05), Flat().sink)).code == "TOO_EARLY"
    for step in range(3):
        await server.client.push(push_header(step), gradients())
    assert (await server.client.pull(pull_request(1, SIZES), Flat().sink)).code == "GONE"
    assert (await server.client.pull(pull_request(2, SIZES), Flat().sink)).code == "OK"
    await all_given_back(server)


@streamed
async def test_a_roll_back_ends_pulls_that_wait_refuses_the_rest_of_pushes_and_sends_latecomers_to_join_again(
    server,
):
    values = await server.initialise()
    pserver, store = server.pserver, server.pserver.store
    pulling = asyncio.ensure_future(server.client.pull(pull_request(1, SIZES, wait_s=30), Flat().sink))
    blocks_go_on = asyncio.Event()

    async def interrupted():
        yield item(0, torch.ones(SIZES[0]))
        await blocks_go_on.wait()
        yield item(1, torch.ones(SIZES[1]))

    pushing = asyncio.ensure_future(server.client.push(push_header(0), interrupted()))
    async with asyncio.timeout(5):
        while versions(server)[0] == 0:
            await asyncio.sleep(0.01)
        pserver.drop(4)
        end = await pulling
        assert (end.code, end.message) == ("NOT_READY", "the job is being rolled back")
        blocks_go_on.set()
        answer = await pushing
    assert (answer.applied, [refusal.code for refusal in answer.refused]) == (1, ["STALE_GENERATION"])
    assert store.blocks[1].version == 0
    with pytest.raises(NotReady):
        await server.client.push(push_header(0, generation=4), gradients())
    assert (await server.client.pull(pull_request(0, SIZES, generation=4), Flat().sink)).code == "NOT_READY"
    fresh = store_of(init_header(LAYOUT, lanes=4))
    for number, value in values.items():
        fresh.add_block(number, bytes_of(value))
    fresh.seal()
    pserver.restore(fresh, 4, "checkpoint")
    flat = Flat()
    assert (await server.client.pull(pull_request(0, SIZES, generation=3), flat.sink)).code == "GONE"
    assert (await server.client.pull(pull_request(0, SIZES, generation=4), flat.sink)).code == "OK"
    assert all(torch.equal(flat.values[k], values[k]) for k in SIZES)
    assert store.pool.allocated_bytes - store.pool.free_bytes == sum(b.bytes for b in LAYOUT.blocks()) + (
        1 << 18
    )


@streamed
async def test_two_trainers_push_their_lanes_and_pull_the_same_version(server):
    values, other = await server.initialise(), server.connect(server.member, TOKEN)

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


@pytest.mark.parametrize("server", ["tcp", "shm"], indirect=True)
async def test_a_hundred_steady_steps_allocate_nothing_that_stays(server):
    await server.initialise()
    flat = Flat()
    tensors = {k: torch.ones(n) for k, n in SIZES.items()}

    async def steps(first, last):
        for step in range(first, last):
            blocks = stream(*(item(k, tensor) for k, tensor in tensors.items()))
            await server.client.push(push_header(step), blocks)
            await server.client.pull(pull_request(step + 1, SIZES, wait_s=5), flat.sink)

    pool, traced = await growth(server, steps, 20, 30, 130)
    assert pool == 0
    assert traced < 50_000, "a block is 262,144 bytes"


@over_tcp
async def test_what_a_stream_reads_and_sends_at_once_is_bounded_so_that_others_have_their_turn(
    server, monkeypatch
):
    layout, at_once, most = layout_of(1 << 20, block_bytes=1 << 17, optimizer=PLAIN), {}, []
    monkeypatch.setattr("trireme_shared.serving.transport.stream.BURST_BYTES", 1 << 19)
    await server.initialise(layout)

    def counting(name, size_of):
        method = getattr(FrameStream, name)

        def counted(self, *given):
            at_once[self] = at_once.get(self, 0) + size_of(*given)
            method(self, *given)

        monkeypatch.setattr(FrameStream, name, counted)

    counting("buffer_updated", int)
    counting("send", lambda *parts: sum(map(len, parts)))

    async def turns():
        while True:
            most.append(max(at_once.values(), default=0))
            at_once.clear()
            await asyncio.sleep(0)

    turning = asyncio.ensure_future(turns())
    flat = {block.number: torch.zeros(block.elements) for block in layout.blocks()}
    for step in range(3):
        items = (item(block.number, torch.ones(block.elements)) for block in layout.blocks())
        await asyncio.gather(
            server.client.push(push_header(step), stream(*items)),
            server.client.pull(
                pull_request(step + 1, flat, wait_s=5), lambda block: bytes_of(flat[block.block])
            ),
        )
    turning.cancel()
    assert 1 << 17 < max(most) < (1 << 19) + 3 * (1 << 17), "of 8 MiB each step"


# ---------------------------------------------------------------- upgrading


@over_tcp
async def test_the_upgrade_needs_its_header_and_the_token(server):
    async with (
        aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {TOKEN}", "Trireme-Pserver": "ps-1"}
        ) as session,
        session.get(server.url + "/v1/stream") as answer,
    ):
        assert (answer.status, answer.headers["Upgrade"]) == (426, "trireme-frames/1")
    with pytest.raises(Unauthorized, match="the token was refused"):
        await upgrade(server.url, Raw, "ps-1", token="wrong")
    async with StreamPserver(server.member, "wrong") as stranger:
        with pytest.raises(Unauthorized):
            await stranger.push(push_header(0), gradients())


async def test_a_pserver_that_does_not_upgrade_is_a_peer_error_that_says_so():
    async def refuses(_: web.Request) -> web.Response:
        return web.Response(status=403)

    app = web.Application()
    app[ARRIVALS] = make_app(Pserver(JOB, "ps-1", index=0))[ARRIVALS]
    app.router.add_get("/v1/stream", refuses)
    async with serving(app, "127.0.0.1", 0) as listening:
        member = PserverMember(
            index=0, url=f"http://127.0.0.1:{listening.port}", incarnation="ps-1", host="h", pid=1
        )
        async with StreamPserver(member) as client:
            with pytest.raises(Forbidden, match="role member"):
                await client.pull(pull_request(0, [], generation=0), Flat().sink)
    app = web.Application()
    app[ARRIVALS] = make_app(Pserver(JOB, "ps-1", index=0))[ARRIVALS]
    async with serving(app, "127.0.0.1", 0) as listening:
        member = PserverMember(
            index=0, url=f"http://127.0.0.1:{listening.port}", incarnation="ps-1", host="h", pid=1
        )
        async with StreamPserver(member) as client:
            with pytest.raises(PeerError, match=r"does not upgrade to trireme-frames/1: .*404"):
                await client.pull(pull_request(0, [], generation=0), Flat().sink)


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
    ended = asyncio.Semaphore(0)

    async def mute(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\n\r\n")
        with suppress(ConnectionError):
            await reader.read()
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        ended.release()

    async with await asyncio.start_server(mute, "127.0.0.1", 0) as listening:
        url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        member = PserverMember(index=0, url=url, incarnation="i", host="h", pid=1)
        async with StreamPserver(member, stall_s=0.2) as client:
            with pytest.raises(DeadlineExceeded, match=r"nothing moved on the stream for 0.2 s"):
                await client.push(push_header(0), gradients())
            with pytest.raises(DeadlineExceeded, match=r"nothing moved on the stream for 0.4 s"):
                await client.pull(pull_request(0, SIZES, wait_s=0.2), Flat().sink)
        async with asyncio.timeout(5):
            for _ in range(2):
                await ended.acquire()
