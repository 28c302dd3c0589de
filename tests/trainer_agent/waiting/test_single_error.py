"""One error out of a TaskGroup."""

from __future__ import annotations

import asyncio

import pytest

from shared.collective.group import Broken
from shared.errors import Gone, PeerError, StaleGeneration, UserCodeError
from trainer_agent.waiting.single_error import SingleErrorGroup, single_error


@pytest.mark.parametrize(
    ("errors", "raised"),
    [
        ([PeerError("a"), Gone("b")], Gone),
        ([Gone("a"), UserCodeError("b")], UserCodeError),
        ([PeerError("a"), StaleGeneration("b")], StaleGeneration),
        ([UserCodeError("a"), ZeroDivisionError("a bug")], ZeroDivisionError),
        ([PeerError("a"), ExceptionGroup("inner", [PeerError("b"), Gone("c")])], Gone),
    ],
)
def test_the_most_serious_error_of_a_group_is_raised(errors, raised):
    with pytest.raises(raised), single_error():
        raise ExceptionGroup("several", errors)


@pytest.mark.parametrize("kind", [PeerError, Broken, ZeroDivisionError])
@pytest.mark.parametrize("own_code_fails", [False, True])
async def test_who_is_cancelled_while_a_task_fails_ends(kind, own_code_fails):
    """Of both, asyncio's own group raises the error: a loop that tries again after it would go on for ever."""
    begun, tries = asyncio.Event(), 0

    async def fails_when_cancelled() -> None:
        begun.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            if not own_code_fails:
                raise kind("the peer was gone in this moment") from None
            task.cancel()  # while the group, whose own code has failed, waits for this one
            await asyncio.sleep(0.01)

    async def tries_again() -> None:
        nonlocal tries
        while tries < 3:
            tries += 1
            begun.clear()
            try:
                async with SingleErrorGroup() as group:
                    group.create_task(fails_when_cancelled())
                    if own_code_fails:
                        await begun.wait()
                        raise kind("the peer was gone")
            except kind:
                continue

    task = asyncio.create_task(tries_again())
    await begun.wait()
    if not own_code_fails:
        task.cancel()
    await asyncio.wait([task], timeout=5)
    assert task.cancelled()
    assert tries == 1


async def test_an_error_of_a_task_is_raised_where_nobody_cancels():
    async def fails() -> None:
        raise PeerError("gone")

    with pytest.raises(PeerError):
        async with SingleErrorGroup() as group:
            group.create_task(fails())
            await asyncio.sleep(60)


async def test_an_error_of_a_task_is_raised_where_the_group_waits_at_its_end():
    """There asyncio cancels whoever waits, and (until Python 3.13) does not take it back."""

    async def fails() -> None:
        await asyncio.sleep(0)
        raise PeerError("gone")

    task = asyncio.current_task()
    assert task is not None
    for _ in range(2):
        with pytest.raises(PeerError):
            async with SingleErrorGroup() as group:
                group.create_task(fails())
                group.create_task(asyncio.sleep(60))
        assert task.cancelling() == 0
    await asyncio.sleep(0)
