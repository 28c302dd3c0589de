"""A pserver on real sockets, with the trainer's client and a plain one."""

import asyncio
import io
import socket

import aiohttp
import msgpack
import pytest_asyncio
import torch

from pserver_service.app import make_app, serving
from pserver_service.core.buffers import bytes_of
from pserver_service.service import Pserver
from shared.messages import InitBlock, PushBlock
from shared.records import Mode, PserverMember
from shared.slots import OptimizerSpec
from tests.pserver.jobs import (
    JOB,
    check_invariants,
    init_header,
    layout_of,
    stream,
    values_of,
)
from trainer_agent.pservers import HttpPserver
from trainer_agent.stream import StreamPserver

TOKEN = "boat"
PLAIN = OptimizerSpec(name="SGD", defaults={"lr": 1.0}, groups=({},))
LAYOUT = layout_of(200_000, block_bytes=1 << 18, optimizer=PLAIN)  # three blocks of 256 KiB and a short one
SIZES = {block.number: block.elements for block in LAYOUT.blocks()}
STALL_S = 1.5
TRANSPORTS = ["tcp", "unix", "stream tcp", "stream unix"]


class Server:
    """A pserver on a socket, and a client of it."""

    def __init__(self, pserver: Pserver, url: str, uds: str, connect=HttpPserver) -> None:
        self.pserver, self.url = pserver, url
        host = socket.gethostname()
        self.member = PserverMember(index=0, url=url, incarnation="ps-1", host=host, pid=1, uds=uds)
        self.connect = connect
        self.client = connect(self.member, TOKEN, stall_s=20)

    async def initialise(self, layout=LAYOUT, mode=Mode.SYNC, lanes=4):
        values = values_of(layout)
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


@pytest_asyncio.fixture
async def server(request, tmp_path):
    """Plain requests over TCP; `parametrize("server", TRANSPORTS, indirect=True)` for all."""
    transport = getattr(request, "param", "tcp")
    uds = str(tmp_path / "ps.sock") if "unix" in transport else ""
    connect = StreamPserver if "stream" in transport else HttpPserver
    pserver = Pserver(JOB, "ps-1", index=0)
    app = make_app(pserver, token=TOKEN, stall_s=STALL_S, idle_s=2 * STALL_S)
    async with serving(app, "127.0.0.1", 0, uds) as listening:
        made = Server(pserver, f"http://127.0.0.1:{listening.port}", listening.uds, connect)
        made.app = app
        async with made.client:
            yield made
        async with asyncio.timeout(5):
            while pserver._waiting:
                await asyncio.sleep(0.01)
    check_invariants(pserver)


def gradients(value: float = 1.0):
    return stream(
        *((PushBlock(block=k, lanes=(0, 4), count=4), bytes_of(torch.full((n,), value))) for k, n in SIZES.items())
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
