"""Counts of a dataset that was not counted to its end: the next master goes on where the last one was stopped.

file counted --every KEEP_S, and when stopped--> {storage}/counting-<digest>.json --next master--> taken if the file is unchanged
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable

from master_service.core.queue.file_table import TableFile, TaskSizes
from trireme_shared.platform.runtime import clock, telemetry
from trireme_shared.platform.storage import files
from trireme_shared.protocol.errors import TriremeError
from trireme_shared.protocol.records.datasets import Dataset

KEEP_S = 5.0

Counter = Callable[[str], TableFile]
log = telemetry.logger("partial_counts")


class CountingStopped(Exception):
    """The master that counted was asked to stop, or leads no more."""


class PartialCounts:
    """Of one dataset whose tasks are cut in one way. Its methods block; several threads may count at once. What cannot be kept or read is
    counted again."""

    def __init__(self, storage_url: str, dataset: Dataset, sizes: TaskSizes | int) -> None:
        self.stop = threading.Event()
        named = f"{sizes!r} {dataset.model_dump_json()}".encode()
        self._url = files.join(storage_url, f"counting-{hashlib.sha256(named).hexdigest()[:32]}.json")
        self._counted: dict[str, tuple[str, TableFile]] = {}
        self._lock = threading.Lock()
        self._kept_at = 0.0
        self._kept = 0

    def load(self) -> None:
        """What an earlier master has kept. In the thread that counts."""
        self._kept_at = clock.monotonic()
        try:
            stored = json.loads(files.read_bytes(self._url))
            for file in map(TableFile.from_map, stored["files"]):
                self._counted[file.path] = str(stored["stamps"][file.path]), file
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, TriremeError) as error:
            log.warning("counts_unreadable", url=self._url, cause=str(error))
            return
        self._kept = len(self._counted)
        log.info("counting_goes_on", files=self._kept)

    def counted(self, url: str, count: Counter) -> TableFile:
        """The count of a file, as kept if the file is unchanged. Raises CountingStopped, and what `count` raises."""
        self.check()
        stamp = files.stamp(url)
        known, file = self._counted.get(url, ("", None))
        if stamp and file is not None and known == stamp:
            return file
        file = count(url)
        if stamp:
            with self._lock:
                self._counted[url] = stamp, file
        return file

    def check(self) -> None:
        """Raises CountingStopped."""
        if self.stop.is_set():
            raise CountingStopped

    def keep(self, *, now: bool = False) -> None:
        """Write what is counted, every KEEP_S or `now`."""
        with self._lock:
            counted = dict(self._counted)
        if len(counted) <= self._kept or (not now and clock.monotonic() - self._kept_at < KEEP_S):
            return
        stored = {
            "stamps": {url: stamp for url, (stamp, _) in counted.items()},
            "files": [file.to_map() for _, file in counted.values()],
        }
        try:
            files.write_bytes(self._url, json.dumps(stored, separators=(",", ":")).encode())
        except (OSError, TriremeError) as error:
            log.warning("counts_not_kept", url=self._url, cause=str(error))
        self._kept, self._kept_at = len(counted), clock.monotonic()

    def remove(self) -> None:
        """The whole dataset is counted."""
        if self._kept:
            try:
                files.remove_file(self._url)
            except (OSError, TriremeError) as error:
                log.warning("counts_not_removed", url=self._url, cause=str(error))
