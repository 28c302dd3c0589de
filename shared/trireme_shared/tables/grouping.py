"""The occurrences of ids in a minibatch, those of an id together; and where ids are in several arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Grouped:
    """`given`: int64 (n,), the occurrences as they came. `ids`: int64 (k,), ascending, each once. `order`:
    int64 (n,): the occurrences, by id; of an id in the order in which torch coalesces sparse gradients: that
    of its sort, which does not keep equal ids in theirs. `starts`: int64 (k + 1,): where each id's begin, and
    the end."""

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
    first = (
        np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
        if len(ids)
        else np.empty(0, np.int64)
    )
    return Grouped(ids, ordered[first], order, np.append(first, len(ids)))


class Pieces:
    """At least one array of ids, int64 (n,), ascending; no id is in two of them. The first may be large, the
    others many: nothing of what belongs to them is moved."""

    def __init__(self, pieces: Sequence[Numbers]) -> None:
        self.count = len(pieces)
        self._first, rest = pieces[0], pieces[1:]
        self._starts = np.cumsum([0, *map(len, rest)])
        found = np.concatenate([np.empty(0, np.int64), *rest])
        self._order = np.argsort(found, kind="stable")  # which is fast where parts ascend already
        self._rest = found[self._order]

    def find(self, ids: Numbers) -> Iterator[tuple[int, Numbers, Numbers]]:
        """Of each piece that has some of the ids (int64 (n,), any order): its number, which of the ids, and
        where in it they are."""
        there, at = _found(self._first, ids)
        if len(there):
            yield 0, there, at
        there, at = _found(self._rest, ids)
        if not len(there):
            return
        places = self._order[at]
        numbers = np.searchsorted(self._starts, places, side="right") - 1
        by_piece = np.argsort(numbers, kind="stable")
        kinds, firsts = np.unique(numbers[by_piece], return_index=True)
        for number, some in zip(kinds.tolist(), np.split(by_piece, firsts[1:]), strict=True):
            yield number + 1, there[some], places[some] - self._starts[number]


def _found(ascending: Numbers, ids: Numbers) -> tuple[Numbers, Numbers]:
    """Which of the ids are there, and where."""
    if not len(ascending):
        return ids[:0], ids[:0]
    places = np.searchsorted(ascending, ids)
    places[places == len(ascending)] = 0
    there = np.flatnonzero(ascending[places] == ids)
    return there, places[there]
