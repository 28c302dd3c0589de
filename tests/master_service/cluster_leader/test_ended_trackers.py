"""Jobs that have ended: their trackers get the end, also if the leader that saw it died. With the process
that feeds them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from master_service.cluster import ended_jobs as module
from master_service.cluster.ended_jobs import EndedTrackers
from master_service.core.changes import Event
from master_service.storage.job_storage import FileStorage
from tests.equipment.replaced import replaced
from tests.equipment.stored_series import store
from tests.master_service.control.test_tracking import followers, spec_in
from tests.master_service.trackers.test_follower import losses, noted
from trireme_shared.platform.runtime import clock
from trireme_shared.protocol.records import JobState, Phase
from trireme_shared.protocol.records.cluster import ClusterJob, Standing

pytestmark = pytest.mark.processes


class Leader:
    """Of a cluster with one job, which it does not lead."""

    storage = FileStorage

    def __init__(self, folder: Path, *trackers: str, wanted: Any = "run", leads: bool = False) -> None:
        spec = spec_in(folder, *trackers)
        (folder / "s.py").touch()
        job = ClusterJob(
            job="digits", spec=spec, standing=Standing.COMPLETED, reason="trained", wanted=wanted
        )
        self.state: Any = SimpleNamespace(jobs={"digits": job})
        self._leads, self.events = leads, list[Event]()

    def leads(self, name: str) -> bool:
        return self._leads

    def permitted_s(self) -> float:
        return 60.0

    async def state_of(self, name: str) -> JobState:
        return JobState(phase=Phase.COMPLETED)

    async def until(self, done: Any) -> None:
        """The limit grows, so that a tracker has time to start on a busy machine, too."""
        began = clock.monotonic()
        with (
            replaced(module, "LOOK_S", 0.02),
            replaced(module, "LIMIT_S", 1.5),
            replaced(module, "AGAIN_S", 0.05),
        ):
            running = asyncio.ensure_future(EndedTrackers(self, self.events.extend).run())
            try:
                async with asyncio.timeout(60.0):
                    while not done():
                        module.LIMIT_S = max(1.5, clock.monotonic() - began)
                        await asyncio.sleep(0.02)
            finally:
                running.cancel()
                await asyncio.wait([running])


async def test_the_next_leader_tells_trackers_the_end_of_a_job_once(tmp_path: Path) -> None:
    await store(tmp_path, range(5))
    await Leader(tmp_path, "csv").until((tmp_path / "trackers" / "ended.json").exists)
    assert losses(tmp_path) == list(range(5))
    attempt = json.loads((tmp_path / "trackers" / "run.json").read_text())["attempt"]
    looks: list[int] = []
    await Leader(tmp_path, "csv").until(lambda: looks.append(len(followers())) or len(looks) > 20)
    assert (attempt, max(looks)) == (1, 0)  # nobody is asked again


async def test_one_that_does_not_answer_is_tried_again_later(tmp_path: Path) -> None:
    await store(tmp_path, range(5))
    leader = Leader(tmp_path, "mine:Hanging", "csv")

    def mended() -> bool:
        if losses(tmp_path) and json.loads((tmp_path / "trackers" / "run.json").read_text())["attempt"] > 1:
            (tmp_path / "well").touch()
        return (tmp_path / "trackers" / "ended.json").exists()

    await leader.until(mended)
    assert noted(tmp_path, "hanging") == losses(tmp_path) == list(range(5))


@pytest.mark.parametrize("reason", [{"wanted": "delete"}, {"leads": True}])
async def test_a_job_that_is_deleted_or_still_led_is_left_alone(
    tmp_path: Path, reason: dict[str, Any]
) -> None:
    looks: list[int] = []
    await Leader(tmp_path, "csv", **reason).until(lambda: looks.append(len(followers())) or len(looks) > 10)
    assert (max(looks), (tmp_path / "trackers").exists()) == (0, False)


async def test_a_storage_that_raises_anything_ends_only_the_turn_of_its_job(tmp_path: Path) -> None:
    class LibraryError(Exception):
        """Neither an OSError nor one of ours."""

    leader, tries = Leader(tmp_path, "csv"), list[int]()

    def storage(spec: Any) -> FileStorage:
        tries.append(1)
        raise LibraryError("surprise")

    leader.storage = storage  # type: ignore[method-assign, assignment]
    await leader.until(lambda: len(tries) == module.ATTEMPTS)
    assert [event.name for event in leader.events] == ["tracker_given_up"]
    assert "LibraryError: surprise" in leader.events[0].message
