"""`trireme submit SCRIPT`: settings -> inspection of the script -> createJob at a cluster's leader -> the
job's name, or its end.

The script travels with the job, and so do the modules of its folder that it imports.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trireme.cli import exit_codes
from trireme.cli.cluster.jobs import ask_leader
from trireme.cli.run import job_named
from trireme.cli.start_file import with_start_file
from trireme.cli.targets import Target, cluster_target
from trireme.client import CreateJob, CreateSchedule
from trireme.client.exchange import body_of
from trireme.launch.cluster import pservers_for
from trireme.launch.processes import ForkServer
from trireme.preflight import Inspection, ScriptError, check_path, inspect
from trireme.script_source import read_source
from trireme.settings import (
    SETTINGS,
    Setting,
    UsageError,
    check_fields,
    from_script,
    has_pservers,
    job_spec,
    merge,
    origins_of,
    outside_script,
)
from trireme.validation import AUTO, problems_of, without_auto
from trireme.view.job_address import client_of
from trireme.view.progress import Display, display, progress_of, say
from trireme.view.report import failure_lines, number
from trireme_shared.platform.runtime import clock, ids, telemetry
from trireme_shared.platform.runtime.limits import cores
from trireme_shared.platform.storage import files
from trireme_shared.protocol.cron import next_time
from trireme_shared.protocol.errors import NotReady, PeerError, TriremeError
from trireme_shared.protocol.records import Dispatch, JobResult, JobSpec
from trireme_shared.protocol.records.cluster import Scheduling
from trireme_shared.protocol.records.job_spec import JobSettings
from trireme_shared.protocol.rest import JobView

POLL_S = 0.5
AWAY_S = 60.0  # how long a waiting command goes on while no leader answers


@dataclass(frozen=True, slots=True)
class SubmitRequest:
    """The command line; flags that were not given are None. `scheduling`: fields of Scheduling. `schedule`:
    fields of JobSchedule; with a `cron` a schedule is created."""

    script: Path
    flags: Mapping[str, Any]
    scheduling: Mapping[str, Any] = field(default_factory=dict)
    schedule: Mapping[str, Any] = field(default_factory=dict)
    assignments: tuple[str, ...] = ()
    data_dir: Path | None = None
    url: str | None = None
    storage: str | None = None
    check: bool = True
    wait: bool = False
    as_json: bool = False


def submit(request: SubmitRequest) -> int:
    """Returns the exit code; prints all messages."""
    telemetry.configure(level="ERROR", json=False)
    try:
        check_path(request.script)
        return asyncio.run(_submit(request))
    except ScriptError as error:
        return exit_codes.report_script_error(error.failure, as_json=request.as_json)
    except TriremeError as error:
        return exit_codes.report_error(error, as_json=request.as_json)
    except (asyncio.CancelledError, KeyboardInterrupt):
        return exit_codes.INTERRUPTED


async def _submit(request: SubmitRequest) -> int:
    with contextlib.suppress(PeerError):  # it may lead when the script has been inspected
        cluster_target(request.data_dir, request.url)  # first: no cluster is said before torch is imported
    outer = outside_script(request.flags, request.assignments)
    check_fields({name: setting for name, setting in outer.items() if not name.startswith("init_")})
    outer = await asyncio.to_thread(with_start_file, outer, request.data_dir, request.url)
    check_fields(outer)
    scheduling, schedule = scheduling_of(request.scheduling), schedule_of(request)
    known = without_auto({name: setting.value for name, setting in outer.items() if name in SETTINGS})
    with ForkServer() as forks:
        inspection = await inspect(
            request.script, known, check=request.check, start=forks.start, origins=origins_of(outer)
        )
    if inspection.notice:
        say(inspection.notice)
    body = request_body(request, outer, inspection, scheduling)
    key, where = ids.new_id("submit"), (request.data_dir, request.url)
    if schedule:
        wanted = body_of(CreateSchedule, **body, **schedule)
        made = await ask_leader(lambda cluster: cluster.create_schedule(wanted, key=key), *where)
        text = (
            f"schedule {made.name} begins its first job at {made.next_time}; `trireme schedules` lists them"
        )
        print(json.dumps(made.model_dump(mode="json")) if request.as_json else text)  # noqa: T201
        return exit_codes.OK
    asked = body_of(CreateJob, **body)
    job = await ask_leader(lambda cluster: cluster.create_job(asked, key=key), *where)
    if not request.wait:
        text = f"job {job.job} is submitted; `trireme status {job.job}` tells what it does"
        print(json.dumps(job.model_dump(mode="json")) if request.as_json else text)  # noqa: T201
        return exit_codes.OK
    say(f"job {job.job} is submitted; Ctrl-C leaves it to the cluster")
    return await follow(request, job.job)


def scheduling_of(given: Mapping[str, Any]) -> Scheduling:
    """Raises UsageError."""
    values = {name: value for name, value in given.items() if value is not None}
    try:
        return Scheduling.model_validate(values)
    except ValidationError as error:
        raise UsageError("; ".join(problems_of(error, {name: _flag(name) for name in values}))) from error


def schedule_of(request: SubmitRequest) -> dict[str, Any]:
    """What createSchedule takes beside the job; empty: it is one job. Raises UsageError."""
    values = {name: value for name, value in request.schedule.items() if value is not None}
    if not values:
        return {}
    if "cron" not in values:
        raise UsageError(f"{_flag(next(iter(values)))} is for schedules: give --cron as well")
    if request.wait:
        raise UsageError("--wait is for one job; jobs of a schedule begin later (`trireme schedules`)")
    if values.get("concurrency", "forbid") not in ("forbid", "replace"):
        raise UsageError(f"--concurrency {values['concurrency']}: give forbid or replace")
    try:
        next_time(values["cron"], "UTC", clock.wall_time())  # whether the time zone is known, the leader says
    except ValueError as error:
        raise UsageError(f"--cron: {error}") from error
    return values


def _flag(name: str) -> str:
    return f"--{name.removesuffix('_time').replace('_', '-')}"


def request_body(
    request: SubmitRequest, outer: Mapping[str, Setting], inspection: Inspection, scheduling: Scheduling
) -> dict[str, Any]:
    """What createJob takes. Raises UsageError."""
    settings = merge([from_script(inspection.config)]) | dict(outer)
    if has_pservers(settings) and settings.get("pservers", Setting(AUTO, "default")).value == AUTO:
        settings["pservers"] = Setting(pservers_for(inspection.model, cores()), "pservers = auto")
    job = job_named(settings, request.script)
    spec = job_spec(
        settings | {"job": Setting(job, "--name")},
        script=str(request.script.absolute()),
        dataset=_absolute(inspection.dataset),
        evaluation_dataset=_absolute(inspection.evaluation_dataset)
        if inspection.evaluation_dataset
        else None,
        storage="-",
    )
    if spec.dispatch is Dispatch.ETCD:
        raise UsageError(
            "dispatch etcd is for jobs without a master (`trireme run`); a cluster's jobs have one"
        )
    functions = [task.function.partition(":")[0] for task in spec.named_tasks.values() if task.function]
    functions += [tracker.kind.partition(":")[0] for tracker in spec.trackers if tracker.is_own]
    document: dict[str, Any] = {
        "name": job,
        "settings": _settings_of(spec),
        "scheduling": scheduling.model_dump(mode="json"),
        **_script_of(request.script, [*inspection.readers, *functions]),
    }
    return document | ({"storage": files.absolute(request.storage)} if request.storage else {})


def _settings_of(spec: JobSpec) -> dict[str, Any]:
    return spec.model_dump(mode="json", include=set(JobSettings.model_fields))


def _absolute(dataset: dict[str, Any]) -> dict[str, Any]:
    """Members have other working directories. What a user's own reader gets stays as it is, but for globs."""
    named = dataset.get("reader") is not None
    urls = [url if named and not files.is_glob(url) else files.absolute(url) for url in dataset["urls"]]
    return {**dataset, "urls": urls}


def _script_of(script: Path, functions: Iterable[str]) -> dict[str, Any]:
    """The script and the modules of its folder that it imports, or that are named by a string: those of
    functions of tasks, of trackers and of readers. Raises InvalidArgument."""
    source = read_source(script, functions)
    if source.modules:
        say(f"sent with {script.name}: {', '.join(source.modules)}")
    return {"source": source.model_dump()}


# ---------------------------------------------------------------- --wait


async def follow(request: SubmitRequest, name: str) -> int:
    """Show the job until it has ended; returns its exit code."""
    screen = display()
    try:
        job = await _until_ended(request, name, screen)
    finally:
        screen.close()
    if job.failure:
        print("\n".join(failure_lines(job.failure)), file=sys.stderr)  # noqa: T201
    print(json.dumps(job.model_dump(mode="json")) if request.as_json else _summary(job))  # noqa: T201
    return CODES.get(job.standing, exit_codes.JOB_FAILED)


CODES = {"COMPLETED": exit_codes.OK, "FAILED": exit_codes.JOB_FAILED, "CANCELLED": exit_codes.CANCELLED}


async def _until_ended(request: SubmitRequest, name: str, screen: Display) -> JobView:
    shown, heard = "", clock.monotonic()
    while True:
        try:
            target: Target = cluster_target(request.data_dir, request.url)
            async with client_of(target.address, target.token) as cluster:
                job = await cluster.get_job(name)
            heard = clock.monotonic()
        except (PeerError, NotReady):  # another master takes over
            if clock.monotonic() - heard > AWAY_S:
                raise
            await asyncio.sleep(POLL_S)
            continue
        if job.standing in CODES:
            return job
        if job.standing != shown:
            shown = job.standing
            screen.event(f"job {name} is {shown}" + (f": {job.reason}" if job.reason else ""))
        screen.show(progress_of(job, restarts=0), clock.monotonic())
        await asyncio.sleep(POLL_S)


def _summary(job: JobView) -> str:
    result = job.result or JobResult()
    rows = [
        ("job", f"{job.job} {job.standing} ({job.mode})"),
        ("records", f"{result.trained_records:,}"),
        *[(name, number(value)) for name, value in result.metrics.items()],
        *[(f"model ({kind})", path) for kind, path in result.exports.items()],
    ]
    if job.standing != "COMPLETED":
        rows.append(("reason", job.reason))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
