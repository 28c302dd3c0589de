"""Where the time of a step goes."""

from __future__ import annotations

import asyncio

import pytest

from tests.equipment.virtual_loop import run_virtually
from trainer_agent.tasks.steps import Times, TimesBuffer
from trireme_shared.protocol.records import StepTimes


def test_a_step_computes_then_waits_for_its_push_then_for_the_others() -> None:
    async def main() -> None:
        times = Times()
        for _ in range(2):
            with times.computing():
                await asyncio.sleep(1.0)
        await asyncio.sleep(0.5)
        times.pushed()
        await asyncio.sleep(0.25)
        with times.computing():  # a lane of another trainer
            await asyncio.sleep(2.0)
        await asyncio.sleep(0.125)
        times.pulled()
        times.pulled()
        assert (times.compute, times.push, times.pull) == pytest.approx((4.0, 0.5, 0.375))

    run_virtually(main)


def test_steps_are_reported_together_and_those_of_an_older_timeline_are_not() -> None:
    buffer = TimesBuffer()
    assert buffer.take() is None
    buffer.add(3, 0, 9.0, Times(1.0, 1.0, 1.0))
    buffer.add(2, 5, 1.0, Times(0.5, 0.25, 0.0))
    buffer.add(3, 5, 1.0, Times(0.5, 0.0, 0.125))
    assert buffer.take() == StepTimes(step=3, timeline=5, seconds=2.0, compute=1.0, push=0.25, pull=0.125)
    assert buffer.take() is None
