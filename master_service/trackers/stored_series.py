"""A job's stored metrics, read again and again: only the files that came since."""

from __future__ import annotations

from master_service.core.state.series import SeriesTable
from master_service.core.state.whole_steps import WholeSteps
from master_service.storage.series_files import FOLDER, add_encoded, to_read
from shared.storage import files

ATTEMPTS = 5


class StoredSeriesReader:
    """Blocks. `table`, `steps`: as far as they were read."""

    def __init__(self, storage: str) -> None:
        self._folder = files.join(storage, FOLDER)
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
        names = to_read(files.names(self._folder))[0]
        known = self._read == names[: len(self._read)]
        table, steps = (self.table, self.steps) if known else (SeriesTable(), WholeSteps())
        contents = [
            (name, files.read_bytes(files.join(self._folder, name))) for name in names[len(self._read) * known :]
        ]
        for name, content in contents:
            add_encoded(table, steps, content, name)
        self.table, self.steps, self._read = table, steps, names
