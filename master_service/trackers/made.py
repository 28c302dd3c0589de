"""From the setting to a tracker, and whether it can be made here, before a job begins."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from master_service.trackers.csv_file import CsvFile
from master_service.trackers.event_files import EventFilesTracker
from master_service.trackers.mlflow_run import MlflowRun
from master_service.trackers.tracker import Point, Run, Tracker
from master_service.trackers.wandb_run import WandbRun
from trireme_shared.datasets.user_modules import load_named
from trireme_shared.protocol.errors import DatasetError, InvalidArgument
from trireme_shared.protocol.records.job_choices import CSV, MLFLOW, TENSORBOARD, WANDB
from trireme_shared.protocol.records.job_choices import Tracker as Wanted

MAKERS: Mapping[str, Callable[[], Tracker]] = {
    CSV: CsvFile,
    TENSORBOARD: EventFilesTracker,
    MLFLOW: MlflowRun,
    WANDB: WandbRun,
}
PACKAGES = {TENSORBOARD: "tensorboard", MLFLOW: "mlflow", WANDB: "wandb"}


class OwnTracker:
    """A user's: methods that it does not have do nothing."""

    def __init__(self, tracker: Any) -> None:
        self._tracker = tracker

    def begin(self, run: Run) -> Mapping[str, int] | None:
        found = self._call("begin", run)
        return found if isinstance(found, Mapping) else None

    def log(self, points: Sequence[Point]) -> None:
        self._tracker.log(points)

    def end(self, result: Mapping[str, Any]) -> None:
        self._call("end", result)

    def close(self) -> None:
        self._call("close")

    def _call(self, method: str, *arguments: object) -> object:
        found = getattr(self._tracker, method, None)
        return found(*arguments) if found is not None else None


def make(wanted: Wanted, beside: Path | None = None) -> Tracker:
    """`beside`: the folder of the job's script, where a user's own may lie. Raises InvalidArgument."""
    if not wanted.is_own:
        return MAKERS[wanted.kind]()
    try:
        maker = load_named(wanted.kind, beside)
    except DatasetError as error:
        message = error.message.replace("the reader", "the tracker", 1)
        raise InvalidArgument(
            message, hint="put it beside the script, or install its package where the master runs"
        ) from error
    tracker = maker() if callable(maker) else maker
    if not callable(getattr(tracker, "log", None)):
        msg = f"the tracker {wanted.kind} gives {tracker!r:.80}, which has no method log(points)"
        raise InvalidArgument(msg, hint="see docs/trackers.md")
    return OwnTracker(tracker)


def check(trackers: Sequence[Wanted], environment: Mapping[str, str] = os.environ) -> None:
    """Whether their packages are here, and what they need to be told. Imports nothing. Raises
    InvalidArgument."""
    for wanted in trackers:
        package = PACKAGES.get(wanted.kind)
        if package is not None and importlib.util.find_spec(package) is None:
            msg = (
                f"the tracker {wanted.kind} needs the package {package}, which is not installed where "
                "the master runs"
            )
            raise InvalidArgument(msg, hint=f"pip install 'trireme[{wanted.kind}]'")
        if wanted.kind == MLFLOW and not (wanted.uri or environment.get("MLFLOW_TRACKING_URI")):
            msg = "the tracker mlflow does not know its server"
            raise InvalidArgument(
                msg, hint="set MLFLOW_TRACKING_URI where the master runs, or mlflow?uri=URL"
            )
        if wanted.kind == MLFLOW and _refused_folder(
            wanted.uri or environment["MLFLOW_TRACKING_URI"], environment
        ):
            msg = (
                "the tracker mlflow is to write into the folder "
                f"{wanted.uri or environment['MLFLOW_TRACKING_URI']}, which MLflow refuses"
            )
            hint = (
                "set MLFLOW_ALLOW_FILE_STORE=true where the master runs, or give it a server or "
                "sqlite:///FILE"
            )
            raise InvalidArgument(msg, hint=hint)
        online = environment.get("WANDB_MODE", "online") == "online"
        if wanted.kind == WANDB and online and not (environment.get("WANDB_API_KEY") or _has_login()):
            msg = "the tracker wandb has no key"
            raise InvalidArgument(msg, hint="set WANDB_API_KEY where the master runs, or WANDB_MODE=offline")


def _refused_folder(uri: str, environment: Mapping[str, str]) -> bool:
    is_folder = uri.startswith("file:") or (
        ":" not in uri and uri not in ("databricks", "databricks-uc", "uc")
    )
    return is_folder and environment.get("MLFLOW_ALLOW_FILE_STORE", "").lower() not in ("true", "1")


def _has_login() -> bool:
    """Whether `wandb login` was done here."""
    try:
        home = Path.home()
    except RuntimeError:  # a user without HOME and without an entry in the system's list of users
        return False
    return any((home / name).exists() for name in (".netrc", "_netrc"))
