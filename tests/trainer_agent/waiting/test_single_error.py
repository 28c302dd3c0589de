"""One error out of a TaskGroup."""

from __future__ import annotations

import asyncio
import gc
import weakref
from contextlib import suppress

import pytest

from trainer_agent.waiting import SingleErrorGroup, most_serious
from trireme_shared.collective.group import Broken
from trireme_shared.protocol.errors import Gone, PeerError, StaleGeneration, UserCodeError


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
    assert type(most_serious(ExceptionGroup("several", errors))) is raised


@pytest.mark.parametrize("kind", [PeerError, Broken, ZeroDivisionError])
@pytest.mark.parametrize("own_code_fails", [False, True])
async def test_who_is_cancelled_while_a_task_fails_ends(kind, own_code_fails):
    """Of both, asyncio's own group raises the error: a loop that tries again after it would go on for
    ever."""
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


class Held:
    """What a frame refers to: memory, or a socket."""


async def fails(kind: type[Exception], held: list[weakref.ref]) -> None:
    own = Held()
    held.append(weakref.ref(own))
    raise kind("it failed")


@pytest.mark.parametrize("kinds", [[PeerError], [PeerError, Gone]])
@pytest.mark.parametrize("own_code_fails", [False, True])
@pytest.mark.parametrize("nested", [False, True])
async def test_what_the_frames_of_an_error_hold_is_free_when_it_is_handled(kinds, own_code_fails, nested):
    """Without looking for circles, which Python does when there are many objects."""
    held: list[weakref.ref] = []

    async def one() -> None:
        own = Held()
        held.append(weakref.ref(own))
        async with SingleErrorGroup() as group:
            for kind in kinds:
                group.create_task(fails(kind, held))
            if own_code_fails:
                raise Gone("its own code fails")

    async def outer() -> None:
        async with SingleErrorGroup() as group:
            group.create_task(one())

    gc.disable()
    try:
        with suppress(PeerError, Gone):
            await (outer() if nested else one())
        await asyncio.sleep(0)
        assert held
        assert [each() for each in held] == [None] * len(held)
    finally:
        gc.enable()


async def test_the_other_errors_are_the_cause_unless_it_has_one():
    error, other = Gone("a"), PeerError("b")
    assert most_serious(ExceptionGroup("one", [error])).__cause__ is None
    cause = most_serious(ExceptionGroup("both", [error, other])).__cause__
    assert isinstance(cause, ExceptionGroup)
    assert cause.exceptions == (other,)
    error = UserCodeError("c")
    error.__cause__ = ZeroDivisionError("in the user's code")
    assert repr(most_serious(ExceptionGroup("both", [error, other])).__cause__) == repr(error.__cause__)
