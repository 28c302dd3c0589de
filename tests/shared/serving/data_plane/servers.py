"""A pserver on real sockets, with the trainer's client and one that has sockets and a msgpack library
only."""

import asyncio
import io
import socket
from contextlib import asynccontextmanager
from functools import partial

import aiohttp
import msgpack
import pytest_asyncio
import torch

from tests.pserver_service.jobs import JOB, init_header, layout_of, settled, stream, values_of
from trainer_agent.data_plane.stream import StreamPserver
from trireme_shared.blocks.buffers import bytes_of
from trireme_shared.platform.security.access import Access
from trireme_shared.platform.security.tokens import Tokens
from trireme_shared.protocol.records import Mode, PserverMember
from trireme_shared.protocol.records.layout import OptimizerSpec
from trireme_shared.protocol.wire.messages import InitBlock, PushBlock
from trireme_shared.serving.data_plane.row_turns import RowTurns
from trireme_shared.serving.data_plane.server import make_app, serving
from trireme_shared.serving.ports import ServerPorts
from trireme_shared.serving.pserver import Pserver
from trireme_shared.serving.transport.shared_memory import Region, RegionAllocator

TOKEN = "boat"
PLAIN = OptimizerSpec(name="SGD", defaults={"lr": 1.0}, groups=({},))
LAYOUT = layout_of(200_000, block_bytes=1 << 18, optimizer=PLAIN)  # three blocks of 256 KiB and a short one
SIZES = {block.number: block.elements for block in LAYOUT.blocks()}
STALL_S = 1.0  # the server's patience with tests of modules that import this name
PATIENCE_S = 20.0  # with all others: a busy machine is not what they test
TRANSPORTS = ["tcp", "unix", "shm"]


class Sharer(StreamPserver):
    """Payloads are put into a region, as a trainer's gradients are in one."""

    layout = LAYOUT

    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        self.regions = []

    async def push(self, header, blocks):
        region = self.regions.pop() if self.regions else Region.create(self.layout.vector_bytes)
        try:
            return await super().push(header, self.moved(memoryview(region), blocks))
        finally:
            if not region.lost:
                self.regions.append(region)

    async def moved(self, free, blocks):
        async for block, payload in blocks:
            place = free[: len(payload)]
            place[:] = payload
            free = free[-(-len(payload) // 64) * 64 :]
            yield block, place


CONNECT = {
    "tcp": StreamPserver,
    "unix": partial(StreamPserver, share=False),
    "shm": Sharer,
}


def accepting(token: str) -> Access:
    """A service that takes this token only."""
    return Access.of(Tokens(given=token))


class Server:
    """A pserver on a socket, and a client of it."""

    def __init__(self, pserver: Pserver, url: str, uds: str, connect=StreamPserver) -> None:
        self.pserver, self.url = pserver, url
        host = socket.gethostname()
        self.member = PserverMember(index=0, url=url, incarnation="ps-1", host=host, pid=1, uds=uds)
        self.connect = connect
        self.client = connect(self.member, TOKEN, stall_s=20)

    async def initialise(self, layout=LAYOUT, mode=Mode.SYNC, lanes=4):
        values, self.client.layout = values_of(layout), layout
        items = ((InitBlock(block=k), bytes_of(value)) for k, value in values.items())
        await self.client.init(init_header(layout, mode, lanes), stream(*items))
        return values

    async def raw(self, path: str, body=None, token: str = TOKEN, method: str = "POST"):
        """(status, answer) of a plain request; the answer read by the msgpack library."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        data = io.BytesIO(body) if body is not None else None
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, self.url + path, data=data, headers=headers) as answer,
        ):
            return answer.status, list(msgpack.Unpacker(io.BytesIO(await answer.read()), raw=False))

    @asynccontextmanager
    async def any_client(self, token: str = TOKEN):
        """A stream that is opened as docs/mechanisms.md says, by who has sockets and a msgpack library
        only."""
        reader, writer = await asyncio.open_connection("127.0.0.1", int(self.url.rsplit(":", 1)[1]))
        writer.write(
            b"GET /v1/stream HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: "
            b"trireme-frames/1\r\n"
            + f"Trireme-Pserver: {self.member.incarnation}\r\nAuthorization: Bearer {token}\r\n\r\n".encode()
        )
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 101 "), head
            yield AnyClient(reader, writer)
        finally:
            writer.close()


class AnyClient:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self._unpacker = msgpack.Unpacker(raw=False, max_buffer_size=1 << 30)

    def send(self, *frames) -> None:
        """Maps, and blocks as [map, bytes]."""
        self.writer.write(b"".join(map(msgpack.packb, frames)))

    async def next(self, limit_s: float = 20.0):
        """The next map, or block."""
        async with asyncio.timeout(limit_s):
            while True:
                for frame in self._unpacker:
                    return frame
                received = await self.reader.read(1 << 20)
                assert received, "the stream is over"
                self._unpacker.feed(received)

    async def answer(self, call: str, message: dict, *blocks, number: int = 1) -> list:
        """The blocks and the last map that a call is answered with."""
        self.send({"id": number, "call": call, "message": message})
        if call != "pull":
            self.send(
                *([{"id": number, **header}, payload] for header, payload in blocks),
                {"id": number, "end": True},
            )
        found = [await self.next()]
        while isinstance(found[-1], list):
            found.append(await self.next())
        return found


@pytest_asyncio.fixture
async def server(request, tmp_path):
    """Over TCP; `parametrize("server", TRANSPORTS, indirect=True)` for all."""
    transport = getattr(request, "param", "tcp")
    uds = "" if transport == "tcp" else str(tmp_path / "ps.sock")
    connect = CONNECT[transport]
    ports = ServerPorts(RegionAllocator if connect is Sharer else None, row_steps=RowTurns)
    pserver = Pserver(JOB, "ps-1", index=0, ports=ports)
    mark = request.node.get_closest_marker("stall")
    stall_s = mark.args[0] if mark else getattr(request.module, "STALL_S", PATIENCE_S)
    app = make_app(pserver, accepting(TOKEN), stall_s=stall_s, idle_s=2 * stall_s)
    async with serving(app, "127.0.0.1", 0, uds) as listening:
        made = Server(pserver, f"http://127.0.0.1:{listening.port}", listening.uds, connect)
        made.app = app
        async with made.client:
            yield made
    await settled(pserver)


def gradients(value: float = 1.0):
    return stream(
        *(
            (PushBlock(block=k, lanes=(0, 4), count=4), bytes_of(torch.full((n,), value)))
            for k, n in SIZES.items()
        )
    )


class Flat:
    """A second flat vector: where pulled blocks go."""

    def __init__(self) -> None:
        self.values = {number: torch.zeros(elements) for number, elements in SIZES.items()}
        self.placed: list[int] = []

    def sink(self, block):
        return bytes_of(self.values[block.block])

    def done(self, block):
        self.placed.append(block.block)
