"""Buffers that stay as they are travel once, over every transport: the trainer's ParameterServers on real
sockets."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
import torch

from tests.equipment.replaced import replaced
from tests.pserver_service.jobs import init_header, layout_of, push_header, stream, values_of
from tests.shared.serving.data_plane.servers import PLAIN, TRANSPORTS, server
from trainer_agent.data_plane.fleet_client import FleetClient
from trainer_agent.data_plane.pulls import Pulls
from trainer_agent.data_plane.step_exchange import ParameterServers
from trireme_shared.blocks.buffers import bytes_of
from trireme_shared.protocol.errors import BadFrame, PeerError
from trireme_shared.protocol.records import SlotMap
from trireme_shared.protocol.records.layout import Segment
from trireme_shared.protocol.records.step import NodeResult
from trireme_shared.protocol.wire.messages import PulledBlock, PullRequest, PushBlock
from trireme_shared.serving.block_server import BlockServer
from trireme_shared.serving.core import calls
from trireme_shared.serving.core.stores import store_of

__all__ = ["server"]
everywhere = pytest.mark.parametrize("server", TRANSPORTS, indirect=True)
TABLE_ELEMENTS, BLOCK_BYTES, STEPS = 500_000, 1 << 16, 6
LAYOUT = layout_of(
    10_000,
    Segment(kind="buffer", dtype="float32", elements=TABLE_ELEMENTS),
    Segment(kind="buffer", dtype="int64", elements=10),
    block_bytes=BLOCK_BYTES,
    optimizer=PLAIN,
)
SEGMENTS = {block.number: block.segment for block in LAYOUT.blocks()}
SIZES = {block.number: block.elements for block in LAYOUT.blocks()}
PARAMETERS, TABLE, COUNTER = (
    [n for n, segment in SEGMENTS.items() if segment == wanted] for wanted in range(3)
)
OTHER_BYTES = 4 * 10_000 + 8 * 10


class Vectors:
    """The two vectors of a trainer."""

    layout = LAYOUT

    def __init__(self):
        self.values, self.next = (
            {n: bytearray(b.bytes) for n, b in enumerate(LAYOUT.blocks())} for _ in range(2)
        )
        self.kept = []

    def current(self, block):
        return memoryview(self.values[block])

    def staging(self, block):
        return memoryview(self.next[block])

    def keep(self, block):
        self.kept.append(block)
        self.next[block][:] = self.values[block]

    def swap(self):
        self.values, self.next = self.next, self.values


def servers_at(port):
    async def changed(*_):
        await asyncio.sleep(0.01)

    directory = SimpleNamespace(
        keys=SimpleNamespace(job="ctr"),
        master=None,
        pservers={0: SimpleNamespace(incarnation="ps-1")},
        slots=SlotMap(version=1, owners=(0,) * LAYOUT.slot_count),
        state=SimpleNamespace(generation=1),
        revision=1,
        changed=changed,
    )
    vectors = Vectors()
    made = ParameterServers(FleetClient(directory, lambda _: port, LAYOUT, lambda *_: None), vectors)
    made.vectors, made.directory = vectors, directory
    return made


def pushed(changed=()):
    """A gradient of ones, and the values of the buffers that forward changed."""
    for number, elements in SIZES.items():
        if number in PARAMETERS:
            payload = bytes_of(torch.ones(elements))
        else:
            payload = bytes_of(changed[number]) if number in changed else memoryview(b"")
        yield PushBlock(block=number, lanes=(0, 4), count=4), payload


async def step(server, servers, number, changed=()):
    pushing = server.client.push(push_header(number), stream(*pushed(changed)))
    answer, record = await asyncio.gather(pushing, servers.pull(number + 1))
    assert (answer.applied, record.version) == (len(SIZES), number + 1)
    servers.swap()


def held(server):
    return {n: bytes(state.current.view) for n, state in server.pserver.store.blocks.items()}


async def bytes_of_steps(server):
    """Payload bytes that were pulled in each step, after each of which the trainer has the pserver's bits."""
    await server.initialise(LAYOUT)
    servers, found = servers_at(server.client), []
    for number in range(STEPS):
        before = server.pserver.counters.bytes_pulled
        changed = {COUNTER[0]: torch.full((10,), number + 1)}
        if number == 3:
            changed[TABLE[1]] = torch.full((SIZES[TABLE[1]],), 3.0)
        await step(server, servers, number, changed)
        found.append(server.pserver.counters.bytes_pulled - before)
        assert servers.vectors.values == held(server)
    return found


@everywhere
async def test_a_large_constant_is_pulled_once(server):
    whole = OTHER_BYTES + 4 * TABLE_ELEMENTS
    table_block = BLOCK_BYTES
    wanted = [whole, OTHER_BYTES, OTHER_BYTES, OTHER_BYTES + table_block, OTHER_BYTES, OTHER_BYTES]
    found = await bytes_of_steps(server)
    assert found == wanted


@everywhere
async def test_without_names_every_pull_is_whole_and_has_the_same_bits(server):
    with replaced(calls, "moment_of", lambda *_: None):
        assert await bytes_of_steps(server) == [OTHER_BYTES + 4 * TABLE_ELEMENTS] * STEPS


@everywhere
async def test_after_a_rollback_and_after_joining_everything_comes(server):
    await server.initialise(LAYOUT)
    servers, whole = servers_at(server.client), OTHER_BYTES + 4 * TABLE_ELEMENTS
    for number in range(3):
        await step(server, servers, number)
    older = store_of(init_header(LAYOUT), pool=server.pserver.new_pool())
    for number, values in values_of(LAYOUT, seed=1).items():
        older.add_block(number, bytes_of(values))
    older.seal()
    server.pserver.restore(older, 1, "checkpoint")
    before = server.pserver.counters.bytes_pulled
    await servers.pull(0)
    servers.swap()
    assert server.pserver.counters.bytes_pulled - before == whole
    assert servers.vectors.values == held(server)
    await step(server, servers, 0)
    before, late = server.pserver.counters.bytes_pulled, servers_at(server.client)
    await late.pull(1)
    late.swap()
    assert server.pserver.counters.bytes_pulled - before == whole
    assert late.vectors.values == servers.vectors.values == held(server)


async def given_up(server):
    """A step's values come, and the step is given up before they are in use; then it is pulled again."""
    await server.initialise(LAYOUT)
    servers = servers_at(server.client)
    await step(server, servers, 0)
    await server.client.push(push_header(1), stream(*pushed({TABLE[0]: torch.ones(SIZES[TABLE[0]])})))
    await servers.pull(2)  # and no swap
    await servers.pull(2)
    servers.swap()
    return servers.vectors.values == held(server)


async def test_only_values_in_use_are_named(server):
    assert await given_up(server)


async def test_if_staged_values_were_named_old_ones_would_be_kept(server):
    pull = Pulls.pull

    async def named_too_early(self, *arguments, **keywords):
        record, brought = await pull(self, *arguments, **keywords)
        self.use(brought)
        return record, brought

    with replaced(Pulls, "pull", named_too_early):
        assert not await given_up(server)


class Breaks:
    """Breaks off the first pull after `blocks` blocks. Meanwhile `meanwhile` happens."""

    def __init__(self, client, blocks, meanwhile):
        self.client, self.left, self.meanwhile, self.requests = client, blocks, meanwhile, []

    async def pull(self, request, sink, placed):
        self.requests.append(request)
        if self.meanwhile is None:
            return await self.client.pull(request, sink, placed)
        some = request.model_copy(update={"blocks": request.blocks[: self.left]})
        await self.client.pull(some, sink, placed)
        meanwhile, self.meanwhile = self.meanwhile, None
        await meanwhile()
        raise PeerError("the connection broke off")


async def test_a_pull_of_two_connections_is_not_named(server):
    """Between them the pserver may have become another one."""
    await server.initialise(LAYOUT)
    client = server.client

    async def another():
        older = store_of(init_header(LAYOUT))
        for number, values in values_of(LAYOUT, seed=1).items():
            older.add_block(number, bytes_of(values))
        older.seal()
        server.pserver.restore(older, 0, "checkpoint")

    port = Breaks(client, len(PARAMETERS) + 1, another)
    servers = servers_at(port)
    await servers.pull(0)
    servers.swap()
    await servers.pull(0)
    servers.swap()
    assert [request.known for request in port.requests] == ["", "", ""]
    assert servers.vectors.values == held(server)


async def test_another_slot_map_makes_names_void(server):
    await server.initialise(LAYOUT)
    servers = servers_at(server.client)
    await servers.pull(0)
    servers.swap()
    servers.directory.slots = SlotMap(version=2, owners=(0,) * LAYOUT.slot_count)
    await servers.pull(0)
    assert servers.vectors.kept == []


@everywhere
async def test_a_block_is_not_the_same_if_nothing_was_named(server):
    await server.initialise(LAYOUT)
    with (
        replaced(calls, "moment_of", lambda *_: 0),
        pytest.raises(BadFrame, match="as unchanged, but no values were named"),
    ):
        await servers_at(server.client).pull(0)


@pytest.mark.parametrize("server", ["tcp"], indirect=True)
async def test_an_older_parameter_server_sends_everything(server):
    """It knows neither field."""
    await server.initialise(LAYOUT)
    begin = BlockServer.begin_pull

    def unknowing(self, request, arrived):
        fields = request.model_dump()
        del fields["known"]
        return begin(self, PullRequest(**fields), arrived)

    servers = servers_at(server.client)
    with replaced(BlockServer, "begin_pull", unknowing):
        for number in range(2):
            await step(server, servers, number)
    assert servers.vectors.kept == []
    assert servers.vectors.values == held(server)


async def test_the_answer_reads_the_same_with_any_msgpack_library(server):
    await server.initialise(LAYOUT)
    fields = {"protocol": 1, "job": "ctr", "generation": 1, "version": 0, "blocks": [PARAMETERS[0], TABLE[0]]}
    first = await pulled_plainly(server, fields | {"known": ""})
    again = await pulled_plainly(server, fields | {"known": first[-1]["known"]})
    assert [len(payload) for _, payload in first[:-1]] == [40_000, BLOCK_BYTES]
    assert again[1] == [{"block": TABLE[0], "same": True}, b""]
    assert PulledBlock(**again[1][0]).same
    assert "known" not in (await pulled_plainly(server, fields))[-1]


async def pulled_plainly(server, fields):
    async with server.any_client() as client:
        *blocks, end = await client.answer("pull", fields)
    for header, _ in blocks:
        assert header.pop("id") == 1
    return [*blocks, end["message"]]


@everywhere
async def test_gradients_without_payload_count_by_what_the_first_block_says_of_their_lanes(server):
    """Where memory is shared, the first block is applied behind them."""
    layout = layout_of(1 << 16, 1 << 16, block_bytes=1 << 18, optimizer=PLAIN)
    layout = layout.with_fields(sizes=((1 << 16,), (1 << 16,)))
    before = await server.initialise(layout, lanes=1)
    told = NodeResult(records=1, frozen=((1, 2),))
    first = PushBlock(block=0, lanes=(0, 1), count=1, result=told)
    items = (first, bytes_of(torch.ones(1 << 16))), (PushBlock(block=1, lanes=(0, 1), count=1), b"")
    header = push_header(0, lanes=range(1))
    answer = await server.client.push(header, stream(*((each, memoryview(data)) for each, data in items)))
    assert (answer.applied, answer.refused) == (2, ())
    stepped, left = (state.current.tensor for state in server.pserver.store.blocks.values())
    assert not stepped.equal(before[0])
    assert left.equal(before[1])
