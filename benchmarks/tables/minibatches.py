"""Ids and gradients, the same for every way: by number. Needs numpy alone, for peers in virtual environments
of their own."""

from __future__ import annotations

import numpy as np

ZIPF, SMALL, LR = 1.1, 2000, 0.01
FILL = 1 << 18  # rows are made in pieces of so many, by a step without a gradient
SEED, SCALE = 7, 0.01  # of the rows' initial values


class Minibatches:
    """`all`: int64, each id that has a row. A minibatch has `ids` of them, Zipf 1.1, with repetitions;
    popular ones are everywhere."""

    def __init__(self, rows: int, dim: int, ids: int) -> None:
        rng = np.random.default_rng(1)
        self.all = np.unique(rng.integers(0, 2**62, rows))
        self.rows, self.dim, self.ids = len(self.all), dim, ids
        weights = 1.0 / np.arange(1, self.rows + 1) ** ZIPF
        self._edges = np.cumsum(weights / weights.sum())

    def places(self, number: int, ids: int | None = None) -> np.ndarray:
        """int64 (ids,): where they are in `all`."""
        rng = np.random.default_rng(1000 + number)
        found = np.searchsorted(self._edges, rng.random(ids or self.ids))
        return (np.minimum(found, self.rows - 1) * 2_654_435_761) % self.rows

    def of(self, number: int) -> np.ndarray:
        """int64 (ids,)."""
        return self.all[self.places(number)]

    def few(self, number: int) -> np.ndarray:
        """int64 (SMALL,) that differ."""
        return self.all[
            np.random.default_rng((2, 1000 + number)).choice(self.rows, min(SMALL, self.rows), replace=False)
        ]

    def gradients(self, number: int) -> np.ndarray:
        """float32 (ids, dim), of each occurrence."""
        return np.random.default_rng(number).standard_normal((self.ids, self.dim), np.float32)

    def pieces(self) -> list[np.ndarray]:
        """`all`, in pieces of FILL."""
        return [self.all[first : first + FILL] for first in range(0, self.rows, FILL)]
