"""The tracker `wandb`: a run of Weights & Biases, by its own client. WANDB_* variables say where to, with
what key, or offline.

A run is resumed by its id. Rows have numbers, and its service leaves out numbers that it has: so what was
about to be sent when a process died is noted before, and sent again under the same numbers.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from master_service.trackers.tracker import Point, Run, told_with
from trireme_shared.platform.storage import files
from trireme_shared.protocol.errors import InvalidArgument

FOLDER = "wandb"
STEP = "trireme_step"


class WandbRun:
    def __init__(self) -> None:
        self._run: Any = None
        self._of: Run | None = None
        self._told: dict[str, int] = {}
        self._number = 0
        self._temporary = ""

    def begin(self, run: Run) -> Mapping[str, int]:
        import wandb  # noqa: PLC0415  an extra

        self._of = run
        settings = wandb.Settings(
            console="off", silent=True, x_disable_stats=True, disable_git=True, disable_code=True,
            save_code=False, init_timeout=60,
        )  # fmt: skip
        where = {"base_url": run.wanted.uri} if run.wanted.uri else {}
        self._run = wandb.init(
            id=run.id,
            resume="allow",
            dir=self._folder(run),
            project=run.wanted.experiment or os.environ.get("WANDB_PROJECT") or run.job,
            name=run.wanted.run or os.environ.get("WANDB_NAME") or run.job,
            config=dict(run.parameters),
            settings=settings.model_copy(update=where),
            reinit="create_new",
        )
        self._run.config.update(run.tags, allow_val_change=True)
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)
        known = run.remembered
        self._told, self._number = dict(known.get("told", {})), int(known.get("number", 0))
        # a call that was cut off; else it is left out
        self._send([Point(*point) for point in known.get("points", ())])
        return self._told

    def _folder(self, run: Run) -> str:
        """Where its client writes. Raises InvalidArgument."""
        if given := os.environ.get("WANDB_DIR"):
            return given
        place = files.local_path(files.join(run.storage, FOLDER))
        if place is not None:
            place.mkdir(parents=True, exist_ok=True)
            return str(place)
        if os.environ.get("WANDB_MODE") == "offline":
            msg = f"wandb is offline and writes into a folder, but the job's storage {run.storage} is none"
            raise InvalidArgument(msg, hint="set WANDB_DIR where the master runs")
        self._temporary = tempfile.mkdtemp(prefix="trireme-wandb-")
        return self._temporary

    def log(self, points: Sequence[Point]) -> None:
        assert self._of is not None, "log before begin"
        self._told = told_with(self._told, list(points))
        self._of.remember(
            {"told": self._told, "number": self._number, "points": [list(point) for point in points]}
        )
        self._send(points)

    def _send(self, points: Sequence[Point]) -> None:
        """A row for each step."""
        for step, of_step in groupby(
            sorted(points, key=lambda point: point.step), key=lambda point: point.step
        ):
            self._run.log({STEP: step, **{point.name: point.value for point in of_step}}, step=self._number)
            self._number += 1

    def end(self, result: Mapping[str, Any]) -> None:
        self._run.summary.update(
            {f"trireme.{name}": value for name, value in result.items() if value is not None}
        )
        self._run.finish(exit_code=0 if result.get("phase") == "COMPLETED" else 1)
        self._run = None

    def close(self) -> None:
        """Its client ends by itself what it has; the run may go on."""
        if self._run is not None:
            self._run.finish(exit_code=0)
        if self._temporary:
            shutil.rmtree(self._temporary, ignore_errors=True)
