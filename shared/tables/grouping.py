"""The occurrences of ids in a minibatch, those of an id together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Grouped:
    """`given`: int64 (n,), the occurrences as they came. `ids`: int64 (k,), ascending, each once. `order`: int64 (n,): the occurrences, by id; of an id in the order in which torch coalesces
    sparse gradients: that of its sort, which does not keep equal ids in theirs. `starts`: int64 (k + 1,): where each id's begin, and the end."""

    given: Numbers
    ids: Numbers
    order: Numbers
    starts: Numbers

    def numbers(self) -> Numbers:
        """int64 (n,): of each occurrence, which of `ids` it is."""
        found = np.empty(len(self.order), np.int64)
        found[self.order] = np.repeat(np.arange(len(self.ids)), np.diff(self.starts))
        return found


def grouped(ids: Numbers) -> Grouped:
    """int64 (n,)."""
    ordered, order = (found.numpy() for found in torch.from_numpy(ids).sort())
    first = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1]))) if len(ids) else np.empty(0, np.int64)
    return Grouped(ids, ordered[first], order, np.append(first, len(ids)))
