"""A client that says anything on an upgraded stream, and what is asked of the server afterwards."""

from __future__ import annotations

import asyncio
import tracemalloc
from contextlib import asynccontextmanager

import pytest
import torch

from tests.pserver_service.jobs import push_header, settled
from tests.shared.serving.data_plane.servers import SIZES, TOKEN
from trireme_shared.blocks.buffers import bytes_of
from trireme_shared.protocol.wire import codec
from trireme_shared.serving.transport.stream import FrameStream, upgrade

streamed = pytest.mark.parametrize("server", ["tcp", "unix", "shm"], indirect=True)
over_shm = pytest.mark.parametrize("server", ["shm"], indirect=True)
over_tcp = pytest.mark.parametrize("server", ["tcp"], indirect=True)


class Raw(FrameStream):
    """A client that says anything, and collects what comes."""

    def __init__(self):
        super().__init__(codec.Limits(payload_bytes=1 << 20, blocks=0))
        self.maps, self.over = asyncio.Queue(), asyncio.Event()
        self.blocks = []

    def prepare(self, header):
        return header

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


@asynccontextmanager
async def raw_stream(server):
    raw = await upgrade(server.url, Raw, "ps-1", uds=server.member.uds, token=TOKEN)
    try:
        yield raw
    finally:
        raw.abort()
        async with asyncio.timeout(5):
            while not raw.closed:
                await asyncio.sleep(0.001)


def opening(number=1, step=0, **fields) -> bytes:
    return codec.encode({"id": number, "call": "push", "message": codec.plain(push_header(step, **fields))})


def block(number=1, index=0, size=None, **fields) -> bytes:
    payload = bytes_of(torch.ones(SIZES[index] if size is None else size))
    header = {"id": number, "block": index, "lanes": (0, 4), "count": 4, **fields}
    return codec.encode_block(header, payload.nbytes) + bytes(payload)


def reference(number=1, index=0, at=(0, 0, 0), payload=b"", **fields) -> bytes:
    header = {"id": number, "block": index, "lanes": (0, 4), "count": 4, "at": at, **fields}
    return codec.encode_block(header, len(payload)) + payload


def versions(server):
    return [state.version for state in server.pserver.store.blocks.values()]


async def all_given_back(server):
    """Every buffer beyond the values themselves is free again, every pull is forgotten."""
    await settled(server.pserver)


async def growth(server, steps, warm, settled, last):
    """(bytes of the pool, traced bytes) that `steps(settled, last)` leave behind, after `steps(0, warm)` and
    up to `settled`."""
    await steps(0, warm)
    allocated = server.pserver.store.pool.allocated_bytes
    tracemalloc.start()
    try:
        await steps(warm, settled)
        before, _ = tracemalloc.get_traced_memory()
        await steps(settled, last)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return server.pserver.store.pool.allocated_bytes - allocated, after - before
