"""When the rows of embedding tables are stepped: at once here, or in turns with everything else
(data_plane/row_turns.py).

all data of a synchronous step is there ─► begin ─► server.rows_stepped
rows of an asynchronous push ─► take ─► server.rows_taken

Rows of an asynchronous push are applied to each slot once:

push of minibatches [start, end) ─► waits for its turn ─► due by the ledger of their slots
    ─► stepped, some at a time ─► entered: the next version of the tables
                               `─► frozen: MOVING, and nothing has happened

A push counts for all slots, also for those without an id in it: whoever asks the ledger which minibatches are
there hears the same of all. One push at a time is being stepped, and it ends whatever becomes of who sent it.
Copies for checkpoints, and slots that come or go, have their moment between two pushes: then rows and ledger
tell of the same minibatches.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from trireme_shared.protocol.wire.messages import Verdict
from trireme_shared.serving.core.ledger import Ledger
from trireme_shared.serving.core.store import Push, Store
from trireme_shared.tables.hashing import Ids, slots_of
from trireme_shared.tables.payload import Rows

if TYPE_CHECKING:
    from trireme_shared.serving.core.table.rows import TableRows  # loads numba

_COUNTED = (Verdict.APPLIED, Verdict.DUPLICATE)


def every_slot(slot_count: int) -> int:
    """As bits."""
    return (1 << slot_count) - 1


def bits_of(slots: Iterable[int]) -> int:
    return sum(1 << slot for slot in set(slots))


@dataclass(slots=True, eq=False)
class ArrivedRows:
    """Of one push, until they are in the tables. `ids`, `gradients`: of each table, of slots that are here.
    `count`: records that the gradients are of. `ledger`, `refusal` are asked when it is their turn: the one
    that counts, and why they are not taken. `settled` is called once, with what became of them. `version`: of
    the rows that the gradients were computed from; None: it does not matter."""

    rows: TableRows
    ledger: Callable[[], Ledger]
    push: Push
    ids: Sequence[Ids]
    gradients: Sequence[Rows]
    count: int
    bytes: int
    refusal: Callable[[Sequence[Ids]], Verdict | None]
    settled: Callable[[Verdict | Exception], None]
    version: int | None = None

    def __repr__(self) -> str:
        header = self.push.header
        return (
            f"<ArrivedRows of task {self.push.task}, minibatches [{header.start}, {header.end}): "
            f"{self.bytes} bytes>"
        )

    def steps(self) -> Generator[None, None, Verdict]:
        """In place: rows and ledger; milliseconds of work between two values. DUPLICATE: all slots have the
        minibatches; MOVING: some lack them, and no row takes any now; another refusal: some of them do not
        take them, the others have taken them. Raises InvalidArgument: nothing has changed."""
        rows, header, task = self.rows, self.push.header, self.push.task
        if (refusal := self.refusal(self.ids)) is not None:
            return refusal
        ledger = self.ledger()
        verdicts = [ledger.judge(header, task, position) for position in ledger.rows]
        due = [place for place, verdict in enumerate(verdicts) if verdict is Verdict.APPLIED]
        if due and rows.frozen:
            return Verdict.MOVING
        if due:
            ids, gradients = self.ids, self.gradients
            if len(due) < len(verdicts):
                ids, gradients = _of_slots(rows, [ledger.slots[place] for place in due], ids, gradients)
            ahead = 0 if self.version is None else rows.version - self.version
            yield from rows.apply(ids, gradients, self.count, header.lane_zero, ahead)
            assert self.ledger() is ledger, "slots came or went in the middle of a push"
            for place in due:
                ledger.enter(header, task, ledger.rows[place])
        refused = next((verdict for verdict in verdicts if verdict not in _COUNTED), None)
        return refused or (Verdict.APPLIED if due else Verdict.DUPLICATE)

    def whole(self) -> Verdict | Exception:
        """`steps` at once."""
        steps = self.steps()
        try:
            while True:
                next(steps)
        except StopIteration as end:
            verdict: Verdict = end.value
            return verdict


def _of_slots(
    rows: TableRows, groups: Collection[int], ids: Sequence[Ids], gradients: Sequence[Rows]
) -> tuple[list[Ids], list[Rows]]:
    """Those of these slots (bits)."""
    bits = 0
    for group in groups:
        bits |= group
    own = np.array([bits >> slot & 1 for slot in range(rows.slot_count)], np.bool_)
    chosen = [
        own[slots_of(some, table.spec.seed, rows.slot_count)]
        for some, table in zip(ids, rows.tables, strict=True)
    ]
    return (
        [some[there] for some, there in zip(ids, chosen, strict=True)],
        [some[there] for some, there in zip(gradients, chosen, strict=True)],
    )


class RowsServer(Protocol):
    """The server whose rows are stepped."""

    index: int
    store: Store | None

    @property
    def snapshot_bytes(self) -> int | None:
        """How much steps may keep of rows for snapshots, in bytes; None: the tables' default."""
        ...

    def rows_stepped(self, store: Store, before: int) -> None:
        """The step from version `before` is over."""
        ...

    def rows_taken(self, arrived: ArrivedRows, found: Verdict | Exception) -> None:
        """The rows of an asynchronous push are applied, or refused."""
        ...

    def tear(self, cause: str) -> None:
        """A step failed half way: the parameters are lost."""
        ...


class RowSteps(Protocol):
    """The part of a server that steps its rows. One asynchronous push at a time is being stepped."""

    def begin(self, store: Store) -> None:
        """Step the rows of a synchronous job, whose data is all there."""
        ...

    def take(self, arrived: ArrivedRows) -> None:
        """Apply the rows of an asynchronous push."""
        ...

    def finish(self) -> None:
        """Apply the rest of the push that is being stepped: no push is half applied on return."""
        ...

    def between_pushes(self, call: Callable[[], None]) -> None:
        """Call `call` when no push is half applied."""
        ...

    def give_back(self, rows: TableRows) -> None:
        """Free the memory of rows whose slots were dropped."""
        ...


class StepsAtOnce:
    """Steps rows in one go, where nobody else needs the processor meanwhile, or a step must not be cut by a
    new generation."""

    def __init__(self, server: RowsServer) -> None:
        self._server = server

    def begin(self, store: Store) -> None:
        assert store.rows is not None
        before = store.rows.version
        for _ in store.rows.steps(store.history.lane_zero(before)):
            pass
        self._server.rows_stepped(store, before)

    def take(self, arrived: ArrivedRows) -> None:
        self._server.rows_taken(arrived, arrived.whole())

    def finish(self) -> None:
        pass

    def between_pushes(self, call: Callable[[], None]) -> None:
        call()

    def give_back(self, rows: TableRows) -> None:
        rows.give_back_at_once()
