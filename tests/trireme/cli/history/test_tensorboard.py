"""Event files, read back by TensorBoard's own reader: each step once, whatever died, and whenever the files
are made."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from master_service.storage.series_files import StoredSeries, read_all
from tests.equipment.replaced import replaced
from tests.equipment.virtual_loop import run_virtually
from tests.trireme.cli.history.test_metrics import STEPS, Master, data_dir, no_address  # noqa: F401  fixtures
from trireme.cli import exit_codes
from trireme.cli.history import metrics as command
from trireme.cli.history.metrics import OfStorage, follow_points

EXPECTED = [(number, pytest.approx(2.0 / 2**number)) for number in range(STEPS)]


def losses(folder: Path) -> list[tuple[int, float]]:
    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    reader.Reload()
    return [(event.step, event.value) for event in reader.Scalars("loss")]


def test_event_files_of_a_job_that_has_ended_have_each_step_once(
    data_dir: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "events"
    assert command.tensorboard(["digits"], data_dir, None, port=6006, out=out) == exit_codes.OK
    assert capsys.readouterr().out == f"{out / 'digits'}\n"
    assert losses(out / "digits") == EXPECTED
    assert (
        command.tensorboard([], data_dir, None, port=6006, out=out) == exit_codes.CONFLICT
    )  # else each would be there twice
    assert "is not empty" in capsys.readouterr().err
    assert losses(out / "digits") == EXPECTED


def test_a_job_is_followed_through_a_change_of_the_master(data_dir: Path, tmp_path: Path) -> None:  # noqa: F811
    master = Master(OfStorage(asyncio.run(read_all(StoredSeries(str(data_dir / "digits"))))))
    with command.EventFiles(tmp_path / "followed") as files:
        run_virtually(lambda: follow_points(master.opened, (), files.write))
        assert losses(tmp_path / "followed") == EXPECTED  # readable before it is closed


def test_without_the_package_its_extra_is_named(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    with replaced(importlib.util, "find_spec", lambda *_: None):
        assert command.tensorboard([], data_dir, None, port=6006, out=None) == exit_codes.USAGE
    assert "trireme[tensorboard]" in capsys.readouterr().err
