"""Errors that end nothing but themselves, pauses that stay finite, and waits that somebody else cancels."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise

import pytest

from tests.equipment.virtual_loop import run_virtually
from trireme_shared.platform.runtime import clock
from trireme_shared.platform.runtime.containment import (
    LONGEST_PAUSE_S,
    Containment,
    Failed,
    Failures,
    Interrupted,
    LongLivedGroup,
    backoff_s,
)
from trireme_shared.protocol.errors import Conflict, NotLeader, leaves


class LibraryError(Exception):
    """Neither an OSError nor one of ours."""


def interrupt() -> None:
    raise asyncio.CancelledError  # as a wait does that somebody else has cancelled


def raising(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


ERRORS = {
    "ours": raising(Conflict("not now")),
    "of the system": raising(OSError("no route")),
    "of a library": raising(LibraryError("surprise")),
    "overflow": raising(OverflowError("too large")),
    "exit": raising(SystemExit(3)),
    "interrupted": interrupt,
}


@pytest.mark.parametrize("name", ERRORS)
def test_work_is_done_again_after_any_error_and_each_is_told_once(name: str) -> None:
    begun, told = list[float](), list[str]()

    async def work() -> None:
        begun.append(clock.monotonic())
        if len(begun) < 4:
            ERRORS[name]()

    async def main() -> None:
        await Containment((NotLeader,), told.append).keep(work, "counting sheep")

    run_virtually(main)
    assert len(begun) == 4
    pauses = [later - before for before, later in pairwise(begun)]
    assert pauses[0] < pauses[2], "each pause is longer than the one before"
    assert len(told) == 1
    assert told[0].startswith("counting sheep failed, and is tried again: ")


@pytest.mark.parametrize("within_a_group", [False, True])
def test_an_error_by_which_the_term_ends_is_raised(within_a_group: bool) -> None:
    async def work() -> None:
        if not within_a_group:
            raise NotLeader("another one leads")
        raise ExceptionGroup("both", [NotLeader("another one leads"), LibraryError("meanwhile")])

    async def main() -> list[BaseException]:
        try:
            await Containment((NotLeader,)).keep(work, "leading")
        except ExceptionGroup as group:
            return list(leaves(group))
        except NotLeader as error:
            return [error]
        return []

    assert [type(each) for each in run_virtually(main)] == [NotLeader]


def test_a_task_that_is_asked_to_end_ends() -> None:
    async def main() -> bool:
        running = asyncio.ensure_future(Containment().keep(asyncio.Event().wait, "waiting"))  # type: ignore[arg-type]
        await asyncio.sleep(1)
        running.cancel()
        await asyncio.wait([running])
        return running.cancelled()

    assert run_virtually(main)


def test_one_attempt_answers_with_what_it_gives_or_with_its_error() -> None:
    async def work(good: bool) -> int:
        if not good:
            raise LibraryError("surprise")
        return 7

    async def main() -> tuple[object, object]:
        contained = Containment()
        return (
            await contained.once(lambda: work(good=True), "counting"),
            await contained.once(lambda: work(good=False), "counting"),
        )

    assert run_virtually(main) == (7, Failed("LibraryError: surprise"))


def test_a_group_ends_when_what_one_of_its_tasks_waits_for_is_cancelled_by_somebody_else() -> None:
    """asyncio's own groups go on without that task, and nobody learns of it."""

    async def main() -> list[BaseException]:
        shared: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def wait() -> None:
            await shared

        async def last() -> None:
            await asyncio.Event().wait()

        async def cancel() -> None:
            shared.cancel()

        try:
            async with LongLivedGroup() as group:
                for work in (last(), wait(), cancel()):
                    group.create_task(work)
        except ExceptionGroup as errors:
            return list(leaves(errors))
        return []

    async def main_within_limit() -> list[BaseException]:
        async with asyncio.timeout(60):
            return await main()

    assert [type(each) for each in run_virtually(main_within_limit)] == [Interrupted]


@pytest.mark.parametrize("failures", [1, 2, 10, 1024, 1025, 10**9])
def test_pauses_stay_finite_however_often_something_has_failed(failures: int) -> None:
    assert backoff_s(failures, 0.1, 3.0) == min(0.1 * 2.0 ** min(failures - 1, 9), 3.0)


def test_a_failure_after_a_long_calm_is_the_first_again() -> None:
    async def main() -> tuple[int, int]:
        failures = Failures()
        for _ in range(2000):
            failures.add(0.5, LONGEST_PAUSE_S)
        many = failures.count
        await asyncio.sleep(1000)
        failures.add(0.5, LONGEST_PAUSE_S)
        return many, failures.count

    assert run_virtually(main) == (2000, 1)


@pytest.mark.filterwarnings("error")
def test_a_task_that_is_cancelled_before_it_begins_leaves_nothing() -> None:
    async def wait() -> None:
        await asyncio.Event().wait()

    async def main() -> bool:
        async with LongLivedGroup() as group:
            task = group.create_task(wait())
            task.cancel()
        return task.cancelled()

    assert run_virtually(main)
