"""One error out of a TaskGroup: the one that decides what the caller does next."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from shared.errors import Gone, PeerError, TriremeError, UserCodeError, leaves


class SingleErrorGroup(asyncio.TaskGroup):
    """A TaskGroup that raises the most serious error of its tasks instead of an ExceptionGroup."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with single_error():
            await super().__aexit__(kind, error, trace)


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
