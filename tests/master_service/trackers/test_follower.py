"""Trackers that raise, hang or come late harm no other, and get all that is stored."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from master_service.trackers import follower
from master_service.trackers.assignment import Assignment, News
from master_service.trackers.follower import Follower
from tests.equipment.replaced import replaced
from tests.equipment.stored_series import store
from trireme_shared.protocol.records.job_choices import Tracker as Wanted

LIMIT_S = 20.0
RESULT = {"phase": "COMPLETED"}
TRACKERS = """
import os
from pathlib import Path
from time import sleep

HERE = Path(__file__).parent


def note(name, points):
    with (HERE / name).open("a") as file:
        file.writelines(f"{point.step}\\n" for point in points if point.name == "loss")


class Raising:
    def begin(self, run):
        self.run = run

    def log(self, points):
        if not (HERE / "well").exists():
            password = os.environ["MLFLOW_TRACKING_PASSWORD"]
            raise ConnectionError(f"http://me:hunter2@host refuses the key {password}")
        note("raising", points)


class Hanging:
    def log(self, points):
        while not (HERE / "well").exists():
            sleep(0.01)
        note("hanging", points)
"""


@pytest.fixture(autouse=True)
def impatient() -> Iterator[None]:
    with replaced(follower, "FIRST_PAUSE_S", 0.02), replaced(follower, "LATE_S", 2.0):
        yield


class Following:
    """Until `stop`, in this thread."""

    def __init__(self, folder: Path, *kinds: str) -> None:
        (folder / "mine.py").write_text(TRACKERS)
        trackers = tuple(Wanted(kind=kind) for kind in kinds)
        self.news: list[News] = []
        self._woken = threading.Event()
        assignment = Assignment(
            job="digits",
            storage=str(folder),
            trackers=trackers,
            parameters={"epochs": "2"},
            beside=str(folder),
        )
        self.follower = Follower(assignment, self.news.append, self._woken.set)

    def until(self, done: Callable[[], bool], result: dict[str, str] | None = None) -> None:
        deadline = follower.clock.monotonic() + LIMIT_S
        while not done():
            assert follower.clock.monotonic() < deadline, self.news
            self._woken.wait(0.02)
            self._woken.clear()
            self.follower.look(result)

    def states(self, tracker: str) -> list[str]:
        return [news.state for news in self.news if news.tracker == tracker]


def losses(folder: Path) -> list[int]:
    file = folder / "metrics" / "metrics.csv"
    rows = csv.DictReader(io.StringIO(file.read_text() if file.exists() else ""))
    return [int(row["step"]) for row in rows if row["metric"] == "loss"]


def noted(folder: Path, name: str) -> list[int]:
    return (
        [int(line) for line in (folder / name).read_text().splitlines()] if (folder / name).exists() else []
    )


def test_one_that_raises_is_told_once_without_credentials_and_gets_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "correct horse")
    asyncio.run(store(tmp_path, range(6)))
    job = Following(tmp_path, "mine:Raising", "csv")
    job.until(lambda: job.states("mine:Raising") == ["late"])
    assert (job.news[0].behind, job.news[0].cause) == (
        6,
        "ConnectionError: http://***@host refuses the key ***",
    )
    job.until(lambda: losses(tmp_path) == list(range(6)))
    asyncio.run(store(tmp_path, range(6, 9), 2))
    (tmp_path / "well").touch()
    job.until(lambda: job.follower.ended, RESULT)
    assert noted(tmp_path, "raising") == losses(tmp_path) == list(range(9))
    assert job.states("mine:Raising") == ["late", "well", "ended"]
    assert (tmp_path / "trackers" / "ended.json").exists()


def test_one_that_hangs_holds_up_no_other(tmp_path: Path) -> None:
    asyncio.run(store(tmp_path, range(6)))
    job = Following(tmp_path, "mine:Hanging", "csv")
    job.until(lambda: job.states("csv") == ["ended"] and job.states("mine:Hanging") == ["late"], RESULT)
    assert losses(tmp_path) == list(range(6))
    assert "its call has lasted for" in next(news.cause for news in job.news if news.state == "late")
    assert (noted(tmp_path, "hanging"), job.follower.ended) == ([], False)
    (tmp_path / "well").touch()
    job.until(lambda: job.follower.ended, RESULT)
    assert noted(tmp_path, "hanging") == list(range(6))


def test_the_next_process_goes_on_with_the_same_run(tmp_path: Path) -> None:
    (tmp_path / "well").touch()
    for term, steps in ((1, range(4)), (2, range(2, 8))):  # the second master trained two steps again
        asyncio.run(store(tmp_path, steps, term))
        job = Following(tmp_path, "csv", "mine:Raising")  # the one before is left as a death leaves it
        last = steps[-1] + 1
        job.until(lambda: losses(tmp_path) == noted(tmp_path, "raising") == list(range(last)))  # noqa: B023
    run = json.loads((tmp_path / "trackers" / "run.json").read_text())
    assert run["attempt"] == 2
