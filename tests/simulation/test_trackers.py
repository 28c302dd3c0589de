"""Trackers through kills of everybody, rollbacks and changes of masters, in virtual time: each step once,
with the undisturbed run's values, though the trackers die, too. tests/soak/test_series.py is the same with
real processes."""

from __future__ import annotations

import csv
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from master_service.trackers.follower import StoredSeriesReader
from master_service.trackers.made import make
from master_service.trackers.tracker import Run, Tracker, new_points, told_with
from tests.equipment.replaced import replaced
from tests.simulation.memory_storage import MemorySeries
from tests.simulation.plans import plan_of
from tests.simulation.reference import series_of
from tests.simulation.run import simulate
from trireme_shared.protocol.records import Mode
from trireme_shared.protocol.records.job_choices import Tracker as Wanted


class Followers:
    """Two trackers, as the leader's process feeds them whenever a master has stored something. Now and then
    that process dies."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder, self._rng = folder, random.Random(seed)
        self._contents: dict[str, bytes]
        self._reader: StoredSeriesReader
        self._trackers: list[Tracker] = []
        self._told: list[dict[str, int]] = []
        self.deaths = 0

    def look(self, contents: dict[str, bytes], *, over: bool = False) -> None:
        """`contents`: what is stored now."""
        self._contents = contents
        if not self._trackers or self._rng.random() < 0.2:
            self._begin()
        self._reader.look()
        for number, tracker in enumerate(self._trackers):
            told, reader = self._told[number], self._reader
            points = new_points(
                reader.table,
                reader.steps.next,
                told,
                self._rng.choice([3, 1000]) if not over else 10_000,
                over=over,
            )
            if points:
                tracker.log(points)
                self._told[number] = told_with(told, points)

    def _begin(self) -> None:
        self.deaths += bool(self._trackers)
        self._reader = StoredSeriesReader(lambda: sorted(self._contents), lambda name: self._contents[name])
        self._trackers = [make(Wanted(kind=kind)) for kind in ("csv", "tensorboard")]
        self._told = [dict(tracker.begin(self._run()) or {}) for tracker in self._trackers]

    def _run(self) -> Run:
        return Run(
            "a", "run-1", self.deaths + 1, str(self._folder), {}, Wanted(kind="csv"), {}, lambda _: None
        )

    def end(self, contents: dict[str, bytes]) -> None:
        self.look(contents, over=True)
        for tracker in self._trackers:
            tracker.end({"phase": "COMPLETED"})


def csv_file(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    with (folder / "metrics" / "metrics.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            found.setdefault(row["metric"], []).append((int(row["step"]), float(row["mean"])))
    return found


@pytest.mark.parametrize("seed", [0, 1, 3, 5])  # three of them roll back
def test_under_faults_trackers_have_each_step_once_with_the_undisturbed_values(
    seed: int, tmp_path: Path
) -> None:
    followers, history = Followers(tmp_path, seed), list[dict[str, bytes]]()
    write = MemorySeries.write

    async def written(self: MemorySeries, name: str, content: bytes) -> None:
        await write(self, name, content)
        history.append(dict(self.contents))

    drawn = plan_of(seed, Mode.SYNC)
    plan = replace(drawn, evaluate=True, evaluate_every=2, job=replace(drawn.job, epochs=4))
    with replaced(MemorySeries, "write", written):
        outcome = simulate(seed, Mode.SYNC, plan=plan)
    assert not outcome.violations, str(outcome)
    for stored in history:  # only now: the writer of event files is a thread
        followers.look(stored)
    followers.end(history[-1])

    reader = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0})
    reader.Reload()
    found: dict[str, Any] = csv_file(tmp_path)
    for name, values in series_of(plan.job).items():
        expected = [(step, value.total / value.weight) for step, value in values.items()]
        assert found[name] == expected, name
        events = sorted(
            (event.step, event.value) for event in reader.Scalars(name)
        )  # files of one second are in no order
        assert events == [(step, pytest.approx(mean, rel=1e-6)) for step, mean in expected], name
    for name, points in found.items():
        steps = [step for step, _ in points]
        assert len(steps) == len(set(steps)), name
        if name.startswith("evaluation."):
            assert steps, name
