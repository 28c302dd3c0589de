"""`trireme schedules`: jobs of a cluster that begin again and again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from trireme.cli.cluster.jobs import answer
from trireme.cli.queries import print_table
from trireme.cli.targets import checked_name
from trireme.client import AsyncClient


def list_schedules(data_dir: Path | None, url: str | None, *, as_json: bool) -> int:
    """Returns the exit code."""

    async def ask(cluster: AsyncClient) -> dict[str, Any]:
        return {"schedules": [each.model_dump(mode="json") async for each in cluster.list_schedules()]}

    def show(console: Console, document: dict[str, Any]) -> None:
        columns = ("name", "cron", "time_zone", "concurrency", "next_time", "last_job", "reason")
        print_table(console, columns, document["schedules"])

    return answer(ask, show, data_dir, url, as_json=as_json)


def delete(name: str, data_dir: Path | None, url: str | None, *, as_json: bool) -> int:
    """Returns the exit code."""

    async def ask(cluster: AsyncClient) -> dict[str, Any]:
        return (await cluster.delete_schedule(checked_name(name))).model_dump(mode="json")

    def show(console: Console, document: dict[str, Any]) -> None:
        console.print(f"schedule {document['name']} is deleted; its jobs go on")

    return answer(ask, show, data_dir, url, as_json=as_json)
