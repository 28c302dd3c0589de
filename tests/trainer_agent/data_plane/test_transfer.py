"""Pushes that are tried again, while whatever sent the last one is still about to hear of its end."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from shared.errors import PeerError
from shared.records import Mode
from shared.wire.messages import PushAnswer, PushBlock, PushHeader
from trainer_agent.data_plane.outbox import Outbox
from trainer_agent.data_plane.transfer import Transfer
from trainer_agent.data_plane.verdicts import Verdict

HEADER = PushHeader(job="j", term=0, generation=1, mode=Mode.SYNC, trainer="t", step=0)


class Port:
    """Fails once, while a task of its own still waits for the second block: as aiohttp's writer does."""

    def __init__(self):
        self.writers = []
        self.calls = []

    async def push(self, _, blocks):
        found = [await anext(blocks)]
        self.calls.append(found)
        if not self.writers:
            self.writers.append(asyncio.create_task(anext(blocks)))
            await asyncio.sleep(0)
            raise PeerError("it is gone")
        found += [each async for each in blocks]
        return PushAnswer(applied=len(found), duplicate=0, refused=(), generation=1)


async def test_a_push_that_failed_while_its_sender_waits_for_a_block_is_tried_again():
    async def changed(*_):
        pass

    member = SimpleNamespace(incarnation="ps-0")
    directory = SimpleNamespace(pservers={0: member}, state=SimpleNamespace(generation=1), revision=1, changed=changed)
    compute = SimpleNamespace(layout=SimpleNamespace(payloads=lambda _: {}))
    port, outbox, suspected = Port(), Outbox(), []
    transfer = Transfer(directory, lambda _: port, compute, lambda *what: suspected.append(what))
    outbox.add(PushBlock(block=0, lanes=(0, 1), count=1), memoryview(b"1234"))
    async with asyncio.timeout(10):
        pushing = asyncio.create_task(transfer.push(0, HEADER, outbox))
        while len(port.calls) < 2:
            await asyncio.sleep(0.01)
        outbox.add(PushBlock(block=1, lanes=(0, 1), count=1), memoryview(b"5678"))
        outbox.close()
        assert await pushing is Verdict.ACKNOWLEDGED
        late = await asyncio.gather(*port.writers)
    assert [item.block for item, _ in port.calls[1]] == [0, 1]
    assert [item.block for item, _ in late] == [1]
    assert suspected == [("ps-0", "it is gone")]
