"""The trainer's client on real sockets, TCP and UNIX."""

import asyncio
import socket

import pytest
import torch

from tests.pserver_service.jobs import JOB, async_header, init_header, item, pull_request, push_header, stream
from tests.shared.serving.data_plane.servers import LAYOUT, SIZES, TOKEN, TRANSPORTS, Flat, gradients, server
from trainer_agent.data_plane.http import HttpPserver
from trireme_shared.blocks.buffers import bytes_of
from trireme_shared.protocol.errors import (
    CallerError,
    DeadlineExceeded,
    LayoutMismatch,
    NotReady,
    PeerError,
    StaleGeneration,
)
from trireme_shared.protocol.records import Mode, PserverMember
from trireme_shared.protocol.wire.messages import LedgerAnswer, LedgerQuery, PushBlock, TableRequest

__all__ = ["server"]
TABLE = TableRequest(job=JOB, generation=1, version=0, table=0, first=0)
everywhere = pytest.mark.parametrize("server", TRANSPORTS, indirect=True)


@everywhere
async def test_init_push_and_pull_through_the_trainers_client(server):
    values, flat = await server.initialise(), Flat()
    for step in range(3):
        answer = await server.client.push(push_header(step), gradients())
        assert (answer.applied, answer.duplicate, answer.refused) == (4, 0, ())
        end = await server.client.pull(pull_request(step + 1, SIZES), flat.sink, flat.done)
        assert end.code == "OK"
        assert end.record.version == step + 1
    assert flat.placed == list(SIZES) * 3
    assert all(torch.equal(flat.values[k], values[k] - 1 - 1 - 1) for k in SIZES)
    info = await server.client.info()
    assert (info.ready, info.lowest, info.highest, info.blocks, info.bytes) == (True, 3, 3, 4, 800_000)
    connector = server.client.session().connector.__class__.__name__
    assert connector == ("UnixConnector" if server.member.uds else "TCPConnector")
    family = server.client.stream.transport.get_extra_info("socket").family
    assert family is (socket.AF_UNIX if server.member.uds else socket.AF_INET)


@everywhere
async def test_a_pull_during_the_push_gets_blocks_as_they_are_stepped(server):
    values, flat = await server.initialise(), Flat()

    async def slowly():
        for number, elements in SIZES.items():
            yield PushBlock(block=number, lanes=(0, 4), count=4), bytes_of(torch.ones(elements))
            async with asyncio.timeout(5):
                while number not in flat.placed:
                    await asyncio.sleep(0.005)

    answer, end = await asyncio.gather(
        server.client.push(push_header(0), slowly()),
        server.client.pull(pull_request(1, SIZES, wait_s=5), flat.sink, flat.done),
    )
    assert (answer.applied, end.code) == (4, "OK")
    assert all(torch.equal(flat.values[k], values[k] - 1) for k in SIZES)


@everywhere
async def test_asynchronous_training_through_the_trainers_client(server):
    values, flat = await server.initialise(mode=Mode.ASYNC), Flat()
    for _ in range(2):
        await server.client.push(async_header(3, 0, 2, 4), gradients())
    assert await server.client.ledger(LedgerQuery(epoch=0, task_id="3")) == LedgerAnswer(next=2)
    assert (await server.client.pull(pull_request(None, SIZES), flat.sink)).code == "OK"
    assert all(torch.equal(flat.values[k], values[k] - 1) for k in SIZES)
    assert (await server.client.info()).ledger[0].duplicates == 4


@everywhere
async def test_errors_arrive_as_what_they_are(server):
    with pytest.raises(NotReady, match="no parameters yet"):
        await server.client.push(push_header(0), gradients())
    assert (await server.client.pull(pull_request(0, SIZES, generation=0), Flat().sink)).code == "NOT_READY"
    await server.initialise()
    await server.client.push(push_header(0, generation=4), gradients())
    with pytest.raises(StaleGeneration, match="generation 3 is stale") as caught:
        await server.client.push(push_header(1, generation=3), gradients())
    assert caught.value.details == {"generation": 4}
    with pytest.raises(LayoutMismatch, match="job 'other'"):
        await server.client.push(push_header(1, job="other"), gradients())
    with pytest.raises(LayoutMismatch, match="job 'other'"):
        await server.client.pull(pull_request(1, SIZES, job="other"), Flat().sink)
    with pytest.raises(CallerError, match="'evaluate-1' is not in the ledger"):
        await server.client.ledger(LedgerQuery(epoch=0, task_id="evaluate-1"))
    assert (await server.client.info()).lowest == 1


@everywhere
async def test_an_exception_in_the_callers_iterator_comes_out_of_push(server):
    await server.initialise()

    async def failing():
        yield item(0, torch.ones(SIZES[0]))
        raise ZeroDivisionError("backward failed")

    with pytest.raises(ZeroDivisionError, match="backward failed"):
        await server.client.push(push_header(0), failing())
    async with asyncio.timeout(5):
        while (await server.client.info()).highest == 0:
            await asyncio.sleep(0.01)
    assert (await server.client.push(push_header(0), gradients())).duplicate == 1


@everywhere
async def test_a_push_waits_for_its_caller_longer_than_for_the_pserver(server):
    await server.initialise()
    impatient = server.connect(server.member, TOKEN, stall_s=0.15)

    async def slow():
        for number, elements in SIZES.items():
            await asyncio.sleep(0.2)
            yield PushBlock(block=number, lanes=(0, 4), count=4), bytes_of(torch.ones(elements))

    async with impatient:
        assert (await impatient.push(push_header(0), slow())).applied == 4


async def test_a_dead_or_silent_pserver_is_a_peer_error():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        member = PserverMember(index=0, url=url, incarnation="i", host="h", pid=1)
        async with HttpPserver(member, stall_s=0.2) as client:
            with pytest.raises(DeadlineExceeded, match=r"/v1/info .*nothing moved for 0.2 s"):
                await client.info()
            with pytest.raises(DeadlineExceeded, match="/v1/init"):
                await client.init(init_header(LAYOUT), stream())
            with pytest.raises(DeadlineExceeded, match="/v1/table"):
                await client.table(TABLE)
    async with HttpPserver(member, stall_s=5) as client:
        for call in (
            client.info(),
            client.init(init_header(LAYOUT), stream()),
            client.table(TABLE),
        ):
            with pytest.raises(PeerError, match="ClientConnectorError"):
                await call


async def test_a_pserver_that_dies_in_the_middle_of_an_answer_is_a_peer_error():
    async def half(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n\x80\x92\x82\xa5b\r\n")
        await writer.drain()
        writer.transport.abort()

    async with await asyncio.start_server(half, "127.0.0.1", 0) as listening:
        url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        async with HttpPserver(PserverMember(index=0, url=url, incarnation="i", host="h", pid=1)) as client:
            for call in (client.info(), client.table(TABLE)):
                with pytest.raises(PeerError):
                    await call
