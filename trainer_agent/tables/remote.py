"""Rows on the parameter servers, for a forward pass in a thread: at hand, if the script has named their ids; else the thread waits while the
event loop looks them up.

forward, in its thread ─ lookup ─► at hand ─► rows
                              └──► event loop ─► parameter servers ─► rows      given up, or failed ─► raised in forward, and kept in `failure`
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import numpy.typing as npt

from trireme_shared.platform.runtime import begun, telemetry
from trireme_shared.protocol.errors import NotReady
from trireme_shared.tables.grouping import Grouped, Numbers

log = telemetry.logger("remote_rows")

AtHand = Sequence[tuple[Grouped, npt.NDArray[np.float32]]]
"""Of each table ids, and their rows, which nobody else writes."""
Lookup = Callable[[Sequence[Numbers]], Awaitable[Sequence[npt.NDArray[np.float32]]]]


class RemoteRows:
    """A RowSource. `tables`: names of the model's. `at_hand`: what needs no lookup."""

    def __init__(self, tables: Sequence[str]) -> None:
        self._tables = tables
        self.at_hand: AtHand = ()
        self._told: set[int] = set()
        self._lookup: Lookup | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asked: concurrent.futures.Future[Sequence[npt.NDArray[np.float32]]] | None = None
        self._given_up = threading.Event()
        self.failure: Exception | None = None

    def read_by(self, lookup: Lookup) -> None:
        """From now on, in the running event loop."""
        self._lookup, self._loop = lookup, asyncio.get_running_loop()

    def begin(self) -> None:
        """A forward pass will begin; called in the event loop."""
        self._given_up.clear()
        self.failure = None

    def lookup(self, table: int, ids: Numbers) -> npt.NDArray[np.float32]:
        """Raises what the lookup raises; NotReady if it is given up."""
        if not self.at_hand or not len(self.at_hand[table][0].ids):
            return self._asked_for(table, ids)
        named, rows = self.at_hand[table]
        known = named.ids
        if len(known) == len(ids) and np.array_equal(known, ids):
            return rows.copy()  # another layer may have the same ids
        places = np.searchsorted(known, ids)
        places[places == len(known)] = 0
        missing = known[places] != ids
        found: npt.NDArray[np.float32] = rows[places]
        if missing.any():
            if table not in self._told:
                self._told.add(table)
                count = int(missing.sum())
                log.warning("ids_not_named", table=self._tables[table], ids=count, example=int(ids[missing][0]))
            found[missing] = self._asked_for(table, ids[missing])
        return found

    def _asked_for(self, table: int, ids: Numbers) -> npt.NDArray[np.float32]:
        assert self._lookup is not None
        assert self._loop is not None
        nothing = np.empty(0, np.int64)
        asked = [ids if number == table else nothing for number in range(len(self._tables))]
        try:
            if self._given_up.is_set():
                raise NotReady("the minibatch was given up")
            self._asked = asyncio.run_coroutine_threadsafe(_awaited(self._lookup, asked), self._loop)
            if self._given_up.is_set():  # in this moment
                self._asked.cancel()
            with begun.waiting():
                return self._asked.result()[table]
        except concurrent.futures.CancelledError:
            raise NotReady("the minibatch was given up") from None
        except Exception as error:
            self.failure = error
            raise
        finally:
            self._asked = None

    def give_up(self) -> None:
        """The forward pass that waits ends with an error; called in the event loop."""
        self._given_up.set()
        if (asked := self._asked) is not None:
            asked.cancel()


async def _awaited(lookup: Lookup, asked: Sequence[Numbers]) -> Sequence[npt.NDArray[np.float32]]:
    return await lookup(asked)
