"""An event that is set in time, late, or not at all; a wait that is cancelled; notices that get rarer."""

from __future__ import annotations

import asyncio

import pytest

from tests.equipment.virtual_loop import run_virtually
from trireme_shared.platform.runtime import clock
from trireme_shared.platform.runtime.clock import Notices, event_within


def test_an_event_is_waited_for_no_longer_than_the_limit() -> None:
    async def main() -> None:
        event, began = asyncio.Event(), clock.monotonic()
        assert not await event_within(event, 2.0)
        assert clock.monotonic() - began == pytest.approx(2.0, abs=0.01)
        asyncio.get_running_loop().call_later(5.0, event.set)
        assert await event_within(event, 60.0)
        assert clock.monotonic() - began == pytest.approx(7.0, abs=0.01)
        assert await event_within(event, 0.0), "it is set already"
        event.clear()
        asyncio.get_running_loop().call_later(500.0, event.set)
        assert await event_within(event, None)

    run_virtually(main)


def test_a_wait_that_is_cancelled_ends_in_that() -> None:
    async def main() -> None:
        waiting = asyncio.create_task(event_within(asyncio.Event(), None))
        await asyncio.sleep(1.0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    run_virtually(main)


def test_notices_of_what_lasts_come_at_once_then_twice_as_late_and_at_least_every_ten_minutes() -> None:
    notices = Notices()
    told = [second for second in range(4000) if notices.due(float(second))]
    assert told == [0, 10, 30, 70, 150, 310, 630, *range(1230, 4000, 600)]
    assert (notices.over(), notices.over()) == (True, False)
    assert notices.due(4000.0)
