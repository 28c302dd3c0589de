"""`trireme chaos kill`: SIGKILL one process of a running local job and show what it cost (receipt.py).

run.json, children.jsonl --> who runs --> kill --> receipt
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from dataclasses import asdict
from pathlib import Path

import psutil

from trireme.cli import exit_codes
from trireme.cli.faults.job_probe import JobProbe
from trireme.cli.faults.receipt import Receipt, measure, observe
from trireme.cli.targets import cluster_of
from trireme.launch import resume, run_folder
from trireme.view.child_events import read_events
from trireme_shared.platform.runtime import ids, telemetry
from trireme_shared.protocol.errors import Conflict, NotFound, TriremeError


def kill(name: str | None, job: str | None, data_dir: Path | None, *, at_random: bool, as_json: bool) -> int:
    """Returns the exit code."""
    telemetry.configure(level="ERROR", json=False)
    try:
        if (cluster := cluster_of(job, data_dir, None)) is not None:
            msg = f"trireme chaos kill ends processes of a `trireme run` in a data folder of this machine, not at {cluster.address}"
            hint = "`trireme pool` shows on which host a member of a cluster runs: kill it there, or `trireme pool drain` it"
            raise Conflict(msg, hint=hint)
        folder, _ = run_folder.find_run(data_dir, job)
        receipt = asyncio.run(kill_one(folder, _victim(folder, name, at_random=at_random)))
    except TriremeError as error:
        return exit_codes.report_error(error, as_json=as_json)
    print(json.dumps(asdict(receipt)) if as_json else receipt.text())  # noqa: T201
    return exit_codes.OK


async def kill_one(folder: Path, name: str) -> Receipt:
    """SIGKILL the child `name` of the run in `folder` and wait until training goes on. Raises NotFound, DeadlineExceeded."""
    async with JobProbe(folder) as probe:
        pid = alive(folder).get(name, 0)
        before = await observe(probe)
        try:
            if pid == 0:
                raise ProcessLookupError
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError as error:
            msg = f"{name} ended by itself before it could be killed"
            raise NotFound(msg, hint="is the job over? see `trireme status`") from error
        return await measure(probe, before, {name: pid}, master=name.startswith("master-"))


def alive(folder: Path) -> dict[str, int]:
    """Name -> pid of the children of the run in `folder`."""
    found: dict[str, int] = {}
    for event in read_events(folder):
        if event["what"] in ("started", "restarted"):
            found[event["child"]] = event["pid"]
        elif event["what"] in ("died", "lost_lease", "given_up", "finished"):
            found.pop(event["child"], None)
    return {child: pid for child, pid in found.items() if _is_child(child, pid)}


def _victim(folder: Path, name: str | None, *, at_random: bool) -> str:
    """A child that is alive. Raises NotFound."""
    names = sorted(alive(folder))
    if not names:
        msg = f"no process of the run in {folder} is alive"
        raise NotFound(msg, hint="start it with `trireme run SCRIPT`")
    if at_random:
        return ids.source.choice(names)
    if name == "etcd" and (existing := run_folder.read_json(folder / resume.ETCD_FILE)):
        msg = f"the etcd of this job, at {existing['etcd']}, was not started by trireme run, which kills only its own processes"
        raise NotFound(msg, hint="stop it with its own tools")
    if name not in names:
        msg = f"no process {name!r} is alive; alive are {', '.join(names)}"
        raise NotFound(msg)
    return name


def _is_child(name: str, pid: int) -> bool:
    """The pid may belong to another process by now."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        if name == "etcd":
            return "etcd" in process.name()
        # for a forked process /proc/PID/environ is the fork server's
        forked = f"[{name}]" in " ".join(process.cmdline())
        return forked or process.environ().get("TRIREME_NAME") == name
    except psutil.Error:
        return False
