"""The trainer's ports, straight into a master and parameter servers of the same event loop: no network, no
delays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from master_service.leadership.master import Master
from tests.equipment.cluster.lookups import lookup
from trireme_shared.protocol.errors import NotFound, PeerError
from trireme_shared.protocol.wire.messages import LookupEnd, PullEnd
from trireme_shared.serving.data_plane.lookups import found_end, portion
from trireme_shared.serving.pserver import Pserver


class DirectMaster:
    """trainer_agent.tasks.master.MasterPort; `away`: it does not answer."""

    def __init__(self, master: Master) -> None:
        self._master = master
        self.away = False

    async def report_failure(self, member_id, failure):
        """As HttpMaster: a trainer that is not registered shows by a key that it belongs to the job."""
        try:
            await self._master.report_failure(member_id, failure)
        except NotFound:
            lease = await self._master.etcd.grant(30.0)
            await self._master.etcd.put(self._master.keys.starting(member_id), b"failed", lease.id)
            await self._master.report_failure(member_id, failure)

    def __getattr__(self, name):
        async def call(*arguments):
            if self.away:
                raise PeerError("the master is away")
            return await getattr(self._master, name)(*arguments)

        return call


class DirectPserver:
    """trainer_agent.data_plane.http.PserverPort; payloads of pushes are copied."""

    def __init__(self, pserver: Pserver) -> None:
        self._pserver = pserver

    async def init(self, header, blocks):
        await self._pserver.init(header, self._copied(blocks))

    async def push(self, header, blocks):
        return await self._pserver.push(header, self._copied(blocks))

    async def pull(self, request, sink, placed=None):
        async with aclosing(self._pserver.pull(request)) as items:
            async for item in items:
                if isinstance(item, PullEnd):
                    return item
                block, payload = item
                sink(block)[:] = payload
                if placed is not None:
                    placed(block)
        raise AssertionError("a pull ended without PullEnd")

    async def lookup(self, request, ids):
        found = await lookup(self._pserver, request, memoryview(bytes(ids)))
        return (found, memoryview(b"")) if isinstance(found, LookupEnd) else (found_end(self._pserver), found)

    async def table(self, request):
        end, payload = portion(self._pserver, request)
        return end, memoryview(bytes(payload))

    async def info(self):
        return await self._pserver.info()

    async def ledger(self, query):
        return await self._pserver.ledger(query)

    @staticmethod
    async def _copied(blocks) -> AsyncIterator[Any]:
        async for item, payload in blocks:
            await asyncio.sleep(0)
            yield item, bytearray(payload)
