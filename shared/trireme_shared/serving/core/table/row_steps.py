"""When the rows of embedding tables are stepped: at once here, or in turns with everything else
(data_plane/row_turns.py).

all data of a synchronous step is there ─► begin ─► server.rows_stepped        rows of an asynchronous push ─► take ─► server.rows_taken
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from trireme_shared.protocol.wire.messages import Verdict
from trireme_shared.serving.core.store import Store
from trireme_shared.serving.core.table.arrivals import ArrivedRows

if TYPE_CHECKING:
    from trireme_shared.serving.core.table.rows import TableRows  # loads numba


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
