"""Which ids have left a table lately, so that a delta can name them; bounded, then it is not known."""

from __future__ import annotations

import numpy as np

from trireme_shared.tables.memory import Numbers

LEAST_KEPT = 1 << 16  # ids, whatever the size of the table


class RemovedIds:
    """Of a table that begins at `version`."""

    def __init__(self, version: int) -> None:
        self._floor = version
        self._log: list[tuple[int, Numbers]] = []
        self.count = 0

    def __repr__(self) -> str:
        return f"<RemovedIds: {self.count} since version {self._floor}>"

    def add(self, version: int, ids: Numbers, rows: int) -> None:
        """They left in the step to `version`. `rows`: of the table. More than a quarter of it are not kept: a delta would be no smaller."""
        self._log.append((version, ids))
        self.count += len(ids)
        if self.count > max(LEAST_KEPT, rows // 4):
            self.lose(version)

    def lose(self, version: int) -> None:
        """Rows came or went otherwise by `version`: what has changed since then or before is not known."""
        self._floor, self._log, self.count = version + 1, [], 0

    def since(self, version: int) -> Numbers | None:
        """int64 (n,), ascending: those that have left since `version`; some may have come back. None: not known."""
        if version < self._floor:
            return None
        found = [ids for left, ids in self._log if left >= version]
        return np.unique(np.concatenate(found)) if found else np.empty(0, np.int64)

    def forget(self, version: int) -> None:
        """Nobody will ask for versions before it."""
        self._floor = max(self._floor, version)
        self._log = [entry for entry in self._log if entry[0] >= version]
        self.count = sum(len(ids) for _, ids in self._log)

    def copy(self) -> RemovedIds:
        found = RemovedIds(self._floor)
        found._log, found.count = list(self._log), self.count
        return found
