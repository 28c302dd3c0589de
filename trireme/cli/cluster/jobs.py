"""`trireme jobs | pool | pause | resume | cancel | delete`: asked of a cluster's leader."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from rich.console import Console

from shared.errors import DeadlineExceeded, NotFound, PeerError, TriremeError
from shared.records.cluster import Standing
from shared.runtime import clock, telemetry
from trireme.cli import exit_codes
from trireme.cli.cluster.leader import LEADER_S, ask_leader
from trireme.cli.queries import print_table, stdout_console
from trireme.cli.targets import checked_name, cluster_target
from trireme.settings import UsageError
from trireme.view.cluster_client import Action, ClusterClient
from trireme.view.job_lines import columns_of
from trireme.view.names import without_tokens

POLL_S = 0.3
REACHED = {
    "pause": (Standing.PAUSED, Standing.COMPLETED, Standing.FAILED, Standing.CANCELLED),
    "cancel": (Standing.CANCELLED, Standing.COMPLETED, Standing.FAILED),
    "resume": tuple(standing for standing in Standing if standing is not Standing.PAUSED),
}

Call = Callable[[ClusterClient], Awaitable[dict[str, Any]]]


def list_jobs(state: str | None, data_dir: Path | None, url: str | None, *, as_json: bool) -> int:
    """Returns the exit code."""

    async def ask(cluster: ClusterClient) -> dict[str, Any]:
        wanted = _standing(state) if state else None
        return {"jobs": [job async for job in cluster.jobs(wanted)]}

    def show(console: Console, document: dict[str, Any]) -> None:
        names = ("job", "state", "done", "doing", "members")
        rows = [dict(zip(names, columns_of(job), strict=True)) for job in document["jobs"]]
        print_table(console, names, rows)

    return answer(ask, show, data_dir, url, as_json=as_json)


def list_pool(data_dir: Path | None, url: str | None, *, as_json: bool) -> int:
    """Returns the exit code."""

    async def ask(cluster: ClusterClient) -> dict[str, Any]:
        return {"members": [member async for member in cluster.pool_members()]}

    def show(console: Console, document: dict[str, Any]) -> None:
        columns = ("member_id", "state", "job", "host", "cores", "device", "trouble")
        print_table(console, columns, document["members"])

    return answer(ask, show, data_dir, url, as_json=as_json)


def list_job_tasks(name: str, task: str | None, data_dir: Path | None, url: str | None, *, as_json: bool) -> int:
    """`task`: only that one, with its output. Returns the exit code."""

    async def ask(cluster: ClusterClient) -> dict[str, Any]:
        found = await cluster.job_tasks(checked_name(name))
        if task is None:
            return {"job_tasks": found}
        for each in found:
            if each["name"] == task:
                return each
        known = ", ".join(each["name"] for each in found) or "none"
        raise NotFound(f"job {name} has no task {task}; there are: {known}", hint=f"`trireme job-tasks {name}`")

    def show(console: Console, document: dict[str, Any]) -> None:
        if task is not None:
            console.print(document["output"], highlight=False, markup=False)
            return
        columns = ("name", "state", "attempt", "failures", "member_id", "runs", "reason")
        rows = [{**each, "runs": each["command"] or each["function"]} for each in document["job_tasks"]]
        print_table(console, columns, rows)

    return answer(ask, show, data_dir, url, as_json=as_json)


def drain(member: str, wait_s: float, data_dir: Path | None, url: str | None, *, as_json: bool) -> int:
    """Wait at most `wait_s` until nothing runs there. Returns the exit code."""

    async def run() -> dict[str, Any]:
        deadline = clock.monotonic() + wait_s

        async def asked_again() -> dict[str, Any]:  # which changes nothing
            limit_s = max(POLL_S, deadline - clock.monotonic()) if wait_s else LEADER_S
            return await ask_leader(lambda leader: leader.drain_member(member), data_dir, url, limit_s)

        now = await asked_again()
        while wait_s and now["state"] != "drained":
            if clock.monotonic() > deadline:
                msg = f"{member} is still {now['state']} {wait_s:g} s after it was drained: it runs job {now['job']}"
                raise DeadlineExceeded(msg, hint="it goes on; wait longer with --wait-s")
            await asyncio.sleep(POLL_S)
            now = await asked_again()
        return now

    def show(console: Console, now: dict[str, Any]) -> None:
        of = f": it leaves job {now['job']}" if now["job"] else ""
        console.print(f"{now['member_id']} is {now['state']}{of}; `trireme pool undrain {member}` takes it back")

    return _shown(run, show, as_json=as_json)


def undrain(member: str, data_dir: Path | None, url: str | None, *, as_json: bool) -> int:
    """Returns the exit code."""

    async def ask(cluster: ClusterClient) -> dict[str, Any]:
        return await cluster.undrain_member(member)

    return answer(ask, lambda console, _: console.print(f"{member} may get work again"), data_dir, url, as_json=as_json)


def act(name: str, action: Action, wait_s: float, data_dir: Path | None, url: str | None, *, as_json: bool) -> int:
    """Pause, resume or cancel; wait at most `wait_s` until it is done. Returns the exit code."""

    async def ask(cluster: ClusterClient) -> dict[str, Any]:
        job = await cluster.act(checked_name(name), action)
        deadline = clock.monotonic() + wait_s
        while wait_s and job["standing"] not in REACHED[action]:
            if clock.monotonic() > deadline:
                msg = f"job {name} is still {job['state']} {wait_s:g} s after `trireme {action}`: {job['reason']}"
                raise DeadlineExceeded(msg, hint="it goes on; wait longer with --wait-s")
            await asyncio.sleep(POLL_S)
            job = await _now(name, data_dir, url) or job
        return job

    return answer(ask, _show_job, data_dir, url, as_json=as_json)


def delete(name: str, data_dir: Path | None, url: str | None, *, as_json: bool) -> int:
    """Returns the exit code."""

    async def ask(cluster: ClusterClient) -> dict[str, Any]:
        return await cluster.delete_job(checked_name(name))

    def show(console: Console, document: dict[str, Any]) -> None:
        console.print(f"job {document['job']} is deleted")

    return answer(ask, show, data_dir, url, as_json=as_json)


async def _now(name: str, data_dir: Path | None, url: str | None) -> dict[str, Any] | None:
    """The job; None while no leader answers: the next one goes on with what was asked for."""
    try:
        target = cluster_target(data_dir, url)
        async with ClusterClient(target.address, token=target.token) as cluster:
            full = await cluster.job_named(name)
    except PeerError:
        return None
    return {**full, "state": full["phase"]}


def _standing(state: str) -> str:
    """Raises UsageError."""
    if state.upper() not in set(Standing):
        msg = f"--state {state}: give one of {', '.join(each.lower() for each in Standing)}"
        raise UsageError(msg)
    return state.upper()


def _show_job(console: Console, job: dict[str, Any]) -> None:
    reason = without_tokens(job["reason"])
    console.print(f"job {job['job']} is {job['standing']}" + (f": {reason}" if reason else ""))


def answer(
    ask: Call,
    show: Callable[[Console, dict[str, Any]], None],
    data_dir: Path | None,
    url: str | None,
    *,
    as_json: bool,
) -> int:
    async def run() -> dict[str, Any]:
        target = cluster_target(data_dir, url)
        async with ClusterClient(target.address, token=target.token) as cluster:
            return await ask(cluster)

    return _shown(run, show, as_json=as_json)


def _shown(
    run: Callable[[], Coroutine[Any, Any, dict[str, Any]]],
    show: Callable[[Console, dict[str, Any]], None],
    *,
    as_json: bool,
) -> int:
    telemetry.configure(level="ERROR", json=False)
    try:
        document = asyncio.run(run())
    except TriremeError as error:
        return exit_codes.report_error(error, as_json=as_json)
    if as_json:
        print(json.dumps(document))  # noqa: T201
    else:
        show(stdout_console(), document)
    return exit_codes.OK
