"""The thread of a native group: whoever is cancelled while it works hears of it when the thread touches no memory any more."""

from __future__ import annotations

import asyncio
import threading

import pytest

from trainer_agent.collective.native.link import Link
from trainer_agent.collective.native.operation_limit import OperationLimit


async def test_waiting_for_the_thread_ends_with_its_work_and_then_with_the_cancellation():
    link, going_on, done = Link("127.0.0.1", "gloo", 1, OperationLimit()), threading.Event(), threading.Event()

    def work() -> None:
        going_on.wait(5.0)
        done.set()

    async def use() -> None:
        try:
            await link.call(work)
        finally:
            await link.idle()

    using = asyncio.ensure_future(use())
    await asyncio.sleep(0.01)
    using.cancel()
    await asyncio.sleep(0.01)
    using.cancel()
    await asyncio.sleep(0.01)
    assert not using.done()
    going_on.set()
    with pytest.raises(asyncio.CancelledError):
        await using
    assert done.is_set()

    async def ends_with_an_error() -> None:
        try:
            raise ValueError
        finally:
            await link.idle()

    going_on.clear()
    working = asyncio.ensure_future(link.call(work))
    await asyncio.sleep(0.01)
    ending = asyncio.ensure_future(ends_with_an_error())
    await asyncio.sleep(0.01)
    ending.cancel()
    await asyncio.sleep(0.01)
    going_on.set()
    with pytest.raises(asyncio.CancelledError):
        await ending
    await working
    link.close()
