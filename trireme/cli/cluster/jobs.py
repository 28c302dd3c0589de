"""`trireme jobs | schedules | pool | pause | resume | cancel | delete`: asked of a cluster's leader, also
right after `trireme up` and while another master takes over."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, Literal, TypeVar

from rich.console import Console

from trireme.cli import exit_codes
from trireme.cli.cluster.job_table import row_of, table
from trireme.cli.queries import print_table, stdout_console
from trireme.cli.targets import checked_name, cluster_target
from trireme.client import AsyncClient
from trireme.client.exchange import result_of
from trireme.settings import UsageError
from trireme.view.job_address import LONG_POLL_S, client_of
from trireme.view.progress import say
from trireme.view.report import without_tokens
from trireme_shared.platform.runtime import clock, telemetry
from trireme_shared.protocol.errors import (
    DeadlineExceeded,
    NotFound,
    NotLeader,
    NotReady,
    PeerError,
    TriremeError,
)
from trireme_shared.protocol.records.cluster import Standing
from trireme_shared.protocol.records.operations import Operation
from trireme_shared.protocol.rest_cluster import PoolMemberView

POLL_S = 0.3
REACHED = {
    "pause": (Standing.PAUSED, Standing.COMPLETED, Standing.FAILED, Standing.CANCELLED),
    "cancel": (Standing.CANCELLED, Standing.COMPLETED, Standing.FAILED),
    "resume": tuple(standing for standing in Standing if standing is not Standing.PAUSED),
}
LEADER_S = 60.0
PAUSE_S = 0.3
Action = Literal["pause", "resume", "cancel"]
Call = Callable[[AsyncClient], Awaitable[dict[str, Any]]]
A = TypeVar("A")


def list_jobs(
    state: str | None, data_dir: Path | None, url: str | None, *, as_json: bool, wide: bool = False
) -> int:
    """`wide`: lines are whole although a terminal is narrower. Returns the exit code."""

    async def ask(cluster: AsyncClient) -> dict[str, Any]:
        wanted = _standing(state) if state else None
        return {"jobs": [job.model_dump(mode="json") async for job in cluster.list_jobs(state=wanted)]}

    def show(console: Console, document: dict[str, Any]) -> None:
        rows = [row_of(job, clock.wall_time()) for job in document["jobs"]]
        ellipsis = "…" if console.encoding.startswith("utf") else "..."
        lines = table(rows, None if wide else console.width, ellipsis)
        print("\n".join(lines))  # noqa: T201

    return answer(ask, show, data_dir, url, as_json=as_json)


def list_pool(data_dir: Path | None, url: str | None, *, as_json: bool) -> int:
    """Returns the exit code."""

    async def ask(cluster: AsyncClient) -> dict[str, Any]:
        return {"members": [member.model_dump(mode="json") async for member in cluster.list_pool_members()]}

    def show(console: Console, document: dict[str, Any]) -> None:
        mixed = len({member["trireme_version"] for member in document["members"]}) > 1
        more = ("trireme_version",) if mixed else ()
        columns = ("member_id", "state", "job", "host", "cores", "device", *more, "trouble")
        print_table(console, columns, document["members"])

    return answer(ask, show, data_dir, url, as_json=as_json)


def list_job_tasks(
    name: str, task: str | None, data_dir: Path | None, url: str | None, *, as_json: bool
) -> int:
    """`task`: only that one, with its output. Returns the exit code."""

    async def ask(cluster: AsyncClient) -> dict[str, Any]:
        page = await cluster.list_job_tasks(checked_name(name))
        found = [each.model_dump(mode="json") for each in page.job_tasks]
        if task is None:
            return {"job_tasks": found}
        for each in found:
            if each["name"] == task:
                return each
        known = ", ".join(each["name"] for each in found) or "none"
        raise NotFound(
            f"job {name} has no task {task}; there are: {known}", hint=f"`trireme job-tasks {name}`"
        )

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

        async def asked_again() -> PoolMemberView:  # which changes nothing
            limit_s = max(POLL_S, deadline - clock.monotonic()) if wait_s else LEADER_S
            return await ask_leader(lambda leader: leader.drain_pool_member(member), data_dir, url, limit_s)

        now = await asked_again()
        while wait_s and now.state != "drained":
            if clock.monotonic() > deadline:
                msg = (
                    f"{member} is still {now.state} {wait_s:g} s after it was drained: it runs job {now.job}"
                )
                raise DeadlineExceeded(msg, hint="it goes on; wait longer with --wait-s")
            await asyncio.sleep(POLL_S)
            now = await asked_again()
        return now.model_dump(mode="json")

    def show(console: Console, now: dict[str, Any]) -> None:
        of = f": it leaves job {now['job']}" if now["job"] else ""
        console.print(
            f"{now['member_id']} is {now['state']}{of}; `trireme pool undrain {member}` takes it back"
        )

    return _shown(run, show, as_json=as_json)


def undrain(member: str, data_dir: Path | None, url: str | None, *, as_json: bool) -> int:
    """Returns the exit code."""

    async def ask(cluster: AsyncClient) -> dict[str, Any]:
        await cluster.undrain_pool_member(member)
        return {}

    return answer(
        ask, lambda console, _: console.print(f"{member} may get work again"), data_dir, url, as_json=as_json
    )


def act(
    name: str, action: Action, wait_s: float, data_dir: Path | None, url: str | None, *, as_json: bool
) -> int:
    """Pause, resume or cancel; wait at most `wait_s` until it is done. Returns the exit code."""

    async def ask(cluster: AsyncClient) -> dict[str, Any]:
        acts = {"pause": cluster.pause_job, "resume": cluster.resume_job, "cancel": cluster.cancel_job}
        await acts[action](checked_name(name))
        job = (await cluster.get_job(name)).model_dump(mode="json")
        deadline = clock.monotonic() + wait_s
        while wait_s and job["standing"] not in REACHED[action]:
            if clock.monotonic() > deadline:
                msg = (
                    f"job {name} is still {job['state']} {wait_s:g} s after `trireme {action}`: "
                    f"{job['reason']}"
                )
                raise DeadlineExceeded(msg, hint="it goes on; wait longer with --wait-s")
            await asyncio.sleep(POLL_S)
            job = await _now(name, data_dir, url) or job
        return job

    return answer(ask, _show_job, data_dir, url, as_json=as_json)


def delete(name: str, data_dir: Path | None, url: str | None, *, as_json: bool) -> int:
    """Returns the exit code."""

    async def ask(cluster: AsyncClient) -> dict[str, Any]:
        begun = await cluster.delete_job(checked_name(name))

        async def look(leader: AsyncClient) -> Operation:
            return await leader.get_operation(name, begun.operation_id, wait_s=LONG_POLL_S)

        while begun.running:
            begun = await ask_leader(look, data_dir, url)
        return {"job": name, **result_of(begun).model_dump(mode="json")}

    def show(console: Console, document: dict[str, Any]) -> None:
        console.print(f"job {document['job']} is deleted")

    return answer(ask, show, data_dir, url, as_json=as_json)


def list_schedules(data_dir: Path | None, url: str | None, *, as_json: bool) -> int:
    """Returns the exit code."""

    async def ask(cluster: AsyncClient) -> dict[str, Any]:
        return {"schedules": [each.model_dump(mode="json") async for each in cluster.list_schedules()]}

    def show(console: Console, document: dict[str, Any]) -> None:
        columns = ("name", "cron", "time_zone", "concurrency", "next_time", "last_job", "reason")
        print_table(console, columns, document["schedules"])

    return answer(ask, show, data_dir, url, as_json=as_json)


def delete_schedule(name: str, data_dir: Path | None, url: str | None, *, as_json: bool) -> int:
    """Returns the exit code."""

    async def ask(cluster: AsyncClient) -> dict[str, Any]:
        return (await cluster.delete_schedule(checked_name(name))).model_dump(mode="json")

    def show(console: Console, document: dict[str, Any]) -> None:
        console.print(f"schedule {document['name']} is deleted; its jobs go on")

    return answer(ask, show, data_dir, url, as_json=as_json)


async def _now(name: str, data_dir: Path | None, url: str | None) -> dict[str, Any] | None:
    """The job; None while no leader answers: the next one goes on with what was asked for."""
    try:
        target = cluster_target(data_dir, url)
        async with client_of(target.address, target.token) as cluster:
            return (await cluster.get_job(name)).model_dump(mode="json")
    except PeerError:
        return None


def _standing(state: str) -> Standing:
    """Raises UsageError."""
    try:
        return Standing(state.upper())
    except ValueError:
        raise UsageError(
            f"--state {state}: give one of {', '.join(each.lower() for each in Standing)}"
        ) from None


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
        async with client_of(target.address, target.token) as cluster:
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


async def ask_leader(
    ask: Callable[[AsyncClient], Awaitable[A]],
    data_dir: Path | None,
    url: str | None,
    limit_s: float = LEADER_S,
) -> A:
    """What `ask` answers. While no master leads, it is asked again, so it must do no harm when repeated.
    Raises DeadlineExceeded if that lasts for `limit_s`; NotFound: no cluster runs here; PeerError: nothing
    answers at a URL that was given; what `ask` raises."""
    deadline, told = clock.monotonic() + limit_s, False
    given = bool(url or os.environ.get("TRIREME_URL"))
    while True:
        try:
            target = cluster_target(data_dir, url)
            async with client_of(target.address, target.token) as cluster:
                return await ask(cluster)
        except PeerError as error:
            if not _passes(error, given=given):
                raise
            if clock.monotonic() > deadline:
                msg = f"waited {limit_s:g} s for a master to lead the cluster: {error.message}"
                raise DeadlineExceeded(
                    msg, hint="`trireme up` shows whether it runs; its logs say more"
                ) from error
            if not told:
                say(f"waiting up to {limit_s:g} s for a master to lead the cluster: {error.message}")
            told = True
        await asyncio.sleep(PAUSE_S)


def _passes(error: PeerError, *, given: bool) -> bool:
    """Whether the next leader will do better. The cluster of a folder is known to run; a URL may be wrong."""
    return isinstance(error, NotLeader | NotReady) or (
        not given and type(error) in (PeerError, DeadlineExceeded)
    )
