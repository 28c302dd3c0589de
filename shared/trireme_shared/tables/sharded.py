"""A table whose slots belong to several processes, and move between them.

source   parts of all its slots, while it steps --> frozen: `before` of them, and what those rows are now
    --> drop_slots --> give_back, in turns
target   rows are put into slots that are `apart` --> what the last step changed is put right
    --> the slots are its own

Rows that a step changes while their slot is read may be read before or after it: the last step names them all
in `before`, and they are sent again. So the reader needs no copy of the table.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trireme_shared.protocol.records.layout import TableSpec
from trireme_shared.tables.hashing import slots_of
from trireme_shared.tables.kernels import cells as cell_loops
from trireme_shared.tables.kernels import parts
from trireme_shared.tables.memory import (
    HASHES,
    Floats,
    Numbers,
    Words,
    places_of,
    portions,
    rows_at_once,
    with_places,
)
from trireme_shared.tables.table import Flags, RowsOfIds, Table, chosen_by_slot, joined


@dataclass(slots=True)
class _Dropped:
    """A slot that was dropped. `cells`: uint64 (2 capacity,), of which the rows of the first `done` were
    given back. `listening`: who hears of the rows."""

    cells: Words
    listening: tuple[Callable[[RowsOfIds], None], ...]
    done: int = 0


class ShardedTable(Table):
    """`apart`: bool (slots,), of which the rows are at another version than the table, or belong to another
    process still: they are not counted, not swept, and in no snapshot."""

    def __init__(self, spec: TableSpec, slot_count: int, version: int = 0) -> None:
        super().__init__(spec, slot_count, version)
        self.apart: Flags = np.zeros(slot_count, np.bool_)
        self._dropped: deque[_Dropped] = deque()

    def counts_by_slot(self) -> Numbers:
        return np.where(self.apart, 0, self._cells.used)

    def count_in(self, slots: Flags) -> int:
        """Rows of these slots, those that are apart, too."""
        return int(self._cells.used[slots].sum())

    def _sweeps(self, among: Flags | None = None) -> Iterator[None]:
        yield from super()._sweeps(~self.apart if among is None else among)

    def begin_at(self, version: int) -> None:
        """No rows are its own yet, so what is known of the version before is complete."""
        self.version, self._before, self._pieces = version, [joined([], self.width)], None

    def put_sketch(self, slots: Numbers, counts: npt.NDArray[np.uint8]) -> None:
        """Counts of ids without a row that come: uint8 (slots, cells)."""
        if self.sketch is not None:
            self.sketch[slots], self.sketch_stamps[slots] = counts, self.version + 1

    def restamp(self, slots: Flags, version: int, later: int) -> None:
        """Rows of these slots, which are of `version`, by so many versions (negative: earlier, at most to
        version 0)."""
        cells = self._cells
        for slot in np.flatnonzero(slots & (cells.used > 0)).tolist() if later else ():
            cell_loops.restamp(cells.addresses[slot], int(cells.capacities[slot]), version, later)
        self._forget_oldest(slots)

    def join_before(self, changed: RowsOfIds | None) -> None:
        """What the last step changed in slots that came, as it was; None: not known, so the version before
        cannot be read."""
        self._before = None if self._before is None or changed is None else [*self._before, changed]

    def catch_up(
        self, slots: Flags, ids: Numbers, gradients: Floats | None, lr: float | None = None
    ) -> Iterator[None]:
        """The step that the table has made already, for slots that lack it; after `prepare`, as `steps`. They
        are not apart any more."""
        if gradients is not None:
            yield from self._advance(ids, gradients, lr)
        self.apart[slots] = False
        yield from self._sweeps(slots)

    # ------------------------------------------------------------ slots that leave

    def read_in_parts(self, slot: int, at_once: int) -> Iterator[RowsOfIds]:
        """The rows of a slot, at most so many at a time, by ranges of their places. Steps may be made
        meanwhile: see the module."""
        first, ranges = 0, -(-int(self._cells.used[slot]) // at_once)
        for number in range(ranges):
            last = HASHES * (number + 1) // ranges
            rows = self._read(*self._cells.at_places(slot, first, last))
            for some in portions(len(rows), at_once):  # places are not spread evenly
                yield rows.where(some)
            first = last

    def rows_of(self, ids: Numbers) -> RowsOfIds:
        """Those of the ids that have one; copies."""
        places, words = self._find(ids)
        there = places >= 0
        return RowsOfIds(ids[there], words[there], self._rows.read(places[there]))

    def before_of(self, slots: Flags) -> RowsOfIds | None:
        """The part of `before` in these slots."""
        before = self.before
        return None if before is None else before.where(self.are_in(slots, before.ids))

    def are_in(self, slots: Flags, ids: Numbers) -> Flags:
        found: Flags = slots[slots_of(ids, self.spec.seed, self.slot_count)]
        return found

    def are_all_in(self, slots: Flags, ids: Numbers) -> bool:
        return bool(cell_loops.all_in(ids, self._cells.seed, slots))

    def drop_slots(self, slots: Numbers) -> None:
        """They belong to another process now: nobody finds their rows any more. The memory stays taken until
        `give_back`; snapshots that are open lack these rows until then, and must not be read meanwhile."""
        self.removed.lose(self.version)
        for apart in (True, False):  # snapshots never had those that are apart
            some = slots[self.apart[slots] == apart]
            listening = () if apart else tuple(self.leaving)
            self._dropped += [_Dropped(cells, listening) for cells in self._cells.take_out(some)]
        self._forget_oldest(slots)
        self.apart[slots] = False
        if self.sketch is not None:
            self.sketch[slots] = self.sketch_stamps[slots] = 0

    @property
    def has_dropped(self) -> bool:
        """Whether `give_back` has something to do."""
        return bool(self._dropped)

    def give_back(self) -> Iterator[None]:
        """The memory of slots that were dropped; about a millisecond of work between two values, between
        which anything may happen."""
        while self._dropped:
            self._give_some_back(self._dropped[0])
            yield

    def _give_some_back(self, dropped: _Dropped) -> None:
        some = slice(dropped.done, dropped.done + 4 * rows_at_once(self.width))
        cells = dropped.cells.reshape(-1, 2)[some]
        cells = cells[cells[:, 1] != parts.EMPTY]
        places = places_of(cells[:, 1])
        listening = [leaves for leaves in dropped.listening if leaves in self.leaving]  # that are open still
        if listening and len(cells):
            order = np.argsort(cells[:, 0].view(np.int64))
            rows = RowsOfIds(cells[order, 0].view(np.int64), cells[order, 1], self._rows.read(places[order]))
            for leaves in listening:
                leaves(rows)
        self._rows.give_back(places)
        dropped.done = some.stop
        if 2 * dropped.done >= len(dropped.cells):
            self._dropped.popleft()

    # ------------------------------------------------------------ slots that come

    def room_for(self, rows: int) -> Iterator[None]:
        """Waits until there is memory for so many rows that come, and for those of a step that is prepared; a
        millisecond between two values."""
        yield from self._rows.reserve_in_turns(rows + len(self._admitted))

    def put(self, rows: RowsOfIds) -> None:
        """Rows that come, some of which may be there already. Each id once."""
        places, _ = self._find(rows.ids)
        fresh, cells = np.flatnonzero(places < 0), self._cells
        if len(fresh):
            more = np.zeros(self.slot_count, np.int64)
            cell_loops.count_by_slot(rows.ids[fresh], cells.seed, more)
            for _ in cells.reserve(more):
                pass
            self._rows.reserve(len(fresh) + len(self._admitted))  # a step may be prepared, and needs its room
            places[fresh] = self._rows.take(len(fresh))
        self._rows.write(places, rows.content)
        words = with_places(rows.words, places)
        keys = cells.seed, cells.secret
        cell_loops.put_words(cells.addresses, cells.capacities, cells.used, *keys, rows.ids, words)
        self._forget_oldest(slots_of(rows.ids, self.spec.seed, self.slot_count))

    def remove(self, ids: Numbers) -> None:
        """Those of the ids that have a row."""
        places, _ = self._find(ids)
        gone, cells = ids[places >= 0], self._cells
        for slot, mine in chosen_by_slot(gone, self.spec.seed, self.slot_count):
            address, capacity = cells.addresses[slot], int(cells.capacities[slot])
            cell_loops.remove(address, capacity, cells.seed, cells.secret, gone[mine])
            cells.used[slot] -= len(mine)
        self._forget_oldest(slots_of(gone, self.spec.seed, self.slot_count))
        self._rows.give_back(places[places >= 0])

    def leave_surplus(self) -> int:
        """Of slots that came with more rows than their share of `max_rows`, those with the least ids leave;
        answers how many."""
        if self._oldest is None:
            return 0
        surplus = self._cells.used - self._oldest.quotas
        for slot in np.flatnonzero(surplus > 0).tolist():
            ids, _ = self._cells.of_slot(slot)
            self.remove(np.sort(ids)[: int(surplus[slot])])
        return int(surplus[surplus > 0].sum())

    def remove_expired(self, slots: Flags, version: int) -> None:
        """What the step to `version` gives back of these slots."""
        for slot in self._swept(version):
            if slots[slot]:
                _, words = self._cells.remove_expired(slot, version - 1, self._ttl)
                self._rows.give_back(places_of(words))

    def _forget_oldest(self, slots: Flags | Numbers) -> None:
        if self._oldest is not None:
            self._oldest.forget(slots)

    def _find(self, ids: Numbers) -> tuple[Numbers, Words]:
        places, words = np.empty(len(ids), np.int64), np.empty(len(ids), np.uint64)
        cells = self._cells
        keys = cells.seed, cells.secret
        cell_loops.find_words(cells.addresses, cells.capacities, *keys, ids, places, words)
        return places, words
