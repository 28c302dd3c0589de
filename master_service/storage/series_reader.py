"""The metrics of jobs that nobody leads now, from their storage, for whoever asks.

asked ─► names of the files ─ as before ─► what was read then
                            └ other ones ─► read and decoded aside, AT_ONCE jobs at a time ─► kept: at most MOST_BUCKETS, or one job
"""

from __future__ import annotations

import asyncio
from functools import partial

from master_service.storage.series_files import Aside, SeriesFiles, StoredMetrics, read_all
from shared.errors import DeadlineExceeded, StorageUnreachable, TooManyRequests

AT_ONCE = 2  # a storage that hangs takes no more threads, which the leader needs
MOST_WAITING = 64  # jobs
READ_S = 8.0
MOST_BUCKETS = 1_000_000  # 48 MB


class SeriesReader:
    """`aside` runs what takes the processor for long: the event loop leads jobs meanwhile."""

    def __init__(self, aside: Aside = asyncio.to_thread) -> None:
        self._aside = aside
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._reading: dict[str, asyncio.Future[StoredMetrics]] = {}
        self._kept: dict[str, StoredMetrics] = {}  # the one that was asked for last is the last

    def __repr__(self) -> str:
        return f"<SeriesReader: {len(self._reading)} jobs being read, {len(self._kept)} kept>"

    async def read(self, job: str, stored: SeriesFiles | None) -> StoredMetrics:
        """`stored` None: the job keeps no metrics. Who asks for the same job meanwhile waits for the same read. Raises StorageUnreachable,
        TooManyRequests; DeadlineExceeded: it goes on, ask again."""
        if stored is None:
            return StoredMetrics()
        reading = self._reading.get(job)
        if reading is None:
            if len(self._reading) >= MOST_WAITING:
                raise TooManyRequests(f"the metrics of {MOST_WAITING} jobs are being read here, at most so many may be")
            reading = self._reading[job] = asyncio.ensure_future(self._read(job, stored))
            reading.add_done_callback(partial(self._ended, job))
        try:
            async with asyncio.timeout(READ_S):
                return await asyncio.shield(reading)
        except TimeoutError as error:
            raise DeadlineExceeded(f"the metrics of job {job} were not read within {READ_S:g} s; ask again") from error
        except OSError as error:
            raise StorageUnreachable(f"the stored metrics of job {job} cannot be read: {error}; ask again") from error

    def _ended(self, job: str, reading: asyncio.Future[StoredMetrics]) -> None:
        del self._reading[job]
        if not reading.cancelled():
            reading.exception()  # its callers may have left

    async def _read(self, job: str, stored: SeriesFiles) -> StoredMetrics:
        async with self._turns:
            found = await read_all(stored, self._kept.pop(job, None), self._aside)
        self._kept[job] = found
        while len(self._kept) > 1 and sum(map(_buckets, self._kept.values())) > MOST_BUCKETS:
            del self._kept[next(iter(self._kept))]
        return found


def _buckets(found: StoredMetrics) -> int:
    return sum(map(len, found.table.by_name.values()))
