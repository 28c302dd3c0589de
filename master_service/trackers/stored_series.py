"""A job's stored metrics, read again and again: only the files that came since."""

from __future__ import annotations

from collections.abc import Callable

from master_service.core.state.series import SeriesTable
from master_service.core.state.whole_steps import WholeSteps
from master_service.storage.series_files import FOLDER, add_encoded, to_read
from shared.storage import files

ATTEMPTS = 5


def reader_of(storage: str) -> StoredSeriesReader:
    """Of the files in a job's storage."""
    folder = files.join(storage, FOLDER)
    return StoredSeriesReader(lambda: files.names(folder), lambda name: files.read_bytes(files.join(folder, name)))


class StoredSeriesReader:
    """`names`: of all files there are now; `read`: one of them; both block, and raise OSError. `table`, `steps`: as far as they were
    read."""

    def __init__(self, names: Callable[[], list[str]], read: Callable[[str], bytes]) -> None:
        self._names, self._content_of = names, read
        self._read: list[str] = []
        self.table, self.steps = SeriesTable(), WholeSteps()

    def look(self) -> None:
        """Read what is new. Raises OSError."""
        for _ in range(ATTEMPTS):
            try:
                self._look()
            except FileNotFoundError:  # a master has put them together meanwhile
                continue
            return
        raise OSError("the files of metrics changed whenever they were read")

    def _look(self) -> None:
        names = to_read(self._names())[0]
        known = self._read == names[: len(self._read)]
        table, steps = (self.table, self.steps) if known else (SeriesTable(), WholeSteps())
        contents = [(name, self._content_of(name)) for name in names[len(self._read) * known :]]
        for name, content in contents:
            add_encoded(table, steps, content, name)
        self.table, self.steps, self._read = table, steps, names
