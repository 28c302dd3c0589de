"""Rows on the parameter servers, for a forward pass in a thread: it waits there while the event loop looks them up.

forward, in its thread ─ lookup ─► event loop ─► parameter servers ─► rows      given up, or failed ─► raised in forward, and kept in `failure`
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import numpy.typing as npt

from shared.errors import NotReady
from shared.tables.grouping import Numbers

Lookup = Callable[[Sequence[Numbers]], Awaitable[Sequence[npt.NDArray[np.float32]]]]


class RemoteRows:
    """A RowSource. `tables`: how many the model has."""

    def __init__(self, tables: int) -> None:
        self._tables = tables
        self._lookup: Lookup | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asked: concurrent.futures.Future[Sequence[npt.NDArray[np.float32]]] | None = None
        self._given_up = False
        self.failure: Exception | None = None

    def read_by(self, lookup: Lookup) -> None:
        """From now on, in the running event loop."""
        self._lookup, self._loop = lookup, asyncio.get_running_loop()

    def begin(self) -> None:
        """A forward pass begins."""
        self._given_up, self.failure = False, None

    def lookup(self, table: int, ids: Numbers) -> npt.NDArray[np.float32]:
        """Raises what the lookup raises; NotReady if it is given up."""
        assert self._lookup is not None
        assert self._loop is not None
        nothing = np.empty(0, np.int64)
        asked = [ids if number == table else nothing for number in range(self._tables)]
        try:
            if self._given_up:
                raise NotReady("the minibatch was given up")
            self._asked = asyncio.run_coroutine_threadsafe(_awaited(self._lookup, asked), self._loop)
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
        self._given_up = True
        if (asked := self._asked) is not None:
            asked.cancel()


async def _awaited(lookup: Lookup, asked: Sequence[Numbers]) -> Sequence[npt.NDArray[np.float32]]:
    return await lookup(asked)
