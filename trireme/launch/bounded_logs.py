"""The logs of children are bounded: the disk that they lie on may be etcd's.

    a log is longer than LOG_BYTES ─► its content becomes <log>.1, over the one before, and it begins again
    a job is not in etcd any more (deleted, by its user or its retention) ─► its logs go after GONE_S
    a host has more than LOGS_BYTES of logs ─► the oldest that nobody writes now go

Children append, so a log may be cut while they write: what they write between the copy and the cut is lost.
Readers see that it has become shorter (trireme_shared/platform/runtime/log_files.py).
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path

from trireme_shared.platform.runtime import clock, telemetry
from trireme_shared.platform.security import private_files
from trireme_shared.protocol.errors import TriremeError

LOG_BYTES = 64 << 20
LOGS_BYTES = 2 << 30
LOOK_S = 5.0
SWEEP_S = 60.0
GONE_S = 600.0  # an etcd that was restored may not have the job yet
SUFFIX, BEFORE = ".log", ".1"

log = telemetry.logger("logs")


async def keep_bounded(folder: Path, log_bytes: int = LOG_BYTES) -> None:
    """Until cancelled: no log in `folder` is much longer."""
    while True:
        await asyncio.sleep(LOOK_S)
        try:
            await asyncio.to_thread(cut_long, folder, log_bytes)
        except OSError as error:
            log.warning("logs_not_cut", folder=str(folder), cause=str(error))


def cut_long(folder: Path, log_bytes: int) -> None:
    """Raises OSError."""
    for path, found in _files(folder):
        if path.suffix == SUFFIX and found.st_size > log_bytes:
            _cut(path)
            log.info("log_cut", log=str(path), bytes=found.st_size, before=path.name + BEFORE)


def _cut(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb+", buffering=0) as file:
        before = path.with_name(path.name + BEFORE)
        try:
            before.unlink(missing_ok=True)
            with private_files.open_private(before, "xb") as copy:
                shutil.copyfileobj(file, copy, 1 << 20)
        except OSError as error:  # a full disk above all needs the space
            log.warning("log_not_kept", log=str(before), cause=str(error))
            before.unlink(missing_ok=True)
        file.truncate(0)


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Those directly in it; links are left out."""
    try:
        entries = list(os.scandir(folder))
    except FileNotFoundError:
        return
    for entry in entries:
        with suppress(FileNotFoundError):
            if entry.is_file(follow_symlinks=False):
                yield Path(entry.path), entry.stat(follow_symlinks=False)


class HostLogs:
    """Of the jobs whose members run on a host: `logs`/<job>/*. `exists(job)`: whether the cluster still has
    the job; raises TriremeError if that is not known. `written()`: the logs of processes that live."""

    def __init__(
        self,
        logs: Path,
        exists: Callable[[str], Awaitable[bool]],
        written: Callable[[], Collection[Path]],
        *,
        log_bytes: int = LOG_BYTES,
        logs_bytes: int = LOGS_BYTES,
    ) -> None:
        self._logs, self._exists, self._written = logs, exists, written
        self._log_bytes, self._logs_bytes = log_bytes, logs_bytes
        self._gone: dict[str, float] = {}  # by job: since when it is known to be gone

    def __repr__(self) -> str:
        return f"<HostLogs {self._logs}: {len(self._gone)} jobs are gone>"

    async def run(self) -> None:
        """Until cancelled."""
        swept = clock.monotonic()
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await asyncio.to_thread(self._bound, frozenset(self._written()))
                if clock.monotonic() - swept >= SWEEP_S:
                    swept = clock.monotonic()
                    await self._sweep()
            except (TriremeError, TimeoutError) as error:
                log.debug("logs_not_swept", cause=str(error))
            except Exception:
                log.exception("logs_not_bounded", folder=str(self._logs))

    def _bound(self, written: Collection[Path]) -> None:
        for job in self._jobs():
            cut_long(self._logs / job, self._log_bytes)
        files = [found for job in self._jobs() for found in _files(self._logs / job)]
        much = sum(found.st_size for _, found in files) - self._logs_bytes
        for path, found in sorted(files, key=lambda file: file[1].st_mtime):
            if much <= 0:
                return
            if path.suffix in (SUFFIX, BEFORE) and path not in written:
                path.unlink(missing_ok=True)
                much -= found.st_size
                log.info("log_deleted", log=str(path), bytes=found.st_size, most_bytes=self._logs_bytes)

    async def _sweep(self) -> None:
        for job in await asyncio.to_thread(self._jobs):
            if await self._exists(job):
                self._gone.pop(job, None)
                continue
            since = self._gone.setdefault(job, clock.monotonic())
            folder = self._logs / job
            if clock.monotonic() - since >= GONE_S and not any(
                path.parent == folder for path in self._written()
            ):
                await asyncio.to_thread(shutil.rmtree, folder)
                del self._gone[job]
                log.info("logs_deleted", job=job)

    def _jobs(self) -> list[str]:
        with suppress(FileNotFoundError):
            return sorted(each.name for each in os.scandir(self._logs) if each.is_dir(follow_symlinks=False))
        return []
