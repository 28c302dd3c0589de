"""`trireme list`: the runs of a data folder, newest first, from their files alone. No run is asked, so one that hangs is listed as well."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trireme.cli import exit_codes
from trireme.cli.queries import STOPPED, print_table, stdout_console
from trireme.launch import resume, run_folder
from trireme.pool import cluster_folder
from trireme.view.report import number
from trireme_shared.platform.runtime import telemetry
from trireme_shared.protocol.errors import TriremeError
from trireme_shared.protocol.records import Phase
from trireme_shared.protocol.times import rfc3339

RUNNING = "RUNNING"  # beside STOPPED and the phases of jobs that have ended
METRICS = 3
REASON_CHARACTERS = 80


def list_runs(data_dir: Path | None, *, as_json: bool) -> int:
    """Returns the exit code."""
    telemetry.configure(level="ERROR", json=False)
    place = data_dir or Path(os.environ.get("TRIREME_DATA_DIR") or run_folder.DATA_DIR)
    try:
        runs = found_runs(place)
        if cluster_folder.find(data_dir) is not None:
            print(f"a cluster runs in {place}, too: `trireme jobs` lists its jobs", file=sys.stderr)  # noqa: T201
    except TriremeError as error:
        return exit_codes.report_error(error, as_json=as_json)
    if as_json:
        print(json.dumps({"runs": runs}))  # noqa: T201
    elif runs:
        print_table(stdout_console(), ("job", "state", "started", "ended", "result", "folder"), runs)
    else:
        print(f"{place} holds no run; start one with `trireme run SCRIPT`, or give --data-dir", file=sys.stderr)  # noqa: T201
    return exit_codes.OK


def found_runs(place: Path) -> list[dict[str, Any]]:
    """`started`: the last time that the job was started or resumed. `seconds`: of all its runs that resumed each other."""
    begun = [(lock.stat().st_mtime, lock.parent) for lock in place.glob("*/lock") if is_of_run(lock.parent)]
    return [run_in(folder, since) for since, folder in sorted(begun, reverse=True)]


def is_of_run(folder: Path) -> bool:
    """It has files of a run; a start that was refused leaves a lock alone."""
    return run_folder.is_running(folder) or any(
        (folder / name).is_file() for name in (run_folder.RUN_FILE, resume.RESULT_FILE, run_folder.TIME_FILE)
    )


def run_in(folder: Path, since: float) -> dict[str, Any]:
    running = run_folder.is_running(folder)
    result = None if running else run_folder.read_json(folder / resume.RESULT_FILE)
    last = folder / (
        resume.RESULT_FILE if result else run_folder.TIME_FILE
    )  # the launcher writes this one while it runs
    ended = None if running or not last.is_file() else rfc3339(last.stat().st_mtime)
    spent = run_folder.read_json(folder / run_folder.TIME_FILE) or {}
    return {
        "job": folder.name,
        "state": RUNNING if running else str(result["phase"]) if result else STOPPED,
        "started": rfc3339(since),
        "ended": ended,
        "seconds": spent.get("seconds"),
        "result": outcome(result) if result else "",
        "folder": str(folder),
    }


def outcome(result: Mapping[str, Any]) -> str:
    """`accuracy 0.9722`, `loss 0.31`, or why the job failed."""
    if result["phase"] != Phase.COMPLETED:
        reason = " ".join(str(result.get("reason") or "").split())
        return reason if len(reason) <= REASON_CHARACTERS else f"{reason[:REASON_CHARACTERS]}…"
    values = dict(result.get("metrics") or {})
    if not values and result.get("loss") is not None:
        values = {"loss": result["loss"]}
    return ", ".join(f"{name} {number(value)}" for name, value in list(values.items())[:METRICS])
