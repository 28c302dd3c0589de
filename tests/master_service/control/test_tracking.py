"""The process beside a leader that feeds trackers: it works while the leader may lead, is started again when
it dies, and ends with it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from master_service.control import tracking as module
from master_service.control.tracking import Tracking, finish
from master_service.core.changes import Event
from tests.equipment.command_lines import command_line
from tests.equipment.replaced import replaced
from tests.equipment.stored_series import store
from tests.master_service.trackers.test_follower import TRACKERS, losses
from trireme_shared.protocol.records import JobSpec
from trireme_shared.protocol.records.datasets import TextLines

LIMIT_S = 30.0
pytestmark = pytest.mark.processes


def spec_in(folder: Path, *trackers: str) -> JobSpec:
    (folder / "mine.py").write_text(TRACKERS)
    return JobSpec(
        job="digits",
        script=str(folder / "s.py"),
        storage=str(folder),
        dataset=TextLines("x"),
        trackers=trackers,
    )


class Leader:
    """`held_s`: for how long it leads, whenever it is asked."""

    def __init__(self, folder: Path, *trackers: str) -> None:
        self.folder, self.held_s, self.events = folder, 60.0, list[Event]()
        self.result: dict[str, str] | None = None
        self.tracking = Tracking(
            spec_in(folder, *trackers),
            permitted_s=lambda: self.held_s,
            result=lambda: self.result,
            tell=self.events.extend,
            find_folder=self.script_folder,
        )

    async def script_folder(self) -> Path:
        return self.folder

    @asynccontextmanager
    async def leading(self) -> AsyncIterator[None]:
        running = asyncio.ensure_future(self.tracking.run())
        try:
            yield
        finally:
            running.cancel()
            await asyncio.wait([running])
        assert not followers(), "a process is left"


def followers() -> list[psutil.Process]:
    children = psutil.Process().children()
    return [child for child in children if "master_service.trackers" in command_line(child)]


async def until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not done():
            await asyncio.sleep(0.02)


async def test_a_process_that_is_killed_is_followed_by_another_which_tells_each_step_once(
    tmp_path: Path,
) -> None:
    await store(tmp_path, range(4))
    leader = Leader(tmp_path, "csv")
    with replaced(module, "FIRST_PAUSE_S", 0.05):
        async with leader.leading():
            await until(lambda: losses(tmp_path) == list(range(4)))
            os.kill(followers()[0].pid, signal.SIGKILL)
            await store(tmp_path, range(4, 9), 2)
            await until(lambda: losses(tmp_path) == list(range(9)))
    assert [event.name for event in leader.events] == ["tracker_late"]
    assert "ended with -9" in leader.events[0].message


async def test_without_its_lease_a_leader_permits_nothing(tmp_path: Path) -> None:
    """Another one may lead by then, and tell the same steps."""
    await store(tmp_path, range(4))
    leader = Leader(tmp_path, "csv")
    leader.held_s = 0.0
    async with leader.leading():
        await until(lambda: leader.tracking.heard >= 2)
        assert not (tmp_path / "trackers").exists()
        leader.held_s = 60.0
        await until(lambda: losses(tmp_path) == list(range(4)))


async def test_neither_a_leader_that_leaves_nor_an_ended_job_waits_for_a_tracker_that_hangs(
    tmp_path: Path,
) -> None:
    await store(tmp_path, range(4))
    leader = Leader(tmp_path, "mine:Hanging", "csv")
    async with asyncio.timeout(LIMIT_S), leader.leading():
        await until(lambda: losses(tmp_path) == list(range(4)))
    ended = leader.tracking.spec, {"phase": "COMPLETED"}
    late = await finish(*ended, 2.0, leader.events.extend, leader.script_folder)
    assert len(late) == 1
    (tmp_path / "well").touch()
    assert await finish(*ended, LIMIT_S, leader.events.extend, leader.script_folder) == {}
    assert (tmp_path / "hanging").read_text().split() == [str(step) for step in range(4)]
