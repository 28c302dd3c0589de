"""`trireme up`: a cluster on this machine in the foreground, or detached. `trireme down` ends it from
elsewhere.

settings -> folder locked -> LocalPool -> cluster.json for other commands
    -> one line a job, until Ctrl-C, SIGTERM or an error
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from trireme.cli import exit_codes
from trireme.cli.cluster.job_lines import ENDED, JobLines, job_lines
from trireme.cli.cluster.launchers import LauncherRequest, check_places, check_settings, pool_of
from trireme.cli.run import common_settings, tokens_of
from trireme.existing_etcd import check
from trireme.launch.interrupt import Terminal, hangup
from trireme.launch.processes import PYTHON_MODULE, tail_of
from trireme.launch.run_folder import check_port, told_if_full
from trireme.pool import cluster_folder
from trireme.pool.local_pool import START_TIMEOUT_S, LocalPool, PoolRequest
from trireme.pool.settings import default_trainers
from trireme.settings import UsageError, outside_script
from trireme.view.child_events import ChildEvent
from trireme.view.progress import say
from trireme_shared.platform.etcd.embedded import find_binary, sweep_sockets
from trireme_shared.platform.runtime import clock, output, telemetry
from trireme_shared.platform.security import private_files
from trireme_shared.platform.security.tokens import Role
from trireme_shared.platform.storage import files
from trireme_shared.protocol.errors import CallerError, DeadlineExceeded, NotFound, PeerError, TriremeError
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records.cluster import in_words

POLL_S = 1.0
LOOK_S = 0.1
LOG = "up.log"  # of a detached cluster


@dataclass(frozen=True, slots=True)
class UpRequest:
    """The command line; what was not given is None. `flags`: those that `trireme run` has as well."""

    flags: Mapping[str, Any]
    trainers: int | None = None
    pservers: int | None = None
    as_json: bool = False
    launcher: LauncherRequest = field(default_factory=LauncherRequest)
    job_retention_s: float | None = None
    insecure: bool = False


def up(request: UpRequest) -> int:
    """Returns the exit code: 0 if it was ended in order."""
    output.patient()
    telemetry.configure(level="ERROR", json=False)
    try:
        return asyncio.run(_up(request))
    except TriremeError as error:
        return exit_codes.report_error(error, as_json=request.as_json)
    except asyncio.CancelledError:
        return exit_codes.OK


async def _up(request: UpRequest) -> int:
    check_places(request.launcher, request.trainers, request.pservers)
    settings = outside_script(request.flags)
    check_settings(request.launcher, settings)
    trainers = default_trainers() if request.trainers is None else request.trainers
    pservers = 1 if request.pservers is None else request.pservers
    common = common_settings(settings, insecure=request.insecure)
    if common.port:
        check_port(common.host, common.port)
    if common.etcd is not None:
        await check(common.etcd, Keys(cluster_folder.NAME))
    else:
        find_binary()
    data_dir = Path(str(settings["data_dir"].value)) if "data_dir" in settings else None
    with cluster_folder.opened(data_dir) as folder, told_if_full(folder):
        storage = (
            files.absolute(str(settings["storage"].value)) if "storage" in settings else str(folder / "jobs")
        )
        await _check_storage(storage)
        asked = PoolRequest(
            trainers,
            pservers,
            storage,
            replace(common, tokens=tokens_of(folder, insecure=request.insecure)),
            max_trainers=request.launcher.max_trainers or 0,
            max_pservers=request.launcher.max_pservers or 0,
            hosts=request.launcher.kind != "none",
            job_retention_s=request.job_retention_s,
        )
        if told := private_files.told_of_sockets():
            say(told)
        screen = job_lines()
        pool = pool_of(request.launcher, asked, folder, lambda event: _tell(screen, event))
        try:
            with _interruptible(pool, screen):
                await _run(pool, screen, as_json=request.as_json)
        finally:
            screen.close()
    return exit_codes.OK


async def _run(pool: LocalPool, screen: JobLines, *, as_json: bool) -> None:
    unfinished: set[str] = set()
    try:
        async with pool:
            url = await pool.leader_url()
            cluster_folder.publish(pool.folder, url, pool.etcd_access)
            if as_json:
                document = {
                    "url": url,
                    **pool.etcd_access.facts(),
                    "pid": os.getpid(),
                    "folder": str(pool.folder),
                }
                print(json.dumps(document), flush=True)  # noqa: T201
            places = "host agents started by hand"
            if pool.request.hosts:
                places = (
                    f"places for {in_words('trainer', pool.request.trainers)} and "
                    f"{in_words('pserver', pool.request.pservers)}"
                )
            screen.event(f"cluster at {url} with {places}, logs in {pool.logs}")
            screen.event("submit a job with: trireme submit SCRIPT")
            where = f"TRIREME_URL={url}"
            if pool.settings.tokens is not None:
                file = pool.settings.tokens.file(Role.ADMIN)
                where += f" TRIREME_TOKEN_FILE={file}"
                screen.event(f"in a browser: {url}, with the token in {file}, or by `trireme dashboard`")
            screen.event(f"elsewhere: {where}")
            publish = partial(
                pool.publish, lambda url: cluster_folder.publish(pool.folder, url, pool.etcd_access)
            )
            pool.run_beside(publish, "telling commands the leader's address")
            pool.run_beside(partial(_draw, pool, screen, unfinished), "showing the jobs")
            await pool.wait()
    finally:
        if unfinished:
            names = ", ".join(sorted(unfinished))
            screen.event(f"unfinished: {names}; the same `trireme up` goes on with them")


def _tell(screen: JobLines, event: ChildEvent) -> None:
    match event.what:
        case "died" | "lost_lease" | "left":
            screen.event(f"{event.child} {event.end}: it is started again")
        case "given_up":
            screen.event(f"{event.child} {event.end}: it is not started again")
        case "grown" | "shrunk" | "waiting":
            screen.event(f"{event.child}: {event.cause}")
        case "unrecorded":
            screen.event(f"what happens to processes is not recorded ({event.cause})")


async def _draw(pool: LocalPool, screen: JobLines, unfinished: set[str]) -> None:
    while True:
        with contextlib.suppress(PeerError):  # no master now: a standby takes over, or it is started again
            async with pool.leader() as leader:
                jobs = [job async for job in leader.list_jobs()]
            unfinished.clear()
            unfinished |= {job.job for job in jobs if job.state not in ENDED}
            screen.show([job.model_dump(mode="json") for job in jobs], clock.monotonic())
        await asyncio.sleep(POLL_S)


@contextlib.contextmanager
def _interruptible(pool: LocalPool, screen: JobLines) -> Iterator[None]:
    """Ctrl-C, SIGTERM or a closed terminal: the members save and leave, then everything ends. A second one
    kills all at once."""
    run, loop, count = asyncio.current_task(), asyncio.get_running_loop(), 0
    assert run is not None
    terminal = Terminal()

    def on_signal() -> None:
        nonlocal count
        count += 1
        terminal.silence_if_closed()
        if count == 1:
            screen.event(
                "stopping: jobs save a checkpoint and their members leave; interrupt again to stop at once"
            )
            run.cancel()
        else:
            pool.kill_all()

    def on_hangup() -> None:
        if not count:
            on_signal()

    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, on_signal)
    try:
        with hangup(on_hangup):
            yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def _check_storage(url: str) -> None:
    """Raises UsageError."""
    try:
        await asyncio.to_thread(files.check_writable, url)
    except (OSError, ValueError, NotImplementedError, CallerError) as error:
        msg = f"the cluster's storage {url} cannot be used: {error}"
        raise UsageError(msg, hint="give another --storage") from error


# ---------------------------------------------------------------- detached, and down


def up_detached(arguments: list[str], data_dir: Path | None, *, as_json: bool) -> int:
    """Run `trireme` with these arguments (`up ...`) in a session of its own; returns the exit code once a
    master leads, or it has ended."""
    try:
        facts = asyncio.run(_detached(arguments, data_dir))
    except TriremeError as error:
        return exit_codes.report_error(error, as_json=as_json)
    document = cluster_folder.describe(facts)
    text = (
        f"cluster at {facts.url} (process {facts.pid}), log in {facts.folder / LOG}; `trireme down` ends it"
    )
    print(json.dumps(document) if as_json else text)  # noqa: T201
    return exit_codes.OK


async def _detached(arguments: list[str], data_dir: Path | None) -> cluster_folder.ClusterFacts:
    folder = cluster_folder.place_of(data_dir)
    if owner := cluster_folder.owner_of(folder):
        msg = f"a cluster runs already in {folder} (process {owner})"
        raise UsageError(msg, hint="`trireme down` ends it; another one needs another --data-dir")
    try:
        private_files.make_folder(folder)
        log = private_files.open_private(folder / LOG, "wb")
    except OSError as error:
        msg = (
            f"the data directory {folder.parent} cannot be written: {error.strerror}; choose another "
            "with --data-dir"
        )
        raise UsageError(msg) from error
    with log:
        # our own interpreter and module; it outlives this process
        process = subprocess.Popen(  # noqa: S603, ASYNC220
            [*PYTHON_MODULE, "trireme", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    deadline = clock.monotonic() + START_TIMEOUT_S
    while clock.monotonic() < deadline:
        if process.poll() is not None:
            raise PeerError(f"the cluster ended as it started: {tail_of(folder / LOG)}")
        if (facts := cluster_folder.find(data_dir)) is not None and facts.pid == process.pid:
            return facts
        await asyncio.sleep(LOOK_S)
    process.terminate()
    raise DeadlineExceeded(
        f"no master leads the cluster after {START_TIMEOUT_S:g} s: {tail_of(folder / LOG)}"
    )


def down(data_dir: Path | None, wait_s: float, *, as_json: bool) -> int:
    """End the cluster that runs there, in order; returns the exit code."""
    sweep_sockets()
    try:
        document = asyncio.run(_ended(data_dir, wait_s))
    except TriremeError as error:
        return exit_codes.report_error(error, as_json=as_json)
    print(json.dumps(document) if as_json else f"the cluster in {document['folder']} has ended")  # noqa: T201
    return exit_codes.OK


async def _ended(data_dir: Path | None, wait_s: float) -> dict[str, Any]:
    folder = cluster_folder.place_of(data_dir)
    owner = cluster_folder.owner_of(folder)
    if not owner:
        raise NotFound(f"no cluster runs in {folder}", hint="give its --data-dir")
    process: psutil.Process | None = None
    with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
        process = psutil.Process(owner)
        os.kill(owner, signal.SIGTERM)
    say(f"stopping the cluster in {folder} (process {owner}): jobs save a checkpoint and their members leave")
    deadline = clock.monotonic() + wait_s
    while cluster_folder.owner_of(folder) == owner or _lives(process):
        if clock.monotonic() > deadline:
            msg = f"the cluster in {folder} (process {owner}) has not ended after {wait_s:g} s"
            raise DeadlineExceeded(msg, hint="it goes on ending; wait longer with --wait-s")
        await asyncio.sleep(LOOK_S)
    return {"folder": str(folder), "pid": owner}


def _lives(process: psutil.Process | None) -> bool:
    """An interpreter goes on for a while after it gave the folder back."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process is not None and process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
