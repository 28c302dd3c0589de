"""The folder of one job's runs: DATA_DIR/JOB/{spec.json, run.json, lock, etcd/, logs/, checkpoints/, export/,
...}.

One run at a time: the launcher holds a flock on the lock file while it lives, so a crash needs no cleaning
up. On a full disk the job's etcd cannot go on there, so the run ends with one message (DiskFull) and can be
resumed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trireme.settings import UsageError
from trireme_shared.platform.runtime import clock
from trireme_shared.platform.security import private_files
from trireme_shared.platform.security.access import family_of
from trireme_shared.platform.security.private_files import SocketFolder, sweep_socket_folders
from trireme_shared.protocol.errors import NotFound, TriremeError
from trireme_shared.protocol.records.job_choices import allowed_name

if TYPE_CHECKING:
    from trireme_shared.platform.etcd.embedded import EmbeddedEtcd


DATA_DIR = Path(".trireme")
RUN_FILE = "run.json"  # what other commands need to find the run
TIME_FILE = "time.json"
KEEP_S = 2.0
SOCKETS = "sockets"
PREFIX = "trireme-run-"
NEEDED_BYTES = 256 << 20  # etcd's log has two files of 64 MB, its data and their snapshots grow besides
LEAST_BYTES = 64 << 20  # below this etcd cannot begin the next file of its log
FULL = (errno.ENOSPC, errno.EDQUOT)
_WORDS = tuple(os.strerror(number).lower() for number in FULL)


@contextlib.contextmanager
def locked(data_dir: Path, lock_file: Path, taken: Callable[[str], UsageError]) -> Iterator[None]:
    """Hold a lock file in a folder of the data directory, with our process id in it. Raises UsageError if it
    cannot be written, `taken(process)` if another process has it."""
    try:
        private_files.make_folder(lock_file.parent)
        lock = private_files.open_private(lock_file, "a+")
    except OSError as error:
        msg = (
            f"the data directory {data_dir} cannot be written: {error.strerror}; choose another with "
            "--data-dir"
        )
        raise UsageError(msg) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.seek(0)
            raise taken(lock.read().strip() or "unknown") from error
        with told_if_full(lock_file.parent):
            lock.truncate(0)
            lock.write(f"{os.getpid()}\n")
            lock.flush()
        yield


@contextlib.contextmanager
def opened(data_dir: Path, job: str) -> Iterator[Path]:
    """The job's folder, locked for this run. Files of an earlier run are still in it (resume.py decides about
    them).

    Raises UsageError if it cannot be written or another run has the lock.
    """
    run_dir = (data_dir / job).absolute()

    def taken(process: str) -> UsageError:
        return UsageError(
            f"job {job} is already running in {run_dir} (process {process}); "
            "wait for its end, or run under another name: --job NAME"
        )

    with locked(data_dir, run_dir / "lock", taken):
        yield run_dir


def is_running(run_dir: Path) -> bool:
    """Whether a launcher holds the lock of that folder; True if that cannot be found out."""
    return is_locked(run_dir / "lock")


def is_locked(lock_file: Path) -> bool:
    """Whether a process holds the lock; True if that cannot be found out."""
    try:
        with lock_file.open("a+") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


class TimeSpent:
    """Seconds that the runs of a job took which resumed each other; the file is correct to KEEP_S if the
    launcher is killed."""

    def __init__(self, run_dir: Path) -> None:
        self._path, self._since = run_dir / TIME_FILE, clock.monotonic()
        self._before = float((read_json(self._path) or {}).get("seconds", 0.0))

    @property
    def seconds(self) -> float:
        return self._before + clock.monotonic() - self._since

    def save(self) -> None:
        """A disk that is full costs seconds of the report, not the run."""
        with contextlib.suppress(OSError):
            write_json(self._path, {"seconds": round(self.seconds, 3)})

    async def keep(self) -> None:
        """Until cancelled."""
        while True:
            self.save()
            await asyncio.sleep(KEEP_S)


def write_json(path: Path, document: dict[str, Any]) -> None:
    """The file appears complete or not at all."""
    temporary = path.with_name(f".{path.name}")
    private_files.write_text(temporary, json.dumps(document))
    temporary.replace(path)


def read_json(path: Path) -> dict[str, Any] | None:
    """None: there is no such file, or no JSON object in it."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def read_run_file(data_dir: Path, job: str | None) -> dict[str, Any] | None:
    """The facts of a job's run; without a name, of the run that started last. None if there is no run."""
    candidates = [data_dir / job / RUN_FILE] if job else list(data_dir.glob(f"*/{RUN_FILE}"))
    found = [(path.stat().st_mtime, path) for path in candidates if path.is_file()]
    if not found:
        return None
    facts: dict[str, Any] = json.loads(max(found)[1].read_text(encoding="utf-8"))
    return facts


def find_run(
    data_dir: Path | None, job: str | None, options: str = "--data-dir"
) -> tuple[Path, dict[str, Any]]:
    """The folder and the facts of a job's run, or of the run that started last. `data_dir` None:
    TRIREME_DATA_DIR or the default. Raises NotFound, whose hint names `options`."""
    place = data_dir or Path(os.environ.get("TRIREME_DATA_DIR") or DATA_DIR)
    job = allowed_name(job) if job else job
    facts = read_run_file(place, job)
    if facts is None:
        msg = f"{place} holds no run{f' of job {job}' if job else ''}"
        raise NotFound(msg, hint=f"start one with `trireme run SCRIPT`, or give {options}")
    return place / str(facts["job"]), facts


def find_begun_run(
    data_dir: Path | None, job: str | None, options: str = "--data-dir"
) -> tuple[Path, dict[str, Any] | None]:
    """As `find_run`, but also a run that no master has led yet: its facts are None. Raises NotFound."""
    place = data_dir or Path(os.environ.get("TRIREME_DATA_DIR") or DATA_DIR)
    named = [place / allowed_name(job)] if job else [path.parent for path in place.glob("*/lock")]
    begun = [folder for folder in named if not (folder / RUN_FILE).is_file() and is_running(folder)]
    if begun:
        return max(begun, key=lambda folder: (folder / "lock").stat().st_mtime), None
    return find_run(data_dir, job, options)


def other_runs(run_dir: Path) -> list[str]:
    """The names of all other jobs that have runs beside this one."""
    return sorted(
        path.parent.name for path in run_dir.parent.glob(f"*/{RUN_FILE}") if path.parent.name != run_dir.name
    )


@contextlib.contextmanager
def sockets(run_dir: Path) -> Iterator[SocketFolder]:
    """A new folder for UNIX sockets, removed afterwards. It is a temporary folder, because the path of a
    socket may have only 107 bytes; DATA_DIR/JOB/sockets links to it. Folders that killed runs of this user
    left behind are removed first, whatever they were of. Raises InvalidArgument: no folder is short
    enough."""
    sweep_socket_folders(PREFIX)
    link = run_dir / SOCKETS
    link.unlink(missing_ok=True)
    folder = SocketFolder(PREFIX)
    try:
        link.symlink_to(folder.path)
        yield folder
    finally:
        link.unlink(missing_ok=True)
        folder.remove()


def check_port(host: str, port: int) -> None:
    """Raises UsageError if the port cannot be bound."""
    with socket.socket(family_of(host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            msg = (
                f"port {port} of {host} is not free: {error.strerror}; choose another --port, or 0 for "
                "any free one"
            )
            raise UsageError(msg) from error


class DiskFull(TriremeError):
    """No space is left under the run's folder. The job is unfinished and resumes once there is space."""

    code, status = "DISK_FULL", 507

    @classmethod
    def under(cls, folder: Path, cause: str) -> DiskFull:
        free = shutil.disk_usage(folder).free
        return cls(
            f"the disk of {folder} is full ({free >> 20} MiB are free): {cause}",
            hint=f"free at least {NEEDED_BYTES >> 20} MiB there, then the same command resumes the job",
            folder=str(folder),
            free_bytes=free,
            needed_bytes=NEEDED_BYTES,
        )


class EtcdDamaged(TriremeError):
    """The etcd that belongs to the folder cannot read its own files. What only it knew is lost: the state of
    jobs, their queues. Checkpoints and exports lie in the jobs' storage."""

    code, status = "ETCD_DAMAGED", 500


@contextmanager
def told_if_full(folder: Path) -> Iterator[None]:
    """Raises DiskFull for the errors of our own writes that mean a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise DiskFull.under(folder, str(error)) from error


def is_full(folder: Path) -> bool:
    """Whether an etcd cannot go on there now."""
    return shutil.disk_usage(folder).free < LEAST_BYTES


def etcd_lacks_space(embedded: EmbeddedEtcd) -> bool:
    """Whether an etcd that ended by itself did so because its disk is full, or a quota used up."""
    return is_full(embedded.data_dir) or any(words in embedded.last_words().lower() for words in _WORDS)
