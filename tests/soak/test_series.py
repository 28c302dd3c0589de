"""examples/charlm, evaluated every 50 steps, with its best checkpoint and trackers, through SIGKILLs of a
trainer, of the leading master and of a parameter server, which costs a rollback: every series has each step
once and equals the undisturbed run's, so do the event files (read by TensorBoard's own reader), the CSV file
and what `trireme metrics --follow` tells, and neither evaluations nor deaths change a bit of the
parameters."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import os
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from examples.charlm import corpus
from master_service.storage.series_files import StoredSeries, read_all
from tests.end_to_end.command import Command, Done, command_in, wait_for_step
from trireme.cli.chaos import alive
from trireme.cli.history.metrics import OfStorage

pytestmark = [pytest.mark.processes, pytest.mark.soak, pytest.mark.timeout(600)]

SCRIPT = Path(corpus.__file__).with_name("charlm.py")
CONTEXT = 128  # bytes of a record
BATCH, STEPS, EVERY = 8, 320, 50  # two lanes take equal numbers of tasks of 128 records
TRAINED, EVALUATED = (
    STEPS * BATCH * CONTEXT + 1,
    96 * CONTEXT + 1,
)  # bytes; a window overlaps the next by one
SETTINGS = (
    "--trainers",
    2,
    "--global-batch-size",
    BATCH,
    "--lanes",
    2,
    "--no-check",
    "--json",
    "--job",
    "charlm",
)
SETTINGS += ("--set", "checkpoint_every_steps=37", "--set", "lease_ttl_s=3")
EVALUATING = ("--set", f"evaluate_every={EVERY}", "--set", "keep_best=bits_per_byte:min")
TRACKERS = ("--tracker", "csv", "--tracker", "tensorboard")
Points = list[tuple[int, float]]


@dataclass(frozen=True)
class Trained:
    done: Done
    folder: Path

    @property
    def result(self) -> Mapping[str, Any]:
        found: dict[str, Any] = json.loads(self.done.out)
        return found

    def parameters(self, which: str = "") -> dict[str, torch.Tensor]:
        values: dict[str, torch.Tensor] = torch.load(
            self.folder / "export" / which / "model.pt", weights_only=True
        )
        return values

    def series(self) -> dict[str, Points]:
        """As stored: by name (step, mean), all digits."""

        async def read() -> dict[str, Points]:
            source = OfStorage(await read_all(StoredSeries(str(self.folder))))
            names = [summary["name"] for summary in await source.summaries()]
            return {name: [(row["step"], row["mean"]) for row in await source.points(name)] for name in names}

        return asyncio.run(read())

    def csv_file(self) -> dict[str, Points]:
        with (self.folder / "metrics" / "metrics.csv").open(newline="") as file:
            return read_csv(file)

    def event_files(self) -> dict[str, Points]:
        reader = EventAccumulator(str(self.folder / "tensorboard"), size_guidance={"scalars": 0})
        reader.Reload()
        return {
            name: [(event.step, event.value) for event in reader.Scalars(name)]
            for name in reader.Tags()["scalars"]
        }


def read_csv(file: TextIO) -> dict[str, Points]:
    found: dict[str, Points] = {}
    for row in csv.DictReader(file):
        found.setdefault(row["metric"], []).append((int(row["step"]), float(row["mean"])))
    return found


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What charlm trains on, cut short."""
    folder = tmp_path_factory.mktemp("text")
    for (name, path), size in zip(
        corpus.prepare(folder / "whole").items(), (TRAINED, EVALUATED), strict=True
    ):
        assert name in ("train", "valid")
        (folder / path.name).write_bytes(path.read_bytes()[:size])
    return folder


def arguments(*more: object) -> tuple[object, ...]:
    return ("run", SCRIPT, *SETTINGS, *more)


def train(folder: Path, text: Path, *more: object) -> Trained:
    with command_in(folder) as trireme:
        return trained(trireme.run(*arguments(*more), CHARLM_DATA=str(text)), folder)


def trained(done: Done, folder: Path) -> Trained:
    assert done.code == 0, done.err
    return Trained(done, folder / ".trireme" / "charlm")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Trained:
    return train(tmp_path_factory.mktemp("undisturbed"), text, "--pservers", 1, *EVALUATING, *TRACKERS)


def kill(trireme: Command, name: str, step: int) -> None:
    wait_for_step(trireme, step, job="charlm")
    os.kill(alive(trireme.folder / ".trireme" / "charlm")[name], signal.SIGKILL)


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def assert_same_series(found: dict[str, Points], expected: dict[str, Points], *, digits: bool = True) -> None:
    """`digits`: all of them; event files have 32 bits. What is measured is another time each; a death may
    cost a step's norm."""
    for name in ("loss", "lr", "evaluation.loss", "evaluation.bits_per_byte"):
        values = (
            expected[name]
            if digits
            else [(step, pytest.approx(value, rel=1e-6)) for step, value in expected[name]]
        )
        assert found[name] == values, name
    norms = dict(expected["grad_norm"])
    assert len(found["grad_norm"]) >= len(norms) - 3
    for step, norm in found["grad_norm"]:
        assert norm == (norms[step] if digits else pytest.approx(norms[step], rel=1e-6))
    for name, points in found.items():
        steps = [step for step, _ in points]
        assert steps == sorted(set(steps)), f"{name} has a step twice, or in another order"


def test_series_evaluations_and_trackers_of_a_broken_run_are_those_of_an_undisturbed_one(
    tmp_path: Path, text: Path, undisturbed: Trained
) -> None:
    with command_in(tmp_path) as trireme:
        process = trireme.begin(
            *arguments("--pservers", 2, "--standbys", 1, *EVALUATING, *TRACKERS), CHARLM_DATA=str(text)
        )
        wait_for_step(trireme, 1, job="charlm")
        following = trireme.begin("metrics", "charlm", "--follow", "--csv")
        kill(trireme, "trainer-1", 55)
        kill(trireme, "master-0", 105)
        kill(trireme, "pserver-1", 170)
        broken = trained(trireme.end_of(process), tmp_path)
        followed = trireme.end_of(following)
    assert broken.result["restarts"] == {"trainer-1": 1, "master-0": 1, "pserver-1": 1}
    assert re.search(r"rolled back to step \d+ in ", broken.done.err), broken.done.err

    series = undisturbed.series()
    assert [step for step, _ in series["loss"]] == list(range(STEPS))
    assert [step for step, _ in series["evaluation.loss"]] == [*range(EVERY, STEPS, EVERY), STEPS - 1]
    for run in (undisturbed, broken):
        assert_same_series(run.series(), series)
        assert_same_series(run.csv_file(), series)
        assert_same_series(run.event_files(), series, digits=False)
    assert followed.code == 0, followed.err
    assert_same_series(read_csv(io.StringIO(followed.out)), series)
    best = undisturbed.result["best"]
    assert broken.result["best"] == {**best, "checkpoint": broken.result["best"]["checkpoint"]}
    assert same_bits(broken.parameters(), undisturbed.parameters())
    assert same_bits(broken.parameters("best"), undisturbed.parameters("best"))


def test_evaluating_changes_no_bit(tmp_path: Path, text: Path, undisturbed: Trained) -> None:
    plain = train(tmp_path, text, "--pservers", 1)
    assert same_bits(plain.parameters(), undisturbed.parameters())
    losses = plain.series()["loss"]
    assert losses == undisturbed.series()["loss"]
