"""Pushes and pulls in progress at one server of blocks, and what they need of that server. Nothing here
waits.

OpenPush   apply(block, payload) ... --> answer()        OpenPull   next() --> block | end | None: nothing yet
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from trireme_shared.blocks.buffers import Buffer, ReceivedMemory, tensor_over
from trireme_shared.protocol.errors import BadFrame
from trireme_shared.protocol.records import Mode
from trireme_shared.protocol.records.job_choices import Narrow
from trireme_shared.protocol.records.layout import ROWS
from trireme_shared.protocol.records.step import StepRecord
from trireme_shared.protocol.wire.messages import (
    PullEnd,
    PullRequest,
    PushAnswer,
    PushBlock,
    PushHeader,
    Refusal,
    Verdict,
)
from trireme_shared.serving.core.store import Store, is_same, known_of, moment_of, squares_at
from trireme_shared.serving.core.stores import AsyncStore
from trireme_shared.serving.core.table.stepping import ArrivedRows, RowSteps
from trireme_shared.tables.payload import size_of

if TYPE_CHECKING:
    from trireme_shared.serving.core.table.rows import TableRows  # loads numba
    from trireme_shared.tables.memory import Floats, Numbers

ALL_BYTES = 1 << 62

Payload = bytes | bytearray | memoryview


@dataclass(slots=True)
class Counters:
    """Since the process started, for /metrics."""

    pushes: int = 0
    pulls: int = 0
    blocks_applied: int = 0
    blocks_duplicate: int = 0
    blocks_refused: int = 0
    bytes_pushed: int = 0
    bytes_pulled: int = 0


class CallServer(Protocol):
    """What open pushes and pulls need of the server that has the blocks (serving/block_server.py).

    `pulls`: those that are open. `payloads`: memory in which pushed rows are received. `row_steps`: steps the
    rows of embedding tables. `refused_at`: when a push was first refused because its block is being moved to
    another server, in seconds of `now`.
    """

    store: Store | None
    generation: int
    timeline: int
    index: int
    counters: Counters
    pulls: list[OpenPull]
    payloads: ReceivedMemory
    row_steps: RowSteps
    refused_at: float | None

    def now(self) -> float:
        """Seconds of a clock that only goes forward."""
        ...

    def is_live(self, trainer: str) -> bool:
        """Whether the trainer is a member of the job."""
        ...

    def is_stale(self, generation: int) -> bool:
        """Whether pushes of that generation are refused."""
        ...

    def stepped(self, number: int, version: int) -> None:
        """A block has reached a version."""
        ...

    def held(self, number: int) -> None:
        """A block has all data of its step, and waits for the norm of the whole gradient."""
        ...

    def push_ended(self, store: Store, trainer: str, *, keeps: bool) -> None:
        """A trainer's push is over. `keeps`: the trainer goes on with the parameters that it has."""
        ...

    def within_bounds(self) -> None:
        """A trainer with old parameters has stopped computing with them."""
        ...

    def look_for_snapshot(self) -> None:
        """A snapshot may have become whole."""
        ...


class OpenPush:
    """An admitted push. Blocks that were applied stay applied, even if the rest fails. Raises as
    `Store.admit`. `waiting`: rows of an asynchronous one that are not applied yet, and blocks that wait for
    their siblings where the sender has them (`keep_some` copies those); `on_settled` is called when some are
    not any more. It does not keep the store alive: a job that goes back to a checkpoint needs the memory, and
    a sender may be slow to end its push."""

    def __init__(
        self,
        server: CallServer,
        store: Store,
        header: PushHeader,
        on_settled: Callable[[], None] | None = None,
    ) -> None:
        self._server, self._held, self._header = server, weakref.ref(store), header
        self._dims = store.rows.dims if store.rows is not None else None
        self._push = store.admit(header)
        store.history.results.forget(header.stored)
        self._applied = self._duplicate = self.waiting = 0
        self._borrowed: dict[int, None] = {}  # blocks that may wait in the sender's memory
        self._refused: list[Refusal] = []
        self._error: Exception | None = None
        self._on_settled = on_settled

    def __repr__(self) -> str:
        return (
            f"<OpenPush {self._applied} applied, {self._duplicate} duplicate, {len(self._refused)} refused>"
        )

    def apply(self, item: PushBlock, payload: Payload, memory: Buffer | None = None) -> None:
        """The payload of a block is used during the call only; a writable one may be overwritten. `memory`:
        the buffer that starts with it; it is retained if the payload has to wait for others. A writable
        payload of rows without `memory` is kept: it is ours. A block that may only be read stays as it is
        until nothing of the push is `waiting`."""
        view, store = memoryview(payload).cast("B"), self._held()
        stale = store is None or self._server.is_stale(self._header.generation)
        lent = self._lent(item, view) if memory is None and not stale else None
        verdict = Verdict.STALE_GENERATION if stale else self.take_block(item, view, memory or lent)
        if verdict is not None:
            self._count(item, view.nbytes, verdict)
        if lent is not None:
            lent.release()

    def learn(self, item: PushBlock) -> None:
        """Call it when a block arrives that is applied later: what it says of its lanes holds for those that
        come behind it, too, and may be applied before it."""
        if item.result is not None:
            self._push.results[item.lanes] = item.result

    @property
    def _store(self) -> Store:
        """While somebody holds it."""
        store = self._held()
        assert store is not None, f"the store of {self!r} is gone"
        return store

    def _lent(self, item: PushBlock, view: memoryview) -> Buffer | None:
        """A synchronous push's block, if it may wait where it is."""
        state = self._store.blocks.get(item.block)
        if not view.readonly or state is None or item.dtype is not None or self._store.mode is not Mode.SYNC:
            return None
        place = state.place
        if view.nbytes != place.bytes:
            return None
        self.waiting += 1
        self._borrowed[item.block] = None
        return Buffer(self, (place.dtype, place.elements), tensor_over(view, place.dtype), view=view)

    def put_back(self, buffer: Buffer) -> None:  # noqa: ARG002
        """A block waits in the sender's memory no more."""
        self.waiting -= 1
        if not self.waiting:
            self._borrowed.clear()
        if self._on_settled is not None:
            self._on_settled()

    def keep_some(self, most_bytes: int) -> bool:
        """Copy blocks that wait in the sender's memory, of so many bytes; whether there may be more."""
        done, store = 0, self._held()
        if store is None and self._borrowed:  # what waited is gone with the store
            self._borrowed.clear()
            self.waiting = 0
            if self._on_settled is not None:
                self._on_settled()
        while store is not None and self._borrowed and done < most_bytes:
            number, _ = self._borrowed.popitem()
            if (state := store.blocks.get(number)) is not None:
                done += state.place.bytes
                state.tree.keep()
        return bool(self._borrowed)

    def close(self) -> None:
        """The sender is gone, or has its answer: what waits in its memory is copied, and nobody is told any
        more."""
        self._on_settled = None  # it may hold who began this push, whose memory is given back at once
        self.keep_some(ALL_BYTES)

    def _count(self, item: PushBlock, size: int, verdict: Verdict) -> None:
        server, counters, store = self._server, self._server.counters, self._held()
        if verdict is Verdict.APPLIED:
            if store is not None:
                store.parameters_in_use.pushes += not self._applied
            self._applied += 1
            counters.blocks_applied += 1
        elif verdict is Verdict.DUPLICATE:
            self._duplicate += 1
            counters.blocks_duplicate += 1
        else:
            state = store.blocks.get(item.block) if store is not None else None
            version, misfits = state.version if state else 0, verdict is Verdict.LAYOUT_MISMATCH
            why = store.misfit(item, size) if store is not None and misfits else ""
            self._refused.append(
                Refusal(block=item.block, lanes=item.lanes, code=verdict, version=version, message=why)
            )
            counters.blocks_refused += 1
            if verdict is Verdict.MOVING and server.refused_at is None:
                server.refused_at = server.now()

    def most_bytes(self, item: PushBlock, block: int) -> int:
        """Of its payload; `block`: of one of a block. Raises BadFrame: no rows can be as many."""
        if item.block != ROWS or self._dims is None or item.rows is None:
            return block
        return size_of(item.rows, self._dims, ids=True, rows=True, dtype=item.dtype)

    def answer(self) -> PushAnswer:
        """Once no rows of it wait. Raises what kept them from being applied."""
        if self._error is not None:
            raise self._error
        header, store = self._header, self._held()
        if store is not None:
            self._server.push_ended(store, header.trainer, keeps=header.keeps)
        return PushAnswer(
            applied=self._applied,
            duplicate=self._duplicate,
            first=store.history.first_from(header.trainer, header.step) if store is not None else (),
            refused=tuple(self._refused),
            generation=self._server.generation,
        )

    def take_block(self, item: PushBlock, view: memoryview, memory: Buffer | None) -> Verdict | None:
        """None: rows that wait for their turn."""
        store = self._store
        state = store.blocks.get(item.block)
        self.learn(item)
        self._server.counters.bytes_pushed += view.nbytes
        before = state.version if state else 0
        if item.block == ROWS:
            # others may write into what is read only here, ids that were checked too
            kept = memory is None and not view.readonly
            return self._take_rows(item, view if kept else self._server.payloads.copied(view))
        verdict = store.apply(self._push, item, view, memory)
        if state is not None and state.version != before:
            self._server.stepped(item.block, state.version)
        elif state is not None and verdict is Verdict.APPLIED and state.held:
            self._server.held(item.block)
        return verdict

    def _take_rows(self, item: PushBlock, payload: memoryview) -> Verdict | None:
        """Gradients of rows of the embedding tables: of a lane, or of an asynchronous push, which wait for
        their turn. The payload is kept."""
        store, (lane, after) = self._store, item.lanes
        rows, step, on_arrival = store.rows, self._header.step, store.mode is Mode.ASYNC
        if rows is None or item.rows is None or after != lane + 1 or item.count < 0:
            return Verdict.LAYOUT_MISMATCH
        if not on_arrival and (refusal := store.judge(self._push, item.lanes)) is not None:
            return refusal
        try:
            ids, gradients = rows.read(item.rows, payload, item.dtype)
        except BadFrame:
            return Verdict.BAD_FRAME
        if on_arrival:
            self._arrived(item, payload.nbytes, rows, ids, gradients)
            return None
        if not rows.are_by(item.slots, store.slots) or not rows.are_owned(
            ids, store.slots, self._server.index
        ):
            return Verdict.WRONG_OWNER
        verdict = rows.push(step, lane, ids, gradients, item.count)
        if verdict is Verdict.APPLIED and item.lanes not in self._push.noted:
            self._push.noted.add(item.lanes)
            store.history.note(
                self._header, self._push.positions, item.lanes, self._push.results.get(item.lanes)
            )
        if rows.is_whole:
            self._server.row_steps.begin(store)
        return verdict

    def _arrived(
        self, item: PushBlock, size: int, rows: TableRows, ids: Sequence[Numbers], gradients: Sequence[Floats]
    ) -> None:
        """Rows of an asynchronous push."""

        def settled(found: Verdict | Exception) -> None:
            self.waiting -= 1
            if isinstance(found, Exception):
                self._error = found
            else:
                self._count(item, size, found)
            if self._on_settled is not None:
                self._on_settled()

        store = self._store
        assert isinstance(store, AsyncStore)
        self.waiting += 1
        refusal = partial(self.refusal_of_rows, item, rows)
        push, count, of_version = self._push, item.count, item.version
        arrived = ArrivedRows(
            rows, lambda: store.ledger, push, ids, gradients, count, size, refusal, settled, of_version
        )
        self._server.row_steps.take(arrived)

    def refusal_of_rows(self, item: PushBlock, rows: TableRows, ids: Sequence[Numbers]) -> Verdict | None:
        """Why rows of an asynchronous push are not taken, now that it is their turn."""
        server, store = self._server, self._held()
        if store is None or server.store is not store or server.is_stale(self._header.generation):
            return Verdict.STALE_GENERATION
        if not rows.are_by(item.slots, store.slots) or not rows.are_owned(ids, store.slots, server.index):
            return Verdict.WRONG_OWNER
        return None


class OpenPull:
    """`arrived` is called when `next` has a block again, or the end, after it had none. Close it at the
    end."""

    def __init__(
        self,
        server: CallServer,
        store: Store,
        request: PullRequest,
        deadline: float,
        arrived: Callable[[], None],
    ) -> None:
        self.deadline, self.wake = deadline, arrived
        self._server, self._store = server, store
        self._version, self._dtype = request.version, request.dtype
        self._results_from = request.results_from
        self._moment = moment_of(store, request.known)
        self._known = None if request.known is None else known_of(store, request.version)
        self._blocks = request.blocks
        self._due = deque(request.blocks)
        self._slots = request.slots
        self._missing: set[int] = set()
        self._unheld: set[int] = set()  # those of the missing ones whose data is not all there
        self._lost: int | None = None  # one of the missing blocks, which another parameter server has now
        if store.rows is not None and request.version is not None and store.rows.version < request.version:
            self._missing.add(ROWS)
            self._unheld.add(ROWS)
        self._lowest = store.highest
        self._record: StepRecord | None = None
        self._versions: dict[int, int] | None = {} if request.versions else None
        self._bound = request.bound if store.mode is Mode.ASYNC else None
        if self._bound is not None and store.parameters_in_use.let_go(self._bound.trainer):
            server.within_bounds()
        server.pulls.append(self)

    def __repr__(self) -> str:
        return f"<OpenPull of version {self._version}: {len(self._due)} due, {len(self._missing)} missing>"

    def next(self) -> tuple[int, int, Buffer | None] | PullEnd | None:
        """A block, its version and its values (retained: the caller releases them when they are sent; None:
        the puller has them), the end, or None: not yet."""
        store, wanted = self._store, self._version
        if self._server.store is not store:
            return PullEnd(code="NOT_READY", message="the job is being rolled back")
        if self._is_held_back() is not None:
            return None
        while self._due:
            number = self._due.popleft()
            found = store.pull(number, wanted)
            if found is Verdict.TOO_EARLY and store.settle(number):
                self._server.stepped(number, store.blocks[number].version)
                found = store.pull(number, wanted)
            if found is Verdict.WRONG_OWNER:
                return _moved(number)
            if found is Verdict.TOO_EARLY:
                self._missing.add(number)
                if not store.blocks[number].held:
                    self._unheld.add(number)
                continue
            if not isinstance(found, Buffer):
                held = store.blocks[number].version
                return PullEnd(
                    code="GONE",
                    message=f"block {number} is at version {held}, {wanted} was asked: join again",
                )
            version = store.blocks[number].version if wanted is None else wanted
            self._lowest = min(self._lowest, version)
            if self._versions is not None:
                self._versions[number] = version
            # the history may drop it before the last block is sent
            self._record = self._record or store.history.record(version)
            if is_same(store, number, wanted, self._moment):
                return number, version, None
            try:
                narrow = self.narrow(number)
                sent = found.narrowed(narrow) if narrow else found.retain()
            except OverflowError as error:
                return PullEnd(code="OVERFLOW", message=f"a parameter in block {number}: {error}")
            self._server.counters.bytes_pulled += sent.view.nbytes
            return number, version, sent
        if self._missing:
            if self._lost is not None:
                return _moved(self._lost)
            return None if self._unheld else self._held_end()
        if store.rows is not None and not store.rows.are_by(self._slots, store.slots):
            return PullEnd(
                code="WRONG_OWNER", message=f"slot map {self._slots} does not say whose rows are here"
            )
        if store.do_rows_wait(wanted):
            if not store.settle_rows():
                return self._held_end()
            self._server.look_for_snapshot()
        version = self._lowest if wanted is None else wanted
        record = self._record
        if record is None or record.version != version:
            record = store.history.record(version)
        if store.mode is Mode.ASYNC:
            versions = tuple((self._versions or {}).items())
            return PullEnd(code="OK", known=self._known, timeline=self._server.timeline, versions=versions)
        return PullEnd(
            code="OK",
            record=record,
            known=self._known,
            squares=squares_at(store.blocks, self._blocks, version)
            if store.clipping.measures(version - 1)
            else (),
            timeline=self._server.timeline,
            results=None if self._results_from is None else store.history.results.portion(self._results_from),
        )

    def _held_end(self) -> PullEnd:
        """All data of the missing blocks is there; or none is missing, and the rows' step waits."""
        # ROWS is an unheld one
        version = min((self._store.blocks[each].version for each in self._missing), default=-1)
        return PullEnd(
            code="HELD",
            message=f"{len(self._missing) or 'no'} blocks, and the record of the version, wait for the "
            "norm of the whole gradient",
            known=self._known,
            squares=squares_at(self._store.blocks, sorted(self._missing), version),
            timeline=self._server.timeline,
        )

    def _is_held_back(self) -> tuple[str, int] | None:
        """By which trainer, and how many pushes old its parameters are."""
        bound, server = self._bound, self._server
        if bound is None or bound.versions is None:
            return None
        now = server.now()
        slowest = self._store.parameters_in_use.slowest(bound, server.is_live, now)
        if slowest is not None and slowest[1] > bound.versions:
            return slowest
        if server.is_live(bound.trainer):
            self._store.parameters_in_use.pulled(bound.trainer, now)
        self._bound = None
        return None

    def look_at_bound(self) -> None:
        """The oldest parameters that a trainer computes with may be newer than before."""
        if self._bound is not None:
            self.wake()

    def narrow(self, number: int) -> Narrow | None:
        """The dtype that a block's values are sent in, if it is not their own."""
        return self._dtype if self._store.blocks[number].narrows else None

    def stepped(self, number: int, version: int) -> None:
        """A block has reached a version."""
        if version == self._version and number in self._missing:
            self._missing.remove(number)
            self._unheld.discard(number)
            if number != ROWS:
                self._due.append(number)
            if number == ROWS and not self._unheld:
                self._due.extend(self._missing)  # they are held
                self._missing.clear()
            self.wake()

    def held(self, number: int) -> None:
        """All data of a block is there. If that is so of all, the puller has to find the norm."""
        if number in self._unheld:
            self._unheld.remove(number)
            if not self._unheld:
                self._due.extend(self._missing)  # the norm may be known
                self._missing.clear()
                self.wake()

    def forgotten(self, numbers: Collection[int]) -> None:
        """Other parameter servers have these blocks now."""
        if not self._missing.isdisjoint(numbers):
            self._lost = min(self._missing.intersection(numbers))
            self.wake()

    def too_early(self) -> PullEnd:
        """The end of a pull that has waited until its deadline."""
        if (slowest := self._is_held_back()) is not None and self._bound is not None:
            name, behind = slowest
            message = (
                f"{name} computes with parameters {behind} pushes old, and max_staleness is "
                f"{self._bound.versions}"
            )
            return PullEnd(code="TOO_EARLY", message=message, known=self._known)
        if self._lost is not None:
            return _moved(self._lost)
        number = min(self._missing - {ROWS}, default=ROWS)
        held = self._store.lowest if number == ROWS else self._store.blocks[number].version
        what = "rows of tables are" if number == ROWS else f"block {number} is"
        return PullEnd(
            code="TOO_EARLY",
            message=f"{len(self._missing)} blocks have not reached version {self._version} ({what} at "
            f"{held}): ask again",
            known=self._known,
        )

    def close(self) -> None:
        self._missing.clear()
        if self in self._server.pulls:
            self._server.pulls.remove(self)


def _moved(number: int) -> PullEnd:
    return PullEnd(code="WRONG_OWNER", message=f"block {number} is at another parameter server now")
