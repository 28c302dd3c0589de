"""Pushes in progress at one owner of blocks. Nothing here waits.

OpenPush   apply(block, payload) ... --> answer()
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from trireme_shared.blocks.buffers import Buffer, tensor_over
from trireme_shared.protocol.errors import BadFrame
from trireme_shared.protocol.records import Mode
from trireme_shared.protocol.records.layout import ROWS
from trireme_shared.protocol.wire.messages import PushAnswer, PushBlock, PushHeader, Refusal, Verdict
from trireme_shared.serving.core.calls import CallServer, Payload
from trireme_shared.serving.core.store import Store
from trireme_shared.serving.core.stores import AsyncStore
from trireme_shared.serving.core.table.stepping import ArrivedRows

if TYPE_CHECKING:
    from trireme_shared.serving.core.table.rows import TableRows  # loads numba
    from trireme_shared.tables.memory import Floats, Numbers

ALL_BYTES = 1 << 62


class OpenPush:
    """An admitted push. Blocks that were applied stay applied, even if the rest fails. Raises as `Store.admit`. `waiting`: rows of an asynchronous one that
    are not applied yet, and blocks that wait for their siblings where the sender has them (`keep_some` copies those); `on_settled` is called when some are
    not any more."""

    def __init__(
        self, server: CallServer, store: Store, header: PushHeader, on_settled: Callable[[], None] | None = None
    ) -> None:
        self._server, self._store, self._header = server, store, header
        self._push = store.admit(header)
        store.history.results.forget(header.stored)
        self._applied = self._duplicate = self.waiting = 0
        self._borrowed: dict[int, None] = {}  # blocks that may wait in the sender's memory
        self._refused: list[Refusal] = []
        self._error: Exception | None = None
        self._on_settled = on_settled

    def __repr__(self) -> str:
        return f"<OpenPush {self._applied} applied, {self._duplicate} duplicate, {len(self._refused)} refused>"

    def apply(self, item: PushBlock, payload: Payload, memory: Buffer | None = None) -> None:
        """The payload of a block is used during the call only; a writable one may be overwritten. `memory`: the buffer that starts with
        it; it is retained if the payload has to wait for others. A writable payload of rows without `memory` is kept: it is ours. A block that may only
        be read stays as it is until nothing of the push is `waiting`."""
        view = memoryview(payload).cast("B")
        stale = self._server.is_stale(self._header.generation)
        lent = self._lent(item, view) if memory is None and not stale else None
        verdict = Verdict.STALE_GENERATION if stale else self.take_block(item, view, memory or lent)
        if verdict is not None:
            self._count(item, view.nbytes, verdict)
        if lent is not None:
            lent.release()

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
        done = 0
        while self._borrowed and done < most_bytes:
            number, _ = self._borrowed.popitem()
            if (state := self._store.blocks.get(number)) is not None:
                done += state.place.bytes
                state.tree.keep()
        return bool(self._borrowed)

    def close(self) -> None:
        """The sender is gone, or has its answer: what waits in its memory is copied, and nobody is told any more."""
        self._on_settled = None  # it may hold who began this push, whose memory is given back at once
        self.keep_some(ALL_BYTES)

    def _count(self, item: PushBlock, size: int, verdict: Verdict) -> None:
        server, counters = self._server, self._server.counters
        if verdict is Verdict.APPLIED:
            self._store.parameters_in_use.pushes += not self._applied
            self._applied += 1
            counters.blocks_applied += 1
        elif verdict is Verdict.DUPLICATE:
            self._duplicate += 1
            counters.blocks_duplicate += 1
        else:
            state = self._store.blocks.get(item.block)
            version = state.version if state else 0
            why = self._store.misfit(item, size) if verdict is Verdict.LAYOUT_MISMATCH else ""
            self._refused.append(
                Refusal(block=item.block, lanes=item.lanes, code=verdict, version=version, message=why)
            )
            counters.blocks_refused += 1
            if verdict is Verdict.MOVING and server.refused_at is None:
                server.refused_at = server.now()

    def most_bytes(self, item: PushBlock, block: int) -> int:
        """Of its payload; `block`: of one of a block. Raises BadFrame: no rows can be as many."""
        rows = self._store.rows
        if item.block != ROWS or rows is None or item.rows is None:
            return block
        return rows.payload_bytes(item.rows, item.dtype)

    def answer(self) -> PushAnswer:
        """Once no rows of it wait. Raises what kept them from being applied."""
        if self._error is not None:
            raise self._error
        self._server.push_ended(self._store, self._header.trainer, keeps=self._header.keeps)
        return PushAnswer(
            applied=self._applied,
            duplicate=self._duplicate,
            first=self._store.history.first_from(self._header.trainer, self._header.step),
            refused=tuple(self._refused),
            generation=self._server.generation,
        )

    def take_block(self, item: PushBlock, view: memoryview, memory: Buffer | None) -> Verdict | None:
        """None: rows that wait for their turn."""
        store = self._store
        state = store.blocks.get(item.block)
        if item.result is not None:
            self._push.results[item.lanes] = item.result
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
        """Gradients of rows of the embedding tables: of a lane, or of an asynchronous push, which wait for their turn. The payload is kept."""
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
        if not rows.are_by(item.slots, store.slots) or not rows.are_owned(ids, store.slots, self._server.index):
            return Verdict.WRONG_OWNER
        verdict = rows.push(step, lane, ids, gradients, item.count)
        if verdict is Verdict.APPLIED and item.lanes not in self._push.noted:
            self._push.noted.add(item.lanes)
            store.history.note(self._header, self._push.positions, item.lanes, self._push.results.get(item.lanes))
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
        server, store = self._server, self._store
        if server.store is not store or server.is_stale(self._header.generation):
            return Verdict.STALE_GENERATION
        if not rows.are_by(item.slots, store.slots) or not rows.are_owned(ids, store.slots, server.index):
            return Verdict.WRONG_OWNER
        return None
