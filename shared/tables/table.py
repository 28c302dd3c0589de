"""The rows of one table that one process owns, at two versions.

    version v --step(ids, gradients)--> version v + 1: rows of these ids are stepped; those that lack one get it (admission), others
    leave (`max_rows`, `evict_after_steps`); `before` keeps what they all were, so version v can still be read

An id without a row reads as its initial value, a pure function of (seed, id): it needs no memory until a gradient comes. All that
decides is the order of versions and ids, nothing else: neither time, nor who owns which slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from shared.errors import InvalidArgument
from shared.records.layout import TableSpec
from shared.tables.hashing import slots_of
from shared.tables.kernels import cells as cell_loops
from shared.tables.kernels import parts
from shared.tables.kernels import rows as row_loops
from shared.tables.memory import Cells, Floats, Numbers, Rows, Words
from shared.tables.updates import INITS, first_state, init_scale, initial_values, kind_of, scalars_of

SKETCH_DEPTH, SKETCH_CELLS = (
    4,
    1024,
)  # of each slot: a count is too high with a chance below 2 %, by more than e / 1024 of all counts there
AT_ONCE = 4096  # rows, so that what is made of them stays in the processor's cache
LEAVE_AT_ONCE = 32  # a slot that is full gives up one row in so many, so that this is rare

Flags = npt.NDArray[np.bool_]


@dataclass(slots=True)
class RowsOfIds:
    """Whole rows. `ids`: int64 (n,), ascending. `words`: uint64 (n,), see kernels; 0: there was no row. `content`: float32 (n, width)."""

    ids: Numbers
    words: Words
    content: Floats

    def __len__(self) -> int:
        return len(self.ids)

    def where(self, chosen: npt.NDArray[np.bool_] | Numbers | slice) -> RowsOfIds:
        return RowsOfIds(self.ids[chosen], self.words[chosen], self.content[chosen])


def stamps_of(words: Words) -> Numbers:
    """The version in which each row was changed last."""
    return (words >> parts.STAMP_SHIFT).astype(np.int64)


def frequencies_of(words: Words) -> Numbers:
    """About log2(1 + steps that changed it) of each row."""
    return ((words >> parts.FREQUENCY_SHIFT) & parts.FREQUENCY_MASK).astype(np.int64)


def living(rows: RowsOfIds, spec: TableSpec, version: int) -> RowsOfIds:
    """Those that are not expired at `version`."""
    limit = spec.evict_after_steps
    return rows if limit is None else rows.where(version - stamps_of(rows.words) <= limit)


def joined(parts: list[RowsOfIds], width: int) -> RowsOfIds:
    """In the order of their ids."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return RowsOfIds(np.empty(0, np.int64), np.empty(0, np.uint64), np.empty((0, width), np.float32))
    ids = np.concatenate([part.ids for part in parts])
    order = np.argsort(ids, kind="stable")
    words, content = (
        np.concatenate([part.words for part in parts]),
        np.concatenate([part.content for part in parts]),
    )
    return RowsOfIds(ids[order], words[order], content[order])


def by_slot(rows: RowsOfIds, seed: int, slot_count: int) -> Iterator[tuple[int, RowsOfIds]]:
    """The rows of each slot that has some, slots ascending, in the order that they have in `rows`."""
    if not len(rows):
        return
    slots = slots_of(rows.ids, seed, slot_count)
    order = np.argsort(slots, kind="stable")
    numbers, starts = np.unique(slots[order], return_index=True)
    for slot, chosen in zip(numbers.tolist(), np.split(order, starts[1:]), strict=True):
        yield slot, rows.where(chosen)


@dataclass(slots=True)
class Counts:
    """`refused`: gradients of ids that were not admitted yet."""

    admitted: int = 0
    evicted: int = 0
    refused: int = 0


class Table:
    """`version`: steps made. `updates`: steps that had data (Adam counts them). Not for several threads at once. Each of `leaving` is called with rows
    that a step has changed or removed, as they were (see snapshot.py). Raises InvalidArgument for a `max_rows` below `slot_count`."""

    def __init__(self, spec: TableSpec, slot_count: int, version: int = 0) -> None:
        if spec.max_rows is not None and spec.max_rows < slot_count:
            msg = f"table {spec.name}: max_rows is {spec.max_rows}, and the job has {slot_count} slots, which share it out"
            raise InvalidArgument(
                msg, hint=f"give at least {slot_count}, or leave it out: a table this small needs no limit"
            )
        self.spec, self.version, self.updates = spec, version, 0
        self.slot_count = slot_count
        self.counts = Counts()
        self.before: RowsOfIds | None = None
        self.leaving: list[Callable[[RowsOfIds], None]] = []
        self._cells = Cells(slot_count, spec.seed)
        self._rows = Rows(spec.row_words)
        self._ttl = -1 if spec.evict_after_steps is None else spec.evict_after_steps
        self._quota = None if spec.max_rows is None else max(1, spec.max_rows // slot_count)
        self._init = INITS[spec.init.kind], init_scale(spec.init)
        self._state, self._kind = first_state(spec.optimizer), kind_of(spec.optimizer)
        self.sketch = np.zeros((slot_count, SKETCH_DEPTH * SKETCH_CELLS), np.uint8) if spec.admit_after > 1 else None

    def __repr__(self) -> str:
        return f"<Table {self.spec.name} version {self.version}: {self.rows} rows of {self._rows.width} numbers>"

    @property
    def rows(self) -> int:
        """That have memory, expired ones included."""
        return int(self._cells.used.sum())

    @property
    def bytes(self) -> int:
        kept = self.before.content.nbytes + 16 * len(self.before) if self.before is not None else 0
        return self._cells.bytes + self._rows.bytes + kept + (self.sketch.nbytes if self.sketch is not None else 0)

    @property
    def width(self) -> int:
        return self._rows.width

    # ------------------------------------------------------------ reading

    def lookup(self, ids: Numbers, out: Floats, version: int | None = None) -> None:
        """The values of each id at `version` (None: the newest one) into `out`, float32 (n, dim). int64 (n,), any order, also twice. `version` is the
        newest one or, while `before` is there, the one before."""
        wanted = self.version if version is None else version
        cells, rows = self._cells, self._rows
        row_loops.lookup(
            cells.addresses,
            cells.capacities,
            rows.addresses,
            rows.shift,
            rows.width,
            cells.seed,
            ids,
            wanted,
            self._ttl,
            *self._init,
            out,
        )
        if wanted == self.version:
            return
        assert wanted == self.version - 1
        assert self.before is not None
        if not len(self.before):
            return
        before = self.before
        places = np.searchsorted(before.ids, ids)
        places[places == len(before)] = 0
        changed = np.flatnonzero(before.ids[places] == ids)
        lived = self._lives(before.words[places[changed]], wanted)
        out[changed[lived]] = before.content[places[changed[lived]], : self.spec.dim]
        fresh = changed[~lived]
        if len(fresh):
            out[fresh] = initial_values(self.spec, ids[fresh])

    def _lives(self, words: Words, version: int) -> Flags:
        lives: Flags = words != 0
        return lives if self._ttl < 0 else lives & (version - stamps_of(words) <= self._ttl)

    # ------------------------------------------------------------ a step

    def step(self, ids: Numbers, gradients: Floats | None, lr: float | None = None) -> None:
        """The next version. `ids`: int64 (n,), ascending, each once; `gradients`: float32 (n, dim), or None: the step had no data.
        `lr`: instead of the optimizer's own."""
        for _ in self.steps(ids, gradients, lr):
            pass

    def steps(self, ids: Numbers, gradients: Floats | None, lr: float | None = None) -> Iterator[None]:
        """The same, with some milliseconds of work between two values. Meanwhile nothing can be read."""
        self.version += 1
        if gradients is None:
            self.before = joined([], self.width)
            self.sweep(self.version % self.slot_count)
            return
        self.updates += 1
        cells, rows, n = self._cells, self._rows, len(ids)
        places, words = np.empty(n, np.int64), np.empty(n, np.uint64)
        cell_loops.touch(cells.addresses, cells.capacities, cells.seed, ids, self.version, places, words)
        before = RowsOfIds(ids, words, np.empty((n, self.width), np.float32))
        fresh = ~self._lives(words, self.version - 1)
        admitted = self._admitted(ids, places)
        gone = self._make_room(ids, places, admitted)
        rows.free_count, rows.next = cell_loops.insert(
            cells.addresses,
            cells.capacities,
            cells.used,
            cells.seed,
            ids,
            self.version,
            places,
            admitted,
            rows.free,
            rows.free_count,
            rows.next,
        )
        scalars = scalars_of(
            self.spec.optimizer, self.updates, self.spec.dim, self.spec.optimizer.lr if lr is None else lr
        )
        for first in range(0, n, AT_ONCE):
            some = slice(first, first + AT_ONCE)
            self._update(before.where(some), places[some], fresh[some], gradients[some], scalars)
            yield
        refused = int((places < 0).sum())
        self.counts.refused += refused
        self.counts.admitted += int(fresh.sum()) - refused
        self.counts.evicted += int((fresh & (words != 0)).sum())
        self.before = before if gone is None else joined([before, gone], self.width)
        for leaves in self.leaving:
            leaves(self.before)
        self.sweep(self.version % self.slot_count)

    def _update(self, before: RowsOfIds, places: Numbers, fresh: Flags, gradients: Floats, scalars: Floats) -> None:
        rows = self._rows
        squares = np.empty_like(gradients) if self._kind in (row_loops.ADAGRAD, row_loops.ADAM) else gradients[:0]
        row_loops.update(
            rows.addresses,
            rows.shift,
            rows.width,
            self._cells.seed,
            before.ids,
            places,
            before.words,
            fresh,
            gradients,
            self._kind,
            scalars,
            *self._init,
            self._state,
            before.content,
            squares,
        )
        if len(squares):
            torch.from_numpy(squares).sqrt_()
            row_loops.divide(rows.addresses, rows.shift, rows.width, places, gradients, self._kind, scalars, squares)

    def _admitted(self, ids: Numbers, places: Numbers) -> Flags:
        admitted = np.ones(len(ids), np.bool_)
        if self.sketch is not None:
            seed, needed = self._cells.seed, np.uint8(self.spec.admit_after)
            cell_loops.admit(self.sketch, SKETCH_DEPTH, seed, ids, places, needed, admitted)
        return admitted

    def _make_room(self, ids: Numbers, places: Numbers, admitted: Flags) -> RowsOfIds | None:
        """For rows that will appear. Answers the rows that had to leave."""
        more = np.zeros(self.slot_count, np.int64)
        coming = ids[(places < 0) & admitted]
        cell_loops.count_by_slot(coming, self._cells.seed, more)
        gone: list[RowsOfIds] = []
        if self._quota is not None:
            over = self._cells.used + more - self._quota
            gone = [self._leave(int(slot), int(over[slot])) for slot in np.flatnonzero((over > 0) & (more > 0))]
        self._cells.reserve(more)
        self._rows.reserve(len(coming))
        return joined(gone, self.width) if gone else None

    def _leave(self, slot: int, surplus: int) -> RowsOfIds:
        """The rows of a slot that were changed longest ago leave, but none that this step changes."""
        assert self._quota is not None
        ids, words = self._cells.of_slot(slot)
        stamps = stamps_of(words)
        order = np.lexsort((ids, stamps))
        idle = order[stamps[order] < self.version]
        chosen = idle[: max(surplus, -(-self._quota // LEAVE_AT_ONCE))]
        return self._remove(slot, ids, words, chosen)

    def _remove(self, slot: int, ids: Numbers, words: Words, chosen: Numbers) -> RowsOfIds:
        places = (words[chosen] & parts.ROW_MASK).astype(np.int64) - 1
        gone = RowsOfIds(ids[chosen], words[chosen], self._rows.read(places))
        staying = np.ones(len(ids), np.bool_)
        staying[chosen] = False
        self._cells.replace(slot, ids[staying], words[staying])
        self._rows.give_back(places)
        self.counts.evicted += len(chosen)
        return gone.where(np.argsort(gone.ids))

    # ------------------------------------------------------------ slots

    def sweep(self, slot: int) -> int:
        """Give back the memory of rows that are expired at both versions; answers how many. Each step does it for one slot: which one depends on its
        version alone, since a slot with room for `max_rows` gives up no other rows."""
        if self._ttl < 0 or not self._cells.used[slot]:
            return 0
        ids, words = self._cells.of_slot(slot)
        chosen = np.flatnonzero(self.version - 1 - stamps_of(words) > self._ttl)
        if len(chosen):
            gone = self._remove(slot, ids, words, chosen)
            for leaves in self.leaving:
                leaves(gone)
        return len(chosen)

    def read_slot(self, slot: int) -> RowsOfIds:
        """Copies of its rows at the newest version."""
        ids, words = self._cells.of_slot(slot)
        order = np.argsort(ids)
        ids, words = ids[order], words[order]
        return RowsOfIds(ids, words, self._rows.read((words & parts.ROW_MASK).astype(np.int64) - 1))

    def counts_by_slot(self) -> Numbers:
        """How many rows each has: int64 (slots,)."""
        return self._cells.used.copy()

    def slots(self) -> Iterator[int]:
        """Those that have rows."""
        return (int(slot) for slot in np.flatnonzero(self._cells.used))

    def put_rows(self, rows: RowsOfIds) -> None:
        """Rows of slots that have none yet, as they were read elsewhere."""
        self._rows.reserve(len(rows))
        for slot, mine in by_slot(rows, self.spec.seed, self.slot_count):
            places = self._take(len(mine))
            words = (mine.words & ~parts.ROW_MASK) | (places + 1).astype(np.uint64)
            self._rows.write(places, mine.content)
            self._cells.replace(slot, mine.ids, words)

    def _take(self, count: int) -> Numbers:
        rows = self._rows
        reused = min(count, rows.free_count)
        rows.free_count -= reused
        taken = np.concatenate(
            [rows.free[rows.free_count : rows.free_count + reused], np.arange(rows.next, rows.next + count - reused)]
        )
        rows.next += count - reused
        return taken

    def drop_slots(self, slots: Numbers) -> None:
        """They belong to another process now."""
        for slot in slots:
            _, words = self._cells.of_slot(int(slot))
            self._rows.give_back((words & parts.ROW_MASK).astype(np.int64) - 1)
            self._cells.clear([int(slot)])
