"""Trackers of a run: whether they can be used, before it begins; the rest of its metrics and its end, after
it; and `trireme track`.

What follows a job while it trains is its leader's (master_service/control/tracking.py).
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from master_service.control.tracking import finish
from master_service.core.changes import Event
from master_service.trackers.assignment import Memory, News, assignment_of
from master_service.trackers.made import check
from trireme.cli import exit_codes
from trireme.cli.checkpoint import spec_of
from trireme.cli.targets import cluster_of
from trireme.client.exchange import FINAL
from trireme.launch.processes import PYTHON_MODULE, inherited_environment
from trireme.launch.resume import RESULT_FILE
from trireme.launch.run_folder import DATA_DIR, read_json
from trireme.settings import UsageError
from trireme.validation import problems_of
from trireme.view.job_address import open_job
from trireme_shared.platform.runtime import telemetry
from trireme_shared.protocol.errors import Conflict, InvalidArgument, TriremeError
from trireme_shared.protocol.records import JobSpec

CHECK_S = 60.0
FINISH_S = 30.0  # a run that has ended waits so long for its trackers
TOLD = ("phase", "reason", "metrics", "records", "best", "stopped_step", "seconds")


async def check_trackers(spec: JobSpec) -> None:
    """Raises UsageError."""
    try:
        check(spec.trackers)
    except InvalidArgument as error:
        raise UsageError(error.message, hint=error.hint) from error
    if any(tracker.is_own for tracker in spec.trackers):
        await _check_own(spec)


async def _check_own(spec: JobSpec) -> None:
    process = await asyncio.create_subprocess_exec(
        *(*PYTHON_MODULE, "master_service.trackers", "--check"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=inherited_environment(),
    )
    try:
        async with asyncio.timeout(CHECK_S):
            told, _ = await process.communicate(assignment_of(spec, str(_folder_of(spec))).to_bytes() + b"\n")
    except TimeoutError as error:
        raise UsageError(f"making the job's trackers takes longer than {CHECK_S:g} s") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise UsageError(f"making the job's trackers ended their process ({process.returncode})")
    for line in told.splitlines():
        news = News.model_validate_json(line)
        raise UsageError(f"the tracker {news.tracker} cannot be used: {news.cause}")


async def finish_trackers(
    spec: JobSpec, document: Mapping[str, Any], limit_s: float = FINISH_S, *, anew: bool = False
) -> bool:
    """They get what they lack, and the end of a job that nobody leads; says what is late. Whether all have
    all. `anew`: also if the trackers of the job were told its end."""
    if not spec.trackers or (not anew and await asyncio.to_thread(lambda: Memory(spec.storage).ended)):
        return True
    result = {name: document.get(name) for name in TOLD if document.get(name) is not None}

    async def folder() -> Path:
        return _folder_of(spec)

    late = await finish(spec, result, limit_s, _ignore, folder)
    for name, cause in late.items():
        what = f"tracker {name}" if name else "trackers"
        print(f"{what}: {cause}; `trireme track {spec.job}` goes on with it", file=sys.stderr)  # noqa: T201
    return not late


def _folder_of(spec: JobSpec) -> Path:
    """Where modules beside the script are: of a script that was submitted, the working directory."""
    script = Path(spec.script)
    return script.parent if script.is_file() else Path.cwd()


def _ignore(_: Sequence[Event]) -> None:
    """What is late in the end is said then."""


def track(
    job: str | None, data_dir: Path | None, url: str | None, trackers: Sequence[str], limit_s: float
) -> int:
    """The exit code. `trackers`: as in the setting; empty: the job's own."""
    telemetry.configure(level="ERROR", json=False)
    try:
        spec = spec_of(job, data_dir, url)
        if trackers:
            spec = with_trackers(spec, trackers)
        if not spec.trackers:
            raise InvalidArgument(f"job {spec.job} has no trackers", hint="name some with --tracker")
        return asyncio.run(_track(spec, job, data_dir, url, limit_s, others=bool(trackers)))
    except TriremeError as error:
        return exit_codes.report_error(error, as_json=False)
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED


def with_trackers(spec: JobSpec, trackers: Sequence[str]) -> JobSpec:
    """Raises UsageError."""
    try:
        return JobSpec.model_validate({**spec.model_dump(), "trackers": list(trackers)})
    except ValidationError as error:
        raise UsageError("; ".join(problems_of(error, {"trackers": "--tracker"}))) from error


async def _track(
    spec: JobSpec, job: str | None, data_dir: Path | None, url: str | None, limit_s: float, *, others: bool
) -> int:
    """`others`: not the job's own trackers. Raises TriremeError."""
    document = await _end_of(spec, job, data_dir, url)
    await check_trackers(spec)
    kinds = ", ".join(each.kind for each in spec.trackers)
    print(f"{kinds}: getting what is not there yet of job {spec.job}, at most {limit_s:g} s", file=sys.stderr)  # noqa: T201
    done = await finish_trackers(spec, document, limit_s, anew=others)
    if done:
        print(f"{kinds}: all of job {spec.job} is there")  # noqa: T201
    return exit_codes.OK if done else exit_codes.TIMED_OUT


async def _end_of(
    spec: JobSpec, job: str | None, data_dir: Path | None, url: str | None
) -> Mapping[str, Any]:
    """Raises Conflict if it has not ended."""
    cluster = cluster_of(job, data_dir, url)
    if cluster is not None:
        async with open_job(cluster.address, token=cluster.token) as (client, name):
            view = await client.get_job(name)
        end = {"phase": view.standing or view.state, "reason": view.reason}
        document = (view.result.model_dump(mode="json") if view.result else {}) | end
        ended = document["phase"] in FINAL
    else:
        folder = (data_dir or Path(os.environ.get("TRIREME_DATA_DIR") or DATA_DIR)) / spec.job
        found = read_json(folder / RESULT_FILE)
        document, ended = found or {}, found is not None and not found.get("resumable")
    if not ended:
        raise Conflict(
            f"job {spec.job} has not ended",
            hint="while it trains its leader feeds its trackers; `trireme events` tells if one is late",
        )
    return document
