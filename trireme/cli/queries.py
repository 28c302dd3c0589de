"""`trireme status | tasks | members`: queries to a running job, answered as a table or as one JSON object. A job that ended is
answered for by the files of its run.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.table import Table

from trireme.cli import exit_codes
from trireme.cli.targets import Target, job_target, local_run
from trireme.client.asynchronous import TaskState
from trireme.launch import resume, run_folder
from trireme.view.job_address import AnyClient, open_job
from trireme.view.names import without_tokens
from trireme.view.progress import members_text, progress_of
from trireme.view.report import evaluation_line, failure_lines, loss_rows, summary_text
from trireme.view.stopped_run import explain_stopped
from trireme_shared.platform.runtime import telemetry
from trireme_shared.protocol.errors import TriremeError
from trireme_shared.protocol.records import Phase, UserFailure

COUNTS = ("trainers", "trainers_desired", "pservers", "pservers_desired")
STOPPED = "STOPPED"  # no phase of a job: nobody runs it, and it is unfinished
PIPE_WIDTH = 10_000  # a pipe has no edge: nothing is cut or wrapped
Show = Callable[..., Awaitable[dict[str, Any]]]


def ask(show: Show, job: str | None, data_dir: Path | None, url: str | None, *, as_json: bool, **query: Any) -> int:
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
        print(json.dumps(document))  # noqa: T201
    return exit_codes.OK


def stdout_console() -> Console:
    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)


async def _ask(show: Show, target: Target, console: Console | None, query: dict[str, Any]) -> dict[str, Any]:
    async with open_job(target.address, token=target.token) as (client, job):
        return await show(client, job, console, **query)


def _local_folder(job: str | None, data_dir: Path | None, url: str | None) -> Path | None:
    """The folder of the local run that is meant; says which job it is if there are several. Raises NotFound."""
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
        console.print(f"{job['job']}  {job['phase']}  {progress.fraction:.0%}  {without_tokens(job['reason'])}")
        console.print(progress.training())
        members = job["members"]
        console.print(
            f"{members_text(*(members[name] for name in COUNTS))}  generation {job['generation']}  "
            f"{'master' if job['spec']['dispatch'] == 'master' else 'sweeper'} {without_tokens(job['master']['master_id'])} (term {job['master']['term']})"
        )
        if line := evaluation_line(job.get("evaluation"), job["spec"]["mode"]):
            console.print(line)
        for cause, text in loss_rows(job["losses"]):
            console.print(f"{cause}  {text}")
        if (result := job["result"])["discarded_tasks"]:
            told = f"{result['discarded_tasks']} tasks, {result['discarded_records']:,} records"
            console.print(f"discarded  {told}")
        if job.get("failure"):
            console.print("\n".join(failure_lines(UserFailure.model_validate(job["failure"]))), markup=False)
    return job


async def show_tasks(client: AnyClient, job: str, console: Console | None, state: str | None = None) -> dict[str, Any]:
    summary = (await client.get_task_summary(job)).model_dump(mode="json")
    wanted = cast("TaskState | None", state.upper() if state else None)  # the master checks it
    tasks = [task.model_dump(mode="json") async for task in client.list_tasks(job, state=wanted)]
    if console:
        counts = "  ".join(f"{name} {summary[name]:,}" for name in ("todo", "pending", "done", "discarded"))
        steps = f"  ({summary['steps_per_epoch']:,} steps an epoch)" if summary["steps_per_epoch"] else ""
        console.print(f"epoch {min(summary['epoch'] + 1, summary['epochs'])}/{summary['epochs']}  {counts}{steps}")
        columns = ("task_id", "state", "attempt", "trainer", "file", "first", "count", "cause")
        print_table(console, columns, tasks)
    return {"summary": summary, "tasks": tasks}


async def show_members(client: AnyClient, job: str, console: Console | None) -> dict[str, Any]:
    members = [member.model_dump(mode="json") async for member in client.list_members(job)]
    if console:
        more = ("has_parameters",) if any(member.get("has_parameters") is not None for member in members) else ()
        print_table(console, ("member_id", "kind", "url", "host", "pid", "lanes", *more, "tasks"), members)
    return {"members": members}


def _ended_status(result: dict[str, Any], console: Console | None) -> dict[str, Any]:
    if console:
        print(summary_text(result, reason=result["phase"] != Phase.COMPLETED))  # noqa: T201
    return result


def _stopped_status(folder: Path, console: Console | None) -> dict[str, Any]:
    """The status of an unfinished job that nobody runs."""
    told = explain_stopped(folder)
    if console:
        print("\n".join([told.summary, *told.details, *(f"hint: {hint}" for hint in told.hints)]))  # noqa: T201
    hints = list(told.hints)
    return {"job": folder.name, "phase": STOPPED, "reason": told.summary, "details": list(told.details), "hints": hints}


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
