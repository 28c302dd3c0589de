"""Slots that move from one parameter server (source) to another (target): blocks, with all that belongs to
them, and rows of embedding tables (table/moving.py).

source   Leaving: what is coming --> values of this version while it serves --> next version: frozen
             --> values, optimizer's state, ledger, history
target   Arriving: memory reserved --> parts, kept apart --> whole
             --the slot map says so--> `adopt`: blocks of the store
source   the slot map says so --> `forget`;  or another migration was planned --> thawed, nothing has happened

Synchronous: a block freezes at its next version, when nothing has been pushed for the step after it. So
nothing accumulated has to move, and pushes for that step wait for the target while pulls of both versions are
answered. Asynchronous: all rows are sent first, while pushes step them (LeavingOnArrival in table/moving.py).
Then everything freezes at once, between two pushes, and its part of the ledger moves with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Generator, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from trireme_shared.blocks.buffers import DTYPES, Buffer, BufferPool, bytes_of
from trireme_shared.protocol.errors import BadFrame
from trireme_shared.protocol.records import Mode
from trireme_shared.protocol.records.layout import ELEMENT_BYTES, LEDGER, ROWS, Block
from trireme_shared.protocol.wire.messages import HandedHistory, HandoffPart, MovedBlock, MovedTable
from trireme_shared.serving.core.ledger import SavedLedger
from trireme_shared.serving.core.store import Store
from trireme_shared.serving.core.table.stepping import bits_of

if TYPE_CHECKING:
    from trireme_shared.serving.core.table.moving import ArrivingRows, LeavingRows

Parts = Iterator[tuple[HandoffPart, memoryview]]
TOUCHED_BYTES = 1 << 20  # written at once to new memory: a few milliseconds
LEDGER_BYTES = 1 << 20  # of a ledger's text in the header, and in a piece of a larger one
MOST_LEDGER_BYTES = 1 << 30


class LeavingBlocks:
    """Some blocks of a store, and the `rows` of their slots, if the model has tables. `thaw` or `release` it
    at the end."""

    def __init__(self, store: Store, numbers: Collection[int], rows: LeavingRows | None = None) -> None:
        self._store, self._rows = store, rows
        self._blocks = [store.blocks[number] for number in sorted(numbers)]
        self._early: dict[int, tuple[int, Buffer]] = {}

    def __repr__(self) -> str:
        frozen = sum(state.frozen for state in self._blocks)
        return f"<LeavingBlocks: {frozen} of {len(self._blocks)} frozen, {self._rows!r}>"

    @property
    def even(self) -> bool:
        """Synchronous: whether all of it is at one version, so that it freezes in the same step if it begins
        now. In the middle of a step they are at two, and those that have made it would freeze a whole step
        later than the others."""
        versions = {state.version for state in self._blocks}
        if self._rows is not None:
            versions.add(self._rows.version)
        return self._store.mode is Mode.ASYNC or len(versions) < 2

    @property
    def frozen(self) -> bool:
        """Whether nothing of it changes any more."""
        return all(state.frozen for state in self._blocks) and (self._rows is None or self._rows.frozen)

    @property
    def any_frozen(self) -> bool:
        return any(state.frozen for state in self._blocks) or (self._rows is not None and self._rows.frozen)

    def coming(self) -> tuple[HandoffPart, ...]:
        """What will be sent, as far as it is known; one part for each piece of memory. Rows find theirs as
        they come, before any of them freezes."""
        values = 1 if self._store.mode is Mode.ASYNC else 2
        parts = []
        for state in self._blocks:
            number = state.place.number
            parts += [HandoffPart(block=number, dtype=state.place.dtype)] * values
            parts += [_part_of_state(number, *named) for named in state.optimizer_state().items()]
        return tuple(parts)

    def begin(self) -> None:
        """Synchronous: from now on it freezes at the next possible moment. Asynchronous: with `freeze`."""
        for state in self._blocks if self._store.mode is Mode.SYNC else ():
            state.freeze_at = state.version + 1
            self._early[state.place.number] = state.version, state.current.retain()
        if self._rows is not None:
            self._rows.begin()

    def freeze(self) -> None:
        """As it is."""
        for state in self._blocks:
            state.frozen = True
        if self._rows is not None:
            self._rows.freeze()

    def freeze_idle(self) -> None:
        """No step is made: all of it freezes as it is. If a step is under way, it freezes when that is whole,
        all of it: pushes to the first would wait for the last."""
        idle = self._rows is None or self._rows.idle
        if idle and self.even and not any(state.tree.nodes for state in self._blocks):
            self.freeze()

    def early(self) -> Parts:
        """What the target will need and may be sent before it is frozen: the values that the next version's
        `previous` will be, and all rows."""
        for number, (version, values) in self._early.items():
            yield HandoffPart(block=number, version=version, dtype=values.dtype), values.view
        if self._rows is not None:
            yield from self._rows.early()

    def rest(self) -> Parts:
        """Once it is frozen: values, the version before if it was not sent early, the optimizer's state, and
        the rows that changed."""
        for state in self._blocks:
            number = state.place.number
            known = self._early[number][0] if number in self._early else None
            if state.previous is not None and known != state.version - 1:
                before = HandoffPart(block=number, version=state.version - 1, dtype=state.place.dtype)
                yield before, state.previous.view
            if known != state.version:
                yield (
                    HandoffPart(block=number, version=state.version, dtype=state.place.dtype),
                    state.current.view,
                )
            for name, tensor in state.optimizer_state().items():
                yield _part_of_state(number, name, tensor), bytes_of(tensor.reshape(-1))
        if self._rows is not None:
            yield from self._rows.rest()

    def described(self) -> tuple[MovedBlock, ...]:
        return tuple(
            MovedBlock(
                block=state.place.number, version=state.version, updates=state.updates, since=state.since
            )
            for state in self._blocks
        )

    def described_tables(self) -> tuple[tuple[MovedTable, ...], int]:
        """And their version."""
        return ((), 0) if self._rows is None else (self._rows.described(), self._rows.version)

    def ledger(self) -> SavedLedger:
        """Asynchronous: of these blocks, in the order of `described`, and of the rows of these slots."""
        positions = {number: position for position, number in enumerate(self._store.blocks)}
        slots = 0 if self._rows is None else bits_of(self._rows.slots)
        return self._store.ledger_part([positions[state.place.number] for state in self._blocks], slots)

    def thaw(self) -> None:
        """It stays here."""
        for state in self._blocks:
            state.frozen, state.freeze_at = False, None
        if self._rows is not None:
            self._rows.thaw()
        self.release()

    def release(self) -> None:
        """What was kept to be sent is not sent any more."""
        for _, values in self._early.values():
            values.release()
        self._early = {}
        if self._rows is not None:
            self._rows.release()


def _part_of_state(number: int, name: str, tensor: torch.Tensor) -> HandoffPart:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return HandoffPart(block=number, name=name, dtype=dtype, scalar=tensor.dim() == 0)


@dataclass(slots=True)
class _Arrived:
    """A block's parts. `values`: by version. `vacant`, `vacant_state`: memory for parts that have not
    come."""

    values: dict[int, Buffer] = field(default_factory=dict)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    vacant: list[Buffer] = field(default_factory=list)
    vacant_state: dict[str, torch.Tensor] = field(default_factory=dict)

    def release_vacant(self) -> None:
        for values in self.vacant:
            values.release()
        self.vacant.clear()
        self.vacant_state.clear()

    def release(self) -> None:
        self.release_vacant()
        for values in self.values.values():
            values.release()
        self.values.clear()


class ArrivingBlocks:
    """The target's end: `reserve` memory, `take` the parts, `complete` them, `adopt` them into the store; or
    `release`. `places`: the blocks that belong to the group; `slots`: its slots, and `rows` theirs, if the
    model has tables."""

    def __init__(
        self,
        places: dict[int, Block],
        pool: BufferPool,
        rows: ArrivingRows | None = None,
        slots: Collection[int] = (),
    ) -> None:
        self._places, self._pool, self.rows, self.slots = places, pool, rows, frozenset(slots)
        self._arrived = {number: _Arrived() for number in places}
        self.blocks: tuple[MovedBlock, ...] = ()
        self.history = HandedHistory()
        self.ledger = SavedLedger({})
        self.ledger_text = bytearray()  # that came in pieces
        self.whole = False

    def __repr__(self) -> str:
        return f"<ArrivingBlocks {len(self._places)}: {'whole' if self.whole else 'not whole'}>"

    @property
    def numbers(self) -> frozenset[int]:
        return frozenset(self._places)

    def reserve(self, coming: Collection[HandoffPart]) -> Generator[None]:
        """Take memory for parts, if it is not there, and write to all of it: the first write to a page costs
        a multiple of a copy, and has to be over before the parts freeze at the source. Yields after each
        TOUCHED_BYTES. Raises BadFrame."""
        for part, count in Counter(coming).items():
            elements, size = self._elements(part), ELEMENT_BYTES[part.dtype]
            while self._lacks(part, count):
                values = None if part.name else self._pool.take(part.dtype, elements)
                tensor = _empty(part, elements) if values is None else values.tensor
                try:
                    for first in range(0, elements, TOUCHED_BYTES // size):
                        tensor.view(-1)[first : first + TOUCHED_BYTES // size].zero_()
                        yield
                    if self._lacks(part, count):  # no repetition of the request was faster
                        arrived = self._arrived[part.block]
                        if values is None:
                            arrived.vacant_state[part.name] = tensor
                        else:
                            arrived.vacant.append(values.retain())
                finally:
                    if values is not None:
                        values.release()

    def _lacks(self, part: HandoffPart, count: int) -> bool:
        """Whether there is less memory than for `count` such parts."""
        arrived = self._arrived.get(part.block)
        if self.whole or arrived is None:
            return False
        if part.name:
            return part.name not in arrived.vacant_state and part.name not in arrived.state
        return len(arrived.values) + len(arrived.vacant) < count

    def room_for(self, part: HandoffPart, size: int) -> Iterator[None]:
        """Waits until there is memory for a part of `size` bytes, if it has rows; a millisecond between two
        values."""
        if part.block == ROWS and self.rows is not None and not self.whole:
            yield from self.rows.room_for(part, size)

    def take(self, part: HandoffPart, payload: memoryview) -> None:
        """Copy a part; one that is there already is left as it is. Raises BadFrame."""
        if part.block == LEDGER:
            self._take_ledger(part, payload)
            return
        if part.block == ROWS and self.rows is not None:
            if not self.whole:
                self.rows.take(part, payload.cast("B"))
            return
        elements = self._elements(part)
        if payload.nbytes != elements * ELEMENT_BYTES[part.dtype]:
            msg = (
                f"part {part.name!r} of block {part.block} has {payload.nbytes} bytes: expected "
                f"{elements} of {part.dtype}"
            )
            raise BadFrame(msg)
        if self.whole:
            return
        arrived = self._arrived[part.block]
        if not part.name and part.version not in arrived.values:
            values = arrived.vacant.pop() if arrived.vacant else self._pool.take(part.dtype, elements)
            values.view[:] = payload.cast("B")
            arrived.values[part.version] = values
        elif part.name and part.name not in arrived.state:
            tensor = arrived.vacant_state.pop(part.name, None)
            if tensor is None or (tensor.numel(), tensor.dtype) != (elements, DTYPES[part.dtype]):
                tensor = _empty(part, elements)
            bytes_of(tensor.reshape(-1))[:] = payload.cast("B")
            arrived.state[part.name] = tensor

    def _take_ledger(self, part: HandoffPart, payload: memoryview) -> None:
        """Each request has all pieces anew: other blocks of the source go on, and are told of there, too."""
        if self.whole:
            return
        if not part.first:
            self.ledger_text.clear()
        size = len(self.ledger_text)
        if part.first != size or size + payload.nbytes > MOST_LEDGER_BYTES:
            msg = (
                f"a piece of the ledger with {payload.nbytes} bytes at byte {part.first}: expected the next "
                f"one at {size}, and at most {MOST_LEDGER_BYTES} bytes in all"
            )
            raise BadFrame(msg)
        self.ledger_text += payload

    def _elements(self, part: HandoffPart) -> int:
        """How many elements the part has. Raises BadFrame: it does not belong to the group."""
        place = self._places.get(part.block)
        fits = place is not None and (bool(part.name) or (part.dtype == place.dtype and not part.scalar))
        if place is None or not fits or part.dtype not in ELEMENT_BYTES:
            msg = f"part {part.name!r} of block {part.block}, {part.dtype!r}, does not belong to this group"
            raise BadFrame(msg)
        return 1 if part.scalar else place.elements

    def complete(self, blocks: tuple[MovedBlock, ...], history: HandedHistory, ledger: SavedLedger) -> None:
        """The source says what the parts make. Raises BadFrame if one is missing."""
        if self.whole:
            return
        lacking = [each.block for each in blocks if each.version not in self._arrived[each.block].values]
        if {each.block for each in blocks} != self.numbers or lacking:
            msg = (
                f"{len(blocks)} blocks of {len(self._places)} are said to be whole; values are missing "
                f"of {lacking[:4]}"
            )
            raise BadFrame(msg)
        if self.rows is not None and self.rows.on_arrival and sum(ledger.slots) != bits_of(self.slots):
            named, expected = sum(ledger.slots), bits_of(self.slots)
            raise BadFrame(f"the ledger has rows of slots {named:#x} (bits): the group is of {expected:#x}")
        self.blocks, self.history, self.ledger, self.whole = blocks, history, ledger, True
        self.ledger_text.clear()
        for arrived in self._arrived.values():
            arrived.release_vacant()

    def adopt_into(self, store: Store) -> None:
        """All of it is the store's from now on; it has to be renumbered, and its ledger to be joined."""
        store.history.take(self.history)
        if self.rows is not None:
            self.rows.adopt()
        for moved in self.blocks:
            arrived = self._arrived.pop(moved.block)
            store.place_block(moved.block, arrived.values.pop(moved.version), arrived.state)
            previous = arrived.values.pop(moved.version - 1, None)
            store.blocks[moved.block].carry_on(moved.version, moved.updates, previous, moved.since)
            arrived.release()

    def release(self) -> None:
        """Nothing of it is needed."""
        if self.rows is not None:
            self.rows.release()
        for arrived in self._arrived.values():
            arrived.release()
        self._arrived = {}


def in_pieces(ledger: str) -> Parts:
    """The text of a ledger that is too large for the header of a hand-off."""
    text = memoryview(ledger.encode())
    for first in range(0, len(text), LEDGER_BYTES):
        yield HandoffPart(block=LEDGER, dtype="uint8", first=first), text[first : first + LEDGER_BYTES]


def _empty(part: HandoffPart, elements: int) -> torch.Tensor:
    return torch.empty(() if part.scalar else (elements,), dtype=DTYPES[part.dtype])


def adopt(store: Store, groups: Collection[ArrivingBlocks], own_slots: Collection[int] = ()) -> None:
    """In place: blocks that moved here, and rows of their slots. `own_slots`: those that were here before."""
    own = store.ledger_part(range(len(store.blocks)), bits_of(own_slots), stays=True), len(store.blocks)
    arrived = [(group.ledger, len(group.blocks)) for group in groups]
    for group in groups:
        group.adopt_into(store)
    store.renumber()
    store.join_ledgers([own, *arrived])


def forget(
    store: Store, numbers: Collection[int], slots: Collection[int] = (), own_slots: Collection[int] = ()
) -> None:
    """In place: blocks that moved away, and the rows of these slots. `own_slots`: those that stay."""
    if store.rows is not None:
        store.rows.drop(np.array(sorted(slots), np.int64))
    staying = [position for position, number in enumerate(store.blocks) if number not in numbers]
    ledger = store.ledger_part(staying, bits_of(own_slots), stays=True)
    for number in numbers:
        store.blocks.pop(number).let_go()
    store.renumber()
    store.join_ledgers([(ledger, len(staying))])
