"""Rows of a table in a chain of parts, a whole one and deltas: read newest first, each id counts where it is seen first.

newest delta --rows, gone--> next_older() --> delta before it ... --> the whole part
"""

from __future__ import annotations

import numpy as np

from trireme_shared.tables.memory import Numbers
from trireme_shared.tables.table import Flags, RowsOfIds


class Chain:
    """Of one table; the part that is read is the newest one at first."""

    def __init__(self) -> None:
        self._newer = np.empty(0, np.int64)  # ascending
        self._here: list[Numbers] = []

    def rows(self, rows: RowsOfIds) -> RowsOfIds:
        """Those of this part that no newer part tells of."""
        self._here.append(rows.ids)
        return rows.where(self._is_new(rows.ids)) if len(self._newer) else rows

    def gone(self, ids: Numbers) -> Numbers:
        """The same of ids without a row, or whose row has expired. After the part's rows: an id that is among them has come back."""
        self._here.append(ids)
        return ids[self._is_new(ids)]

    def next_older(self) -> None:
        """All of this part was seen."""
        self._newer, self._here = np.unique(np.concatenate([self._newer, *self._here])), []

    def _is_new(self, ids: Numbers) -> Flags:
        if not len(self._newer):
            return np.ones(len(ids), np.bool_)
        places = np.searchsorted(self._newer, ids)
        places[places == len(self._newer)] = 0
        new: Flags = self._newer[places] != ids
        return new
