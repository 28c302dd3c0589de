"""One error out of a TaskGroup: the one that decides what the caller does next."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shared.errors import Gone, PeerError, TriremeError, UserCodeError

_RANK = (UserCodeError, Gone, TriremeError)


@contextmanager
def single_error() -> Iterator[None]:
    """Raise the most serious error of an ExceptionGroup instead of the group; a bug (no TriremeError) comes first."""
    try:
        yield
    except BaseExceptionGroup as group:
        raise _most_serious(list(_leaves(group))) from group


def _most_serious(errors: list[BaseException]) -> BaseException:
    for error in errors:
        if not isinstance(error, TriremeError):
            return error
    for kind in _RANK:
        for error in errors:
            if isinstance(error, kind) and not (kind is TriremeError and isinstance(error, PeerError)):
                return error
    return errors[0]


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
