"""`trireme doctor`: whether a job can run on this machine, and how long a recovery may take at most."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from master_service.control.pause_runner import seconds_between
from trireme.cli.version import version_of
from trireme.launch import run_folder
from trireme.launch.run_folder import DATA_DIR
from trireme.launch.supervision import HOST
from trireme_shared.platform.etcd import NoSpace, Space
from trireme_shared.platform.etcd.embedded import READY_TIMEOUT_S, find_binary
from trireme_shared.platform.membership.etcd_access import EtcdAccess
from trireme_shared.platform.membership.settings import MemberSettings
from trireme_shared.platform.runtime import process_setup
from trireme_shared.platform.runtime.limits import cores
from trireme_shared.protocol.errors import PeerError, TriremeError
from trireme_shared.protocol.records import JobSpec

LATE_EXPIRY_S = 0.5  # etcd may revoke an expired lease this late
MASTER_TTL_S = 3.0
ANSWER_S = 3.0


def examine(data_dir: Path | None, *, as_json: bool) -> int:
    """Returns 0 if a job can run here, else 1."""
    checks: dict[str, Callable[[], str]] = {
        "python": lambda: f"{platform.python_version()} on {platform.platform(terse=True)}, {cores()} cores",
        "torch": lambda: _installed("torch"),
        "hashing": lambda: (
            f"{process_setup.HASH_SEED}={process_setup.hash_seed(os.environ)} in all members that "
            "are started here"
        ),
        "etcd": _etcd,
        "space": lambda: _space(data_dir or DATA_DIR),
        "ports": _ports,
        "data": lambda: _data(data_dir or DATA_DIR),
    }
    findings = {name: _find(check) for name, check in checks.items()}
    bounds, losses = recovery_bounds(), loss_bounds()
    if as_json:
        shown = {name: {"ok": ok, "text": text} for name, (ok, text) in findings.items()}
        print(json.dumps({"checks": shown, "recovery_bounds_s": bounds, "loss_bounds_s": losses}))  # noqa: T201
    else:
        for name, (ok, text) in findings.items():
            print(f"{'ok ' if ok else 'BAD'}  {name:<8} {text}")  # noqa: T201
        print("\nLongest time from the last fault until the job makes progress again (default settings):")  # noqa: T201
        for what, seconds in bounds.items():
            print(f"  {seconds:5.1f} s  {what}")  # noqa: T201
        print("\nAsynchronous: a parameter server that dies loses at most what was trained in this time")  # noqa: T201
        print("(default settings, beside the time to copy and write one checkpoint):")  # noqa: T201
        for what, seconds in losses.items():
            print(f"  {seconds:5.1f} s  {what}")  # noqa: T201
    return 0 if all(ok for ok, _ in findings.values()) else 1


def _find(check: Callable[[], str]) -> tuple[bool, str]:
    """Whether it is good, and what was found."""
    try:
        return True, check()
    except TriremeError as error:
        return False, f"{error.message}; {error.hint}" if error.hint else error.message
    except (OSError, subprocess.SubprocessError) as error:
        return False, f"{type(error).__name__}: {error}"


def _installed(package: str) -> str:
    version = version_of(package)
    if version == "not installed":
        raise FileNotFoundError(package)
    return version


def _etcd() -> str:
    binary = find_binary()
    output = subprocess.run(  # noqa: S603
        [str(binary), "--version"], capture_output=True, text=True, timeout=20, check=True
    )
    return f"{output.stdout.splitlines()[0].removeprefix('etcd Version: ')} at {binary}"


def _space(data_dir: Path) -> str:
    """Of the etcd in TRIREME_ETCD, else of the run that started last. Raises NoSpace."""
    facts = None if os.environ.get("TRIREME_ETCD") else run_folder.read_run_file(data_dir, None)
    if facts is None and not os.environ.get("TRIREME_ETCD"):
        return f"{data_dir} holds no run, and TRIREME_ETCD names no etcd to ask"
    access = MemberSettings(job="doctor").etcd_access if facts is None else EtcdAccess.from_facts(facts)
    where = str(access)
    try:
        space = asyncio.run(_asked(access))
    except PeerError:
        if facts is None:
            raise
        return f"the etcd of job {facts['job']} does not run"
    if space.full:
        raise NoSpace.told(where)
    return f"etcd at {where} has stored {space.used_bytes / (1 << 20):.0f} MiB"


async def _asked(access: EtcdAccess) -> Space:
    etcd = access.connect()
    try:
        return await etcd.space(timeout_s=ANSWER_S)
    finally:
        await etcd.close()


def _ports() -> str:
    run_folder.check_port(HOST, 0)
    return f"{HOST} can be bound"


def _data(data_dir: Path) -> str:
    place = data_dir.absolute()
    while not place.exists():
        place = place.parent
    with tempfile.TemporaryFile(dir=place):
        free = shutil.disk_usage(place).free
    return f"{data_dir} can be written, {free / (1 << 30):.0f} GiB free"


def recovery_bounds() -> dict[str, float]:
    """Seconds, from the default time-outs: a lease expires TTL after its last renewal, and etcd deletes it up
    to 0.5 s later."""
    lease_s = float(JobSpec.model_fields["lease_ttl_s"].default) + LATE_EXPIRY_S
    master_s = MASTER_TTL_S + LATE_EXPIRY_S
    return {
        "a trainer's host disappears or freezes (its lease expires)": lease_s,
        "the master's host disappears and there is a standby (its lease expires)": master_s,
        "both at once (the new master sees the trainer's lease expire)": max(lease_s, master_s),
        "etcd dies with them (it restarts, and leases get their full time again)": READY_TIMEOUT_S
        + max(lease_s, master_s),
    }


def loss_bounds() -> dict[str, float]:
    """Seconds, from the default settings."""
    every_s = float(JobSpec.model_fields["checkpoint_every_seconds"].default)
    lease_s = float(JobSpec.model_fields["lease_ttl_s"].default) + LATE_EXPIRY_S
    return {
        "the others live, or trainers die or freeze (left out of a checkpoint after 1 s)": seconds_between(
            every_s
        ),
        "another parameter server freezes in a checkpoint (given up after 1.5 s) and wakes before "
        "its lease expires": (seconds_between(every_s, frozen_s=lease_s)),
    }
