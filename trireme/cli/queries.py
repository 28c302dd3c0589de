"""`trireme status | tasks | members`: queries to a running job, answered as a table or as one JSON object."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from shared.errors import TriremeError
from shared.runtime import telemetry
from trireme.cli import exit_codes
from trireme.launch import run_folder
from trireme.view.job_address import AnyClient, open_client
from trireme.view.progress import progress_of
from trireme.view.report import loss_rows

Show = Callable[..., Awaitable[dict[str, Any]]]


def ask(show: Show, job: str | None, data_dir: Path | None, url: str | None, *, as_json: bool, **query: Any) -> int:
    """Run one query; returns the exit code."""
    telemetry.configure(level="ERROR", json=False)
    try:
        document = asyncio.run(_ask(show, job_address(job, data_dir, url), as_json=as_json, query=query))
    except TriremeError as error:
        return exit_codes.report_error(error, as_json=as_json)
    if as_json:
        print(json.dumps(document))  # noqa: T201
    return exit_codes.OK


async def _ask(show: Show, url: str, *, as_json: bool, query: dict[str, Any]) -> dict[str, Any]:
    async with open_client(url, token=os.environ.get("TRIREME_TOKEN", "")) as client:
        return await show(client, None if as_json else Console(), **query)


def job_address(job: str | None, data_dir: Path | None, url: str | None) -> str:
    """The address as given, or from TRIREME_URL, or of a local run. Raises NotFound."""
    if given := url or os.environ.get("TRIREME_URL"):
        return given
    return str(run_folder.find_run(data_dir, job, "--data-dir or --url")[1]["url"])


async def show_status(client: AnyClient, console: Console | None) -> dict[str, Any]:
    job = await client.job()
    if console:
        progress = progress_of(job, restarts=0)
        console.print(f"{job['job']}  {job['phase']}  {progress.fraction:.0%}  {job['reason']}", highlight=False)
        console.print(progress.training(), highlight=False)
        members = job["members"]
        console.print(
            f"trainers {members['trainers']}/{members['trainers_desired']}  "
            f"pservers {members['pservers']}/{members['pservers_desired']}  generation {job['generation']}  "
            f"{'master' if job['spec']['dispatch'] == 'master' else 'sweeper'} {job['master']['master_id']} (term {job['master']['term']})",
            highlight=False,
        )
        for name, text in loss_rows(job["losses"]):
            console.print(f"{name}  {text}", highlight=False)
    return job


async def show_tasks(client: AnyClient, console: Console | None, state: str | None = None) -> dict[str, Any]:
    summary = await client.task_summary()
    tasks = [task async for task in client.tasks(state.upper() if state else None)]
    if console:
        counts = "  ".join(f"{name} {summary[name]:,}" for name in ("todo", "pending", "done", "discarded"))
        console.print(
            f"epoch {min(summary['epoch'] + 1, summary['epochs'])}/{summary['epochs']}  {counts}", highlight=False
        )
        columns = ("task_id", "state", "attempt", "trainer", "file", "first", "count", "cause")
        _print_table(console, columns, tasks)
    return {"summary": summary, "tasks": tasks}


async def show_members(client: AnyClient, console: Console | None) -> dict[str, Any]:
    members = [member async for member in client.members()]
    if console:
        _print_table(console, ("member_id", "kind", "url", "host", "pid", "lanes", "tasks"), members)
    return {"members": members}


def _print_table(console: Console, columns: tuple[str, ...], rows: list[dict[str, Any]]) -> None:
    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(_cell(row.get(column)) for column in columns))
    console.print(table)


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(str(item) for item in value)
    return "" if value is None else str(value)
