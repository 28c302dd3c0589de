"""Steps of embedding tables in turns with everything else that the event loop does.

synchronous    all data of a step is there ─► step, TURN_S of work a turn ─► the next version
asynchronous   rows of a push ─► wait for those before ─► the same ─► the push is answered
slots dropped  the memory of their rows is given back, TURN_S of work a turn

Neither begins while steps keep too much for snapshots (KeptRows in core/table/rows.py). One push at a time is
being stepped; it ends although who sent it may be gone.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING

from trireme_shared.platform.runtime import clock, telemetry
from trireme_shared.protocol.errors import NotReady, TriremeError
from trireme_shared.protocol.wire.messages import Verdict
from trireme_shared.serving.core.store import Store
from trireme_shared.serving.core.table.stepping import ArrivedRows, RowsServer
from trireme_shared.serving.data_plane.lookups import tables_in

if TYPE_CHECKING:
    from trireme_shared.serving.core.table.rows import TableRows  # loads numba

TURN_S = 0.002  # of a step, before the event loop has its turn
KEPT_S = 0.01  # between two looks whether a snapshot is written far enough
WAITING_BYTES = 256 << 20  # of pushes whose turn has not come; one alone may have more

log = telemetry.logger("pserver.row_turns")

_Push = tuple[ArrivedRows, Generator[None, None, Verdict]]


class RowTurns:
    """The RowSteps (core/table/stepping.py) of one server, in an event loop. `turn_s`: seconds of work in one
    turn, TURN_S if None; at least one portion of a step."""

    def __init__(self, server: RowsServer, turn_s: float | None = None) -> None:
        self._server, self._turn_s = server, turn_s
        self._waiting: deque[ArrivedRows] = deque()
        self._waiting_bytes = 0
        self._begins = False  # the next one is about to begin
        self._push: _Push | None = None  # that is being stepped
        self._moments: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        return f"<RowTurns: {len(self._waiting)} pushes wait, {self._waiting_bytes} bytes>"

    def soon(self, call: Callable[..., None], *arguments: object) -> None:
        """Its next turn."""
        asyncio.get_running_loop().call_soon(call, *arguments)

    def _may_step(self, rows: TableRows) -> bool:
        # a job that is started again may have another one
        if (most := self._server.snapshot_bytes) is not None:
            rows.kept.most_bytes = most
        return rows.kept.may_step(rows.snapshots, clock.monotonic())

    def give_back(self, rows: TableRows) -> None:
        """The memory of slots that were dropped, whatever becomes of the store: a thread that reads a
        snapshot of it may wait."""
        self.soon(self._give_back, rows.give_back())

    def _give_back(self, parts: Iterator[None]) -> None:
        until = self._until()
        for _ in parts:
            if clock.monotonic() >= until:
                self.soon(self._give_back, parts)
                return

    # ------------------------------------------------------------ synchronous

    def begin(self, store: Store) -> None:
        rows = tables_in(store)
        before = rows.version
        steps = rows.steps(store.history.lane_zero(before))
        # the push that begins it has taken its time, too
        self.soon(self._start, store, before, steps)

    def _start(self, store: Store, before: int, steps: Iterator[None]) -> None:
        if self._server.store is not store:
            return
        if self._may_step(tables_in(store)):
            self._go_on(store, before, steps)
        else:
            asyncio.get_running_loop().call_later(KEPT_S, self._start, store, before, steps)

    def _go_on(self, store: Store, before: int, steps: Iterator[None]) -> None:
        if self._server.store is not store:
            return
        until = self._until()
        try:
            for _ in steps:
                if clock.monotonic() >= until:
                    self.soon(self._go_on, store, before, steps)
                    return
        except Exception as error:  # the step can never be whole
            log.exception("tables_not_stepped", index=self._server.index)
            self._server.tear(f"a step of its embedding tables failed: {error!r}")
            return
        self._server.rows_stepped(store, before)

    # ------------------------------------------------------------ asynchronous

    def take(self, arrived: ArrivedRows) -> None:
        """It waits for its turn."""
        if self._waiting and self._waiting_bytes + arrived.bytes > WAITING_BYTES:
            msg = (
                f"{len(self._waiting)} pushes with {self._waiting_bytes} bytes of rows wait at "
                f"pserver-{self._server.index}: push again"
            )
            self._server.rows_taken(arrived, NotReady(msg))
            return
        self._waiting.append(arrived)
        self._waiting_bytes += arrived.bytes
        self._look()

    def between_pushes(self, call: Callable[[], None]) -> None:
        """Calls it when no push is half applied: now, or when the one that is being stepped is whole, before
        the next."""
        if self._push is None:
            call()
        else:
            self._moments.append(call)

    def finish(self) -> None:
        """No push is half applied when this returns."""
        if self._push is not None:
            self._step(self._push, whole=True)

    def _look(self) -> None:
        if self._waiting and self._push is None and not self._begins:
            self._begins = True
            self.soon(self._begin)

    def _begin(self) -> None:
        self._begins = False
        if self._push is not None or not self._waiting:
            return
        if self._is_here(self._waiting[0]) and not self._may_step(self._waiting[0].rows):
            self._begins = True
            asyncio.get_running_loop().call_later(KEPT_S, self._begin)
            return
        arrived = self._waiting.popleft()
        self._waiting_bytes -= arrived.bytes
        self._push = arrived, arrived.steps()
        self._step(self._push)

    def _step(self, push: _Push, *, whole: bool = False) -> None:
        """For one turn, or until it is whole."""
        if self._push is not push:
            return
        arrived, steps = push
        until = math.inf if whole else self._until()
        found: Verdict | Exception = Verdict.STALE_GENERATION
        try:
            while self._is_here(arrived):
                next(steps)
                if clock.monotonic() >= until:
                    self.soon(self._step, push)
                    return
        except StopIteration as end:
            found = end.value
        except TriremeError as error:  # before anything has changed
            found = error
        except Exception as error:  # the push can never be whole
            log.exception("tables_not_stepped", index=self._server.index)
            self._server.tear(f"a push to its embedding tables failed: {error!r}")
            found = NotReady(f"pserver-{self._server.index} could not step its embedding tables: push again")
        steps.close()
        self._end(arrived, found)

    def _end(self, arrived: ArrivedRows, found: Verdict | Exception) -> None:
        self._push = None
        moments, self._moments = self._moments, []
        for call in moments:
            call()
        self._look()
        self._server.rows_taken(arrived, found)

    def _until(self) -> float:
        """The end of a turn that begins now."""
        return clock.monotonic() + (TURN_S if self._turn_s is None else self._turn_s)

    def _is_here(self, arrived: ArrivedRows) -> bool:
        """Whether its store is still served."""
        store = self._server.store
        return store is not None and store.rows is arrived.rows
