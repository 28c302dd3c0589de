"""What a trainer knows of its own speed, and tells the master also while others compute all its lanes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from tests.trainer_agent.virtual_time import virtually
from trainer_agent.loops.lane_pusher import ENOUGH, FRESH_S, Pace
from trainer_agent.tasks.activity import Activity, LanePace
from trainer_agent.tasks.reports import PACE_EVERY_S, Reports
from trireme_shared.protocol.records import MetricBatch


async def lanes(pace: Pace, *seconds: float) -> None:
    for each in seconds:
        with pace.lane(counts=True):
            await asyncio.sleep(each)


async def empty_lanes(pace: Pace, *seconds: float) -> None:
    for each in seconds:
        with pace.lane(counts=False):
            await asyncio.sleep(each)


def test_it_is_the_median_and_not_known_at_first():
    async def main():
        pace = Pace()
        await lanes(pace, *[1.0] * (ENOUGH - 1))
        assert pace.lane_s is None
        await lanes(pace, 9.0, 1.0)
        assert pace.lane_s == 1.0

    virtually(main)


def test_a_lane_without_records_says_only_what_a_lane_takes_at_least():
    async def main():
        pace = Pace()
        await lanes(pace, 1.0, 1.0, 1.0)
        assert pace.least_lane_s is None
        await empty_lanes(pace, *[0.25] * 20)
        assert (pace.lane_s, pace.least_lane_s) == (1.0, 0.25)
        with pace.lane(counts=False):
            await asyncio.sleep(7.0)
            assert (pace.lane_s, pace.least_lane_s) == (7.0, 7.0), "as soon as it takes longer"
        await asyncio.sleep(FRESH_S + 1)
        assert (pace.lane_s, pace.least_lane_s) == (None, None)

    virtually(main)


def test_lanes_given_up_before_any_was_computed_are_no_measure():
    async def main():
        pace = Pace()
        for _ in range(ENOUGH):
            with pytest.raises(asyncio.CancelledError), pace.lane(counts=True):
                await asyncio.sleep(0.5)
                raise asyncio.CancelledError
        assert (pace.lane_s, pace.least_lane_s) == (None, 0.5)

    virtually(main)

    virtually(main)


def test_a_lane_under_way_counts_as_soon_as_it_takes_longer_than_usual():
    async def main():
        pace = Pace()
        await lanes(pace, 1.0, 1.0, 1.0)
        with pace.lane(counts=True):
            await asyncio.sleep(5.0)
            assert pace.lane_s == 5.0

    virtually(main)


def test_a_lane_that_was_given_up_would_have_taken_at_least_the_usual_time():
    async def main():
        pace = Pace()
        await lanes(pace, 1.0, 1.0, 1.0)
        for _ in range(16):
            with pytest.raises(asyncio.CancelledError), pace.lane(counts=True):
                raise asyncio.CancelledError
        assert pace.lane_s == 1.0

    virtually(main)


def test_what_was_measured_long_ago_is_not_known_any_more():
    async def main():
        pace = Pace()
        await lanes(pace, 1.0, 1.0, 1.0)
        await asyncio.sleep(FRESH_S + 1)
        assert pace.lane_s is None

    virtually(main)


def test_a_slow_trainer_reports_its_speed_without_any_step():
    async def main():
        batches: list[MetricBatch] = []

        class Master:
            async def report_metrics(self, batch):
                batches.append(batch)

        loop = SimpleNamespace(lane_pace=LanePace(), waits_for="")
        reports = Reports(Master(), "t", Activity(training=loop))
        running = asyncio.create_task(reports.run())
        await asyncio.sleep(2 * PACE_EVERY_S)
        assert not batches
        loop.lane_pace = LanePace(1.0)
        await asyncio.sleep(1.0)
        assert [batch.lane_s for batch in batches] == [1.0]
        loop.lane_pace = LanePace(5.0)
        await asyncio.sleep(1.0)
        assert [batch.lane_s for batch in batches] == [1.0, 5.0], "a change is told at once"
        await asyncio.sleep(2 * PACE_EVERY_S)
        assert 3 <= len(batches) <= 5, "and the same now and then"
        assert {batch.steps for batch in batches} == {()}
        batches.clear()
        loop.lane_pace = LanePace(None, 5.0)
        await asyncio.sleep(1.0)
        assert [(batch.lane_s, batch.least_lane_s) for batch in batches] == [(None, 5.0)]
        running.cancel()

    virtually(main)
