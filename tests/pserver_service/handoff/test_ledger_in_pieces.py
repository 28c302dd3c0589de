"""The ledger of an epoch with millions of tasks goes to another parameter server in pieces: a header has a
limit."""

from __future__ import annotations

import asyncio

import pytest

from pserver_service.checkpoints import ledger_text
from pserver_service.handoff.sender import apart
from tests.pserver_service.handoff.test_handoff_client import handed_over
from trireme_shared.blocks.buffers import BufferPool
from trireme_shared.protocol.errors import BadFrame, TooLarge
from trireme_shared.protocol.records.layout import LEDGER
from trireme_shared.protocol.wire import codec
from trireme_shared.protocol.wire.messages import HandedHistory, HandoffAnswer, HandoffHeader, HandoffPart
from trireme_shared.serving.core.ledger import SavedEpoch, SavedLedger, SavedTask
from trireme_shared.serving.core.moving import LEDGER_BYTES, ArrivingBlocks, in_pieces

HEADER = HandoffHeader(job="ctr", generation=3, migration="op-1.1", group=2, source=0, timeline=0, whole=True)
BITS = (1 << 1024) - 1


def ledger_of(tasks: int) -> SavedLedger:
    """So many tasks are closed, but for one in the middle."""
    closed = {chunk: BITS - (chunk == 3) for chunk in range(tasks // 1024)}
    return SavedLedger({0: SavedEpoch((7, 7), {3 * 1024: SavedTask(16, (2, 3))}, closed, 5)})


@pytest.mark.parametrize("tasks", [1 << 14, 20 << 20])
def test_a_ledger_of_any_number_of_tasks_arrives_as_it_was_sent(tasks):
    saved, found = ledger_of(tasks), []

    async def take(header, items):
        arriving = ArrivingBlocks({}, BufferPool())
        async for part, payload in items:
            arriving.take(part, payload)
        text = header.ledger or arriving.ledger_text.decode()
        arriving.complete((), HandedHistory(), ledger_text.from_text(text)[0])
        found.append((arriving.ledger, bool(header.ledger), len(arriving.ledger_text)))
        return HandoffAnswer(have=True)

    header, pieces = apart(HEADER.with_fields(ledger=ledger_text.to_text(saved, [10, 12])))
    assert len(codec.encode(header)) < 2 * LEDGER_BYTES
    assert asyncio.run(handed_over(take, header=header, items=pieces)).have
    assert found == [(saved, tasks < 1 << 20, 0)]


def test_a_header_alone_could_not_have_it():
    text = ledger_text.to_text(ledger_of(20 << 20), [10, 12])
    with pytest.raises(TooLarge):
        codec.decode(codec.encode(HEADER.with_fields(ledger=text)))


def test_each_request_begins_anew_and_none_may_leave_a_piece_out():
    arriving = ArrivingBlocks({}, BufferPool())
    longer, shorter = "a" * (2 * LEDGER_BYTES + 5), "b" * (LEDGER_BYTES + 3)
    for text in (longer, shorter):
        for part, payload in in_pieces(text):
            arriving.take(part, payload)
        assert arriving.ledger_text.decode() == text
    late = HandoffPart(block=LEDGER, dtype="uint8", first=7 * LEDGER_BYTES)
    with pytest.raises(
        BadFrame, match=f"at byte {7 * LEDGER_BYTES}: expected the next one at {len(shorter)}"
    ):
        arriving.take(late, memoryview(b"x"))
    arriving.complete((), HandedHistory(), SavedLedger({}))
    arriving.take(late, memoryview(b"x"))  # a repetition, when it is whole
    assert not arriving.ledger_text
