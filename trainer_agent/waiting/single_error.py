"""One error out of a TaskGroup: the one that decides what the loop does next."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shared.errors import Gone, PeerError, TriremeError, UserCodeError

_RANK = (UserCodeError, Gone, TriremeError)


@contextmanager
def single_error() -> Iterator[None]:
    """Raise the weightiest error of an ExceptionGroup instead of the group; a bug (no TriremeError) outweighs all."""
    try:
        yield
    except BaseExceptionGroup as group:
        raise _weightiest(list(_leaves(group))) from group


def _weightiest(errors: list[BaseException]) -> BaseException:
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
