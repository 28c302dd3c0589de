"""Retries, in virtual time: bounded, with pauses that grow."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from tests.trainer_agent.virtual_time import virtually
from trainer_agent.waiting import CEILING_S, Backoff, backoff_s, retry
from trireme_shared.platform.runtime import clock
from trireme_shared.protocol.errors import DeadlineExceeded, PeerError, StaleAttempt


def test_peers_are_asked_again_with_growing_pauses_until_they_answer():
    async def main():
        asked = []

        async def call():
            asked.append(clock.monotonic())
            if len(asked) < 5:
                raise PeerError("not yet")
            return "here"

        return await retry(call, "something"), [
            later - earlier for earlier, later in itertools.pairwise(asked)
        ]

    answer, pauses = virtually(main)
    assert answer == "here"
    assert all(low <= pause <= 2 * low for pause, low in zip(pauses, (0.025, 0.05, 0.1, 0.2), strict=True))


def test_retries_end_with_what_was_waited_for_and_the_last_answer():
    async def main():
        async def call():
            raise PeerError("nobody there")

        await retry(call, "an answer from pserver-3", limit_s=60)

    with pytest.raises(
        DeadlineExceeded,
        match=r"gave up after 6\d s: an answer from pserver-3; the last answer: nobody there",
    ):
        virtually(main)


def test_a_callers_error_is_not_repeated():
    async def main():
        async def call():
            raise StaleAttempt("late")

        await retry(call, "anything")

    with pytest.raises(StaleAttempt):
        virtually(main)


def test_progress_starts_the_time_limit_again():
    async def main():
        backoff = Backoff("blocks", limit_s=10)
        for _ in range(30):
            await asyncio.sleep(9)
            await backoff.failed("slow")
            backoff.reset()

    virtually(main)


def test_backing_off_doubles_up_to_a_ceiling():
    assert [backoff_s(n) for n in (1, 2, 3)] == [0.05, 0.1, 0.2]
    assert backoff_s(10_000) == CEILING_S
