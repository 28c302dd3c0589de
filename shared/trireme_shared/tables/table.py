"""The rows of one table that one process owns, at two versions.

    version v --step(ids, gradients)--> version v + 1: rows of these ids are stepped; those that lack one get
    it (admission), others leave (`max_rows`, `evict_after_steps`); `before` keeps what they all were, so
    version v can still be read

An id without a row reads as its initial value, a pure function of (seed, id). All that decides is the order
of versions and ids. The scalars of a step are rounded to float32 as torch rounds a Python number that meets a
float32 tensor.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.records.layout import RowInit, RowOptimizer, TableSpec
from trireme_shared.tables.grouping import Pieces
from trireme_shared.tables.hashing import slots_of
from trireme_shared.tables.kernels import cells as cell_loops
from trireme_shared.tables.kernels import rows as row_loops
from trireme_shared.tables.leaving import (
    Counts,
    Oldest,
    RemovedIds,
    aged,
    forget_counts,
    shared_out,
    swept,
    without_room,
)
from trireme_shared.tables.memory import (
    COUNTED_AT_ONCE,
    HASHES,
    TOLD_AT_ONCE,
    Cells,
    Floats,
    Numbers,
    Rows,
    Words,
    ages_of,
    places_of,
    portions,
    rows_at_once,
    soon_touched,
    with_places,
)
from trireme_shared.tables.needs import SKETCH_CELLS, SKETCH_DEPTH

Flags = npt.NDArray[np.bool_]


@dataclass(slots=True)
class RowsOfIds:
    """Whole rows. `ids`: int64 (n,), ascending. `words`: uint64 (n,), see kernels; 0: there was no row.
    `content`: float32 (n, width)."""

    ids: Numbers
    words: Words
    content: Floats

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def bytes(self) -> int:
        return self.ids.nbytes + self.words.nbytes + self.content.nbytes

    def where(self, chosen: npt.NDArray[np.bool_] | Numbers | slice) -> RowsOfIds:
        if isinstance(chosen, slice):
            return RowsOfIds(self.ids[chosen], self.words[chosen], self.content[chosen])
        places = np.flatnonzero(chosen) if chosen.dtype == np.bool_ else chosen
        return RowsOfIds(self.ids.take(places), self.words.take(places), self.content.take(places, axis=0))


def living(rows: RowsOfIds, spec: TableSpec, version: int) -> RowsOfIds:
    """Those that are not expired at `version`."""
    limit = spec.evict_after_steps
    return rows if limit is None else rows.where(ages_of(rows.words, version) <= limit)


def one_after_the_other(parts: list[RowsOfIds], width: int) -> RowsOfIds:
    """As they come."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return RowsOfIds(np.empty(0, np.int64), np.empty(0, np.uint64), np.empty((0, width), np.float32))
    arrays = ((part.ids, part.words, part.content) for part in parts)
    return RowsOfIds(*(np.concatenate(each) for each in zip(*arrays, strict=True)))


def joined(parts: list[RowsOfIds], width: int) -> RowsOfIds:
    """In the order of their ids."""
    found = one_after_the_other(parts, width)
    return found.where(np.argsort(found.ids, kind="stable")) if len(parts) > 1 else found


def chosen_by_slot(ids: Numbers, seed: int, slot_count: int) -> Iterator[tuple[int, Numbers]]:
    """Of each slot that has some of the ids: which of them, in their order. Slots ascend."""
    if not len(ids):
        return
    slots = slots_of(ids, seed, slot_count)
    # these faster
    order = np.argsort(slots if slot_count > 1 << 16 else slots.astype(np.uint16), kind="stable")
    numbers, starts = np.unique(slots[order], return_index=True)
    yield from zip(numbers.tolist(), np.split(order, starts[1:]), strict=True)


class Table:
    """`version`: steps made. `updates`: steps that had data (Adam counts them). Not for several threads at
    once. Each of `leaving` is called with rows that a step has changed or removed, as they were (see
    snapshot.py). Raises InvalidArgument for a `max_rows` below `slot_count`."""

    def __init__(self, spec: TableSpec, slot_count: int, version: int = 0) -> None:
        if spec.max_rows is not None and spec.max_rows < slot_count:
            msg = (
                f"table {spec.name}: max_rows is {spec.max_rows}, and the job has {slot_count} slots, "
                "which share it out"
            )
            raise InvalidArgument(
                msg, hint=f"give at least {slot_count}, or leave it out: a table this small needs no limit"
            )
        self.spec, self.version, self.updates = spec, version, 0
        self.slot_count = slot_count
        self.counts = Counts()
        self._before: list[RowsOfIds] | None = None  # parts, each with ids that ascend
        self._pieces: Pieces | None = None  # of these, if it has their number
        self.removed = RemovedIds(version)
        self.leaving: list[Callable[[RowsOfIds], None]] = []
        self._cells = Cells(slot_count, spec.seed)
        self._rows = Rows(spec.row_words)
        self._ttl = -1 if spec.evict_after_steps is None else spec.evict_after_steps
        self._oldest = None if spec.max_rows is None else Oldest(shared_out(spec.max_rows, slot_count))
        self._admitted = np.ones(0, np.bool_)  # of the ids of `prepare`
        self._surplus = np.zeros(slot_count, np.int64)  # rows that leave in the step that was prepared
        self._init = INITS[spec.init.kind], init_scale(spec.init)
        self._state, self._kind = first_state(spec.optimizer, spec.dim), kind_of(spec.optimizer)
        self.sketch = soon_touched(slot_count, SKETCH_DEPTH * SKETCH_CELLS) if spec.admit_after > 1 else None
        self.sketch_stamps = np.zeros(slot_count, np.int64)  # when each slot's counts changed last; 0: never

    def __repr__(self) -> str:
        return (
            f"<Table {self.spec.name} version {self.version}: {self.rows} rows of {self._rows.width} numbers>"
        )

    @property
    def rows(self) -> int:
        """That have memory, expired ones included."""
        return int(self.counts_by_slot().sum())

    @property
    def bytes(self) -> int:
        kept = sum(part.bytes for part in self._before or ())
        sketch = 0 if self.sketch is None else self.sketch.nbytes
        queues = 0 if self._oldest is None else self._oldest.bytes
        return self._cells.bytes + self._rows.bytes + kept + sketch + queues

    @property
    def width(self) -> int:
        return self._rows.width

    @property
    def has_before(self) -> bool:
        """Whether the version before can be read."""
        return self._before is not None

    def start_at(self, version: int) -> None:
        """Its rows are of that version; what they were before is not known."""
        self.version, self._before = version, None

    @property
    def before(self) -> RowsOfIds | None:
        """The rows that the newest step has changed or removed, as they were."""
        if self._before is not None and len(self._before) > 1:
            self._before = [joined(self._before, self.width)]  # few ask for it: slots that move
        return None if self._before is None else self._before[0]

    # ------------------------------------------------------------ reading

    def lookup(self, ids: Numbers, out: Floats, version: int | None = None) -> None:
        """The values of each id at `version` (None: the newest one) into `out`, float32 (n, dim). int64 (n,),
        any order, also twice. `version` is the newest one or, while `before` is there, the one before."""
        wanted = self.version if version is None else version
        cells, rows = self._cells, self._rows
        if not ids.flags.writeable:
            ids = ids.copy()  # of a received payload: the loop would be compiled once more for such ids
        row_loops.lookup(
            cells.addresses,
            cells.capacities,
            rows.addresses,
            rows.shift,
            rows.width,
            cells.seed,
            cells.secret,
            ids,
            wanted,
            self._ttl,
            *self._init,
            out,
        )
        if wanted == self.version:
            return
        assert wanted == self.version - 1
        assert self._before is not None
        if self._pieces is None or self._pieces.count != len(self._before):
            self._pieces = Pieces([part.ids for part in self._before])
        for number, there, places in self._pieces.find(ids):
            part = self._before[number]
            lived = self._lives(part.words[places], wanted)
            out[there[lived]] = part.content[places[lived], : self.spec.dim]
            if len(fresh := there[~lived]):
                out[fresh] = initial_values(self.spec, ids[fresh])

    def _lives(self, words: Words, version: int) -> Flags:
        lives: Flags = words != 0
        return lives if self._ttl < 0 else lives & (ages_of(words, version) <= self._ttl)

    # ------------------------------------------------------------ a step

    def step(self, ids: Numbers, gradients: Floats | None, lr: float | None = None) -> None:
        """The next version. `ids`: int64 (n,), ascending, each once; `gradients`: float32 (n, dim), or None:
        the step had no data. `lr`: instead of the optimizer's own."""
        deque(self.prepare(ids if gradients is not None else ids[:0]), 0)
        deque(self.steps(ids, gradients, lr), 0)

    def prepare(self, ids: Numbers) -> Iterator[None]:
        """Makes room for the rows that the next step will bring. Both versions can be read all the time;
        milliseconds between two values."""
        slots, n, cells = self.slot_count, len(ids), self._cells
        places, self._admitted = np.empty(n, np.int64), np.ones(n, np.bool_)
        more, held, wanted = np.zeros(slots, np.int64), np.zeros(slots, np.int64), np.ones(slots, np.bool_)
        if self.sketch is None and self._oldest is None:  # it matters in few slots which ids are new
            for some in portions(n, COUNTED_AT_ONCE):
                cell_loops.count_by_slot(ids[some], cells.seed, more)
                yield
            wanted, more = cells.lack(more), np.zeros(slots, np.int64)
            if not wanted.any():  # there are cells for all of the ids
                return (yield from self._rows.reserve_in_turns(n))
        for some in portions(n):
            own, found, admitted = ids[some], places[some], self._admitted[some]
            keys = cells.seed, cells.secret
            cell_loops.look(cells.addresses, cells.capacities, *keys, own, wanted, found)
            if self.sketch is not None:
                cell_loops.admit(
                    self.sketch,
                    SKETCH_DEPTH,
                    cells.seed,
                    own,
                    found,
                    np.uint8(self.spec.admit_after),
                    admitted,
                )
                self.sketch_stamps[slots_of(own[found < 0], self.spec.seed, slots)] = self.version + 1
            cell_loops.count_by_slot(own[(found < 0) & admitted], cells.seed, more)
            if self._oldest is not None:
                cell_loops.count_by_slot(own[found >= 0], cells.seed, held)
            yield
        if self.sketch is not None:
            self.sketch_stamps[forget_counts(self.sketch, self.spec.admit_after)] = self.version + 1
        if self._oldest is not None:
            if (beyond := more + held > self._oldest.quotas).any():
                coming = np.flatnonzero((places < 0) & self._admitted)
                slots_of_coming = slots_of(ids[coming], self.spec.seed, slots)
                self._admitted[coming[without_room(slots_of_coming, room := self._oldest.quotas - held)]] = (
                    False
                )
                more[beyond] = np.maximum(0, room)[beyond]
            left = self._oldest.quotas - cells.used
            self._surplus, more = np.where(more > 0, more - left, 0), np.minimum(more, left)
        new_rows = int((self._admitted & (places < 0)).sum())
        self._rows.reserve(new_rows)  # the memory comes meanwhile
        yield from cells.reserve(more)
        yield from self._rows.reserve_in_turns(new_rows)

    def steps(self, ids: Numbers, gradients: Floats | None, lr: float | None = None) -> Iterator[None]:
        """`step`, after `prepare` with the same ids (with no data: none); milliseconds of work between two
        values. Meanwhile nothing can be read."""
        self.version += 1
        self._before, self._pieces = [], None
        if gradients is None:
            self._before = [joined([], self.width)]
            yield from self._sweeps()
            return
        self.updates += 1
        yield from self._advance(ids, gradients, lr)
        yield from self._sweeps()

    def _advance(self, ids: Numbers, gradients: Floats, lr: float | None) -> Iterator[None]:
        """Rows of these ids make the step to `version`; what they were is added to `before`."""
        assert self._before is not None
        cells, rows, n = self._cells, self._rows, len(ids)
        places, words = np.empty(n, np.int64), np.empty(n, np.uint64)
        before = RowsOfIds(ids, words, np.empty((n, self.width), np.float32))
        for some in portions(n):
            cell_loops.touch(
                cells.addresses,
                cells.capacities,
                cells.seed,
                cells.secret,
                ids[some],
                self.version,
                places[some],
                words[some],
            )
            yield
        yield from self._leave()
        scalars = scalars_of(
            self.spec.optimizer, self.updates, self.spec.dim, self.spec.optimizer.lr if lr is None else lr
        )
        for some in portions(n, rows_at_once(self.width)):
            rows.insert(cells, ids[some], self.version, places[some], self._admitted[some])
            part = before.where(some)
            fresh = ~self._lives(part.words, self.version - 1)
            self._update(part, places[some], fresh, gradients[some], scalars)
            self._count(places[some], fresh, part.words)
            yield
        self._before.insert(0, before)
        for some in portions(n if self.leaving else 0, TOLD_AT_ONCE):
            self._tell(before.where(some))
            yield

    def _count(self, places: Numbers, fresh: Flags, words: Words) -> None:
        refused = int((places < 0).sum())
        self.counts.refused += refused
        self.counts.admitted += int(fresh.sum()) - refused
        self.counts.evicted += int((fresh & (words != 0)).sum())

    def _tell(self, before: RowsOfIds) -> None:
        for leaves in self.leaving:
            leaves(before)

    def _update(
        self, before: RowsOfIds, places: Numbers, fresh: Flags, gradients: Floats, scalars: Floats
    ) -> None:
        rows = self._rows
        squares = (
            np.empty_like(gradients) if self._kind in (row_loops.ADAGRAD, row_loops.ADAM) else gradients[:0]
        )
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
            row_loops.divide(
                rows.addresses, rows.shift, rows.width, places, gradients, self._kind, scalars, squares
            )

    def _leave(self) -> Iterator[None]:
        """Slots that would have too many rows give up those that were changed longest ago, but none that this
        step changes."""
        if self._oldest is None:
            return
        assert self._before is not None
        for ids, words in self._oldest.leave(self._cells, self._surplus, self.version):
            if len(ids):
                self._before.append(self._gone(ids, words))
                self._tell(self._before[-1])
            yield

    def _gone(self, ids: Numbers, words: Words) -> RowsOfIds:
        """Their cells are gone; so are their rows now."""
        order = np.argsort(ids)
        ids, words = ids[order], words[order]
        places = places_of(words)
        gone = RowsOfIds(ids, words, self._rows.read(places))
        self._rows.give_back(places)
        self.counts.evicted += len(ids)
        self.removed.add(self.version, ids, self.rows)
        return gone

    # ------------------------------------------------------------ slots

    def _swept(self, version: int) -> Sequence[int]:
        """The slots that give back expired rows in the step that makes `version`, which depend on that
        alone."""
        return () if self._ttl < 0 else swept(version, self._ttl, self.slot_count)

    def _sweeps(self, among: Flags | None = None) -> Iterator[None]:
        """Each step gives back the memory of expired rows of some slots, and looks after the stamps of one
        now and then. `among`: of these slots alone, bool (slots,)."""
        for slot in self._swept(self.version):
            if self._cells.used[slot] and (among is None or among[slot]):
                self.sweep(slot)
                yield
                yield from self._cells.shrink(slot)
        for slot in aged(self.version, self.slot_count):
            if self._cells.used[slot] and (among is None or among[slot]):
                self.keep_oldest(slot)
                yield

    def keep_oldest(self, slot: int) -> None:
        """Stamps are numbers of steps modulo STAMPS: no row of the slot may come to look like one that was
        changed lately."""
        if self._cells.keep_oldest(slot, self.version) and self._oldest is not None:
            self._oldest.forget(slot)

    def sweep(self, slot: int) -> int:
        """Give back the memory of rows that are expired at both versions; answers how many."""
        if self._ttl < 0 or not self._cells.used[slot]:
            return 0
        ids, words = self._cells.remove_expired(slot, self.version - 1, self._ttl)
        if len(ids):
            self._tell(self._gone(ids, words))
        return len(ids)

    @property
    def memory(self) -> tuple[Cells, Rows]:
        """For snapshots."""
        return self._cells, self._rows

    def read_slot(self, slot: int, first: int = 0, last: int = HASHES) -> RowsOfIds:
        """Copies of its rows at the newest version, of those with hashes [first, last)."""
        return self._read(*self._cells.of_slot(slot, first, last))

    def _read(self, ids: Numbers, words: Words) -> RowsOfIds:
        """Copies."""
        order = np.argsort(ids)
        ids, words = ids[order], words[order]
        return RowsOfIds(ids, words, self._rows.read(places_of(words)))

    def counts_by_slot(self) -> Numbers:
        """How many rows each has: int64 (slots,)."""
        return self._cells.used.copy()

    def slots(self) -> Iterator[int]:
        """Those that have rows."""
        return (int(slot) for slot in np.flatnonzero(self.counts_by_slot()))

    def put_rows(self, rows: RowsOfIds) -> None:
        """Rows of slots that have none yet, as they were read elsewhere."""
        self.removed.lose(self.version)
        self._rows.reserve(len(rows))
        places = self._rows.take(len(rows))
        self._rows.write(places, rows.content)
        words = with_places(rows.words, places)
        for slot, chosen in chosen_by_slot(rows.ids, self.spec.seed, self.slot_count):
            self._cells.replace(slot, rows.ids[chosen], words[chosen])
            if self._oldest is not None:
                self._oldest.forget(slot)


# ---------------------------------------------------------------- the scalars of one step

INITS = {"constant": row_loops.CONSTANT, "uniform": row_loops.UNIFORM, "normal": row_loops.NORMAL}


def kind_of(optimizer: RowOptimizer) -> int:
    """Of row_loops.update."""
    match optimizer.kind:
        case "sgd":
            return row_loops.SGD
        case "adagrad":
            return row_loops.ADAGRAD_ROW if optimizer.per_row else row_loops.ADAGRAD
        case "adam":
            return row_loops.ADAM
        case "ftrl":
            return row_loops.FTRL


def scalars_of(optimizer: RowOptimizer, step: int, dim: int, lr: float) -> npt.NDArray[np.float32]:
    """For row_loops.update; `step`: of the table, counted from 1."""
    match optimizer.kind:
        case "sgd":
            found = [-lr]
        case "adagrad":
            found = [-lr, optimizer.eps, 1.0 / dim]
        case "adam":
            first, second = optimizer.betas
            size = lr * math.sqrt(1 - second**step) / (1 - first**step)
            found = [-size, optimizer.eps, 1 - first, 1 - second]
        # a row is computed from sums that were made at the table's own rate, so another rate scales the
        # gradient's effect
        case "ftrl":
            rate = 1.0 / optimizer.lr
            found = [lr / optimizer.lr, optimizer.l1, optimizer.l2, optimizer.beta * rate, rate]
    return np.array(found + [0.0] * (8 - len(found)), np.float32)


def first_state(optimizer: RowOptimizer, dim: int) -> npt.NDArray[np.float32]:
    """The state of a row that appears: float32 (optimizer.state_words(dim),). `initial_accumulator_value`
    fills sums of squares alone."""
    state = np.zeros(optimizer.state_words(dim), np.float32)
    match optimizer.kind:
        case "adagrad":
            state[:] = optimizer.initial_accumulator_value
        case "ftrl":
            state[dim:] = optimizer.initial_accumulator_value
    return state


def sums_of_values(optimizer: RowOptimizer, rows: npt.NDArray[np.float32], dim: int) -> None:
    """In place: rows (float32 (n, dim + words of state)) of `ftrl` get the sums that their values follow
    from, at this learning rate, l1, l2 and beta. Without them the first step would compute each row from sums
    that know nothing of its values."""
    values, sums, squares = (rows[:, first : first + dim].astype(np.float64) for first in (0, dim, 2 * dim))
    strength = (optimizer.beta + np.sqrt(squares)) / optimizer.lr + optimizer.l2
    held = np.clip(sums, -optimizer.l1, optimizer.l1)  # these keep a value at 0
    rows[:, dim : 2 * dim] = np.where(values == 0, held, -values * strength - np.sign(values) * optimizer.l1)


def init_scale(init: RowInit) -> np.float32:
    """For row_loops.initial_values: what its numbers are multiplied by."""
    return np.float32(init.scale / row_loops.NORMAL_DEVIATION if init.kind == "normal" else init.scale)


def initial_values(spec: TableSpec, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Of ids without a row: float32 (n, dim)."""
    found = np.empty((len(ids), spec.dim), np.float32)
    row_loops.initial_values(np.uint64(spec.seed), ids, INITS[spec.init.kind], init_scale(spec.init), found)
    return found
