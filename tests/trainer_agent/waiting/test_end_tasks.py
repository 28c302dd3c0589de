"""Tasks that end although they forget that they were cancelled."""

from __future__ import annotations

import asyncio

import pytest

from tests.trainer_agent.virtual_time import virtually
from trainer_agent.waiting import CANCEL_AGAIN_S, end_tasks
from trireme_shared.protocol.errors import PeerError


async def fails_at_the_end():
    try:
        await asyncio.sleep(3600)
    finally:
        raise PeerError("it ended badly")


async def reports_failures():
    """Goes on after a failure, for as long as nobody answers."""
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(fails_at_the_end())
            await asyncio.sleep(3600)
    except* PeerError:
        await asyncio.sleep(3600)


def test_a_task_that_forgets_that_it_was_cancelled_is_cancelled_again():
    async def scenario():
        began = asyncio.get_running_loop().time()
        tasks = [asyncio.create_task(reports_failures()), asyncio.create_task(asyncio.sleep(3600))]
        await asyncio.sleep(1)
        await end_tasks(tasks)
        assert [task.cancelled() for task in tasks] == [True, True]
        return asyncio.get_running_loop().time() - began

    assert virtually(scenario) == pytest.approx(1 + CANCEL_AGAIN_S, abs=0.1)
