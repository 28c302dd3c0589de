"""A region that comes after memory was shared is offered with what is lent of it, and not before."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

from trireme_shared.serving.transport.shared_memory import (
    PAGE_BYTES,
    Borrower,
    Lender,
    Offers,
    Region,
    ServerMemory,
)


def test_an_answer_to_a_peers_offer_names_no_region_that_the_peer_was_not_told_of():
    answers: Any = None
    server = ServerMemory(os.getpid, answers)
    at_first = server.share(Offers(), [], PAGE_BYTES)
    assert at_first == Offers()

    later, theirs = Region.create(PAGE_BYTES), Region.create(PAGE_BYTES)
    assert server.share(Lender().offers((theirs,)), [later], PAGE_BYTES) == Offers()

    buffer: Any = SimpleNamespace(home=(later, 0), view=memoryview(bytearray(8)), release=lambda: None)
    offers, place = server.lend(1, buffer) or (Offers(), (0, 0, 0))
    borrower = Borrower(os.getpid())
    borrower.learn(offers, PAGE_BYTES)
    assert borrower.payload(place, 0).nbytes == 8
