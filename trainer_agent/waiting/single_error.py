"""One error out of a TaskGroup: the one that decides what the caller does next."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from shared.errors import Gone, PeerError, TriremeError, UserCodeError, leaves


class SingleErrorGroup(asyncio.TaskGroup):
    """A TaskGroup that raises the most serious error of its tasks instead of an ExceptionGroup. If it is cancelled from outside in the moment in which
    a task fails, it is cancelled: asyncio's own raises the error (until Python 3.13), and whoever tries again after such an error would never end."""

    async def __aenter__(self) -> Self:
        self._cancels = _cancels()
        return await super().__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with single_error():
                await super().__aexit__(kind, error, trace)
        except TriremeError as failed:
            if _cancels() > self._cancels:
                raise asyncio.CancelledError from failed
            raise


def _cancels() -> int:
    """How often the running task was asked to end."""
    task = asyncio.current_task()
    return task.cancelling() if task is not None else 0


@contextmanager
def single_error() -> Iterator[None]:
    """Raise the most serious error of an ExceptionGroup instead of the group; a bug (no TriremeError) comes first."""
    try:
        yield
    except BaseExceptionGroup as group:
        raise max(leaves(group), key=_seriousness) from group


def _seriousness(error: BaseException) -> tuple[bool, ...]:
    known = isinstance(error, TriremeError)
    return not known, isinstance(error, UserCodeError), isinstance(error, Gone), not isinstance(error, PeerError)
