"""`trireme status | tasks | members | list`: questions about jobs, answered as a table or as one JSON object.

A running job answers itself; a job that ended is answered for by the files of its run. The list is made from
files alone, so it has runs that hang, too.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.table import Table

from trireme.cli import exit_codes
from trireme.cli.explain import explain_stopped
from trireme.cli.targets import Target, job_target, local_run
from trireme.client.asynchronous import TaskState
from trireme.launch import resume, run_folder
from trireme.pool import cluster_folder
from trireme.view.job_address import AnyClient, open_job
from trireme.view.progress import members_text, progress_of
from trireme.view.report import (
    evaluation_line,
    failure_lines,
    loss_rows,
    number,
    summary_text,
    without_tokens,
)
from trireme_shared.platform.runtime import telemetry
from trireme_shared.protocol.errors import TriremeError
from trireme_shared.protocol.records import Phase, UserFailure
from trireme_shared.protocol.times import rfc3339
from trireme_shared.protocol.urls import without_passwords

COUNTS = ("trainers", "trainers_desired", "pservers", "pservers_desired")
RUNNING, STOPPED = "RUNNING", "STOPPED"  # no phases of a job; STOPPED: nobody runs it, and it is unfinished
PIPE_WIDTH = 10_000  # a pipe has no edge: nothing is cut or wrapped
Show = Callable[..., Awaitable[dict[str, Any]]]
METRICS, REASON_CHARACTERS = 3, 80  # of a run that has ended, in the list


def ask(
    show: Show, job: str | None, data_dir: Path | None, url: str | None, *, as_json: bool, **query: Any
) -> int:
    """Run one query; returns the exit code."""
    telemetry.configure(level="ERROR", json=False)
    console = None if as_json else stdout_console()
    try:
        folder = _local_folder(job, data_dir, url)
        result = run_folder.read_json(folder / resume.RESULT_FILE) if folder else None
        if folder and result is None and show is show_status and not run_folder.is_running(folder):
            document = _stopped_status(folder, console)
        elif result is not None:
            document = _OF_ENDED[show](result, console, **query)
        else:
            document = asyncio.run(_ask(show, job_target(job, data_dir, url), console, query))
    except TriremeError as error:
        return exit_codes.report_error(error, as_json=as_json)
    if as_json:
        print(without_passwords(json.dumps(document)))  # noqa: T201
    return exit_codes.OK


def stdout_console() -> Console:
    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)


async def _ask(show: Show, target: Target, console: Console | None, query: dict[str, Any]) -> dict[str, Any]:
    async with open_job(target.address, token=target.token) as (client, job):
        return await show(client, job, console, **query)


def _local_folder(job: str | None, data_dir: Path | None, url: str | None) -> Path | None:
    """The folder of the local run that is meant; says which job it is if there are several. Raises
    NotFound."""
    folder = local_run(job, data_dir, url)
    if folder is None:
        return None
    if job is None and (others := run_folder.other_runs(folder)):
        also = f"{folder.parent} also has {', '.join(others)} (choose one with --job NAME)"
        print(f"this is job {folder.name}, the one started last; {also}", file=sys.stderr)  # noqa: T201
    return folder


async def show_status(client: AnyClient, name: str, console: Console | None) -> dict[str, Any]:
    view = await client.get_job(name)
    job = view.model_dump(mode="json")
    if console:
        progress = progress_of(view, restarts=0)
        console.print(
            f"{job['job']}  {job['state']}  {progress.fraction:.0%}  {without_tokens(job['reason'])}"
        )
        console.print(progress.training())
        members = job["members"]
        console.print(
            f"{members_text(*(members[name] for name in COUNTS))}  generation {job['generation']}  "
            f"{'master' if job['settings']['dispatch'] == 'master' else 'sweeper'} "
            f"{without_tokens(job['master']['master_id'])} (term {job['master']['term']})"
        )
        if line := evaluation_line(job.get("evaluation"), job["mode"]):
            console.print(line)
        for cause, text in loss_rows(job["losses"]):
            console.print(f"{cause}  {text}")
        if (result := job["result"])["discarded_tasks"]:
            told = f"{result['discarded_tasks']} tasks, {result['discarded_records']:,} records"
            console.print(f"discarded  {told}")
        for change in job["history"] or ():
            console.print(f"changed at {change['time']}: {change['text']}", markup=False)
        if job.get("failure"):
            console.print("\n".join(failure_lines(UserFailure.model_validate(job["failure"]))), markup=False)
    return job


async def show_tasks(
    client: AnyClient, job: str, console: Console | None, state: str | None = None
) -> dict[str, Any]:
    summary = (await client.get_task_summary(job)).model_dump(mode="json")
    wanted = cast("TaskState | None", state.upper() if state else None)  # the master checks it
    tasks = [task.model_dump(mode="json") async for task in client.list_tasks(job, state=wanted)]
    if console:
        counts = "  ".join(f"{name} {summary[name]:,}" for name in ("todo", "pending", "done", "discarded"))
        steps = f"  ({summary['steps_per_epoch']:,} steps an epoch)" if summary["steps_per_epoch"] else ""
        console.print(
            f"epoch {min(summary['epoch'] + 1, summary['epochs'])}/{summary['epochs']}  {counts}{steps}"
        )
        columns = ("task_id", "state", "attempt", "trainer", "file", "first", "count", "cause")
        print_table(console, columns, tasks)
    return {"summary": summary, "tasks": tasks}


async def show_members(client: AnyClient, job: str, console: Console | None) -> dict[str, Any]:
    members = [member.model_dump(mode="json") async for member in client.list_members(job)]
    if console:
        more = []
        if any(member.get("has_parameters") is not None for member in members):
            more.append("has_parameters")
        if len({member.get("trireme_version", "") for member in members}) > 1:
            more.append("trireme_version")
        print_table(console, ("member_id", "kind", "url", "host", "pid", "lanes", *more, "tasks"), members)
    return {"members": members}


def _ended_status(result: dict[str, Any], console: Console | None) -> dict[str, Any]:
    if console:
        summary = summary_text(result, reason=result["phase"] != Phase.COMPLETED)
        print(without_passwords(summary))  # noqa: T201
    return {"state": result["phase"], **result}  # a run of before may have none


def _stopped_status(folder: Path, console: Console | None) -> dict[str, Any]:
    """The status of an unfinished job that nobody runs."""
    told = explain_stopped(folder)
    if console:
        print("\n".join([told.summary, *told.details, *(f"hint: {hint}" for hint in told.hints)]))  # noqa: T201
    hints = list(told.hints)
    return {
        "job": folder.name,
        "state": STOPPED,
        "phase": STOPPED,
        "reason": told.summary,
        "details": list(told.details),
        "hints": hints,
    }


def _ended_tasks(result: dict[str, Any], console: Console | None, state: str | None = None) -> dict[str, Any]:
    tasks = result["discarded"]["list"] if state in (None, "discarded") else []
    if console:
        count = result["discarded"]["tasks"]
        print(f"job {result['job']} is {result['phase']}: it has no open tasks; {count} were discarded")  # noqa: T201
        if tasks:
            print_table(console, ("task_id", "file", "first", "count", "epoch", "cause"), tasks)
    return {"summary": {"discarded": result["discarded"]["tasks"]}, "tasks": tasks}


def _ended_members(result: dict[str, Any], console: Console | None) -> dict[str, Any]:
    if console:
        print(f"job {result['job']} is {result['phase']}: it has no members any more")  # noqa: T201
    return {"members": []}


_OF_ENDED: dict[Show, Callable[..., dict[str, Any]]] = {
    show_status: _ended_status,
    show_tasks: _ended_tasks,
    show_members: _ended_members,
}


def print_table(console: Console, columns: tuple[str, ...], rows: list[dict[str, Any]]) -> None:
    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(_cell(row.get(column)) for column in columns))
    console.print(table)


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(str(item) for item in value)
    return "" if value is None else str(value)


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
        print(  # noqa: T201
            f"{place} holds no run; start one with `trireme run SCRIPT`, or give --data-dir", file=sys.stderr
        )
    return exit_codes.OK


def found_runs(place: Path) -> list[dict[str, Any]]:
    """`started`: the last time that the job was started or resumed. `seconds`: of all its runs that resumed
    each other."""
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
