"""One error out of a TaskGroup: the one that decides what the caller does next."""

from __future__ import annotations

import asyncio
import sys
from types import TracebackType
from typing import Self

from shared.errors import Gone, PeerError, TriremeError, UserCodeError, leaves
from shared.runtime import telemetry

log = telemetry.logger("single_error")


class SingleErrorGroup(asyncio.TaskGroup):
    """A TaskGroup that raises the most serious error of its tasks instead of an ExceptionGroup. If it is cancelled from outside in the moment in which
    a task or its own code fails, it is cancelled, whatever the error is: asyncio's own raises the error (until Python 3.13), and whoever tries again
    after such an error would never end. What is no TriremeError is logged then, since nobody else learns of it."""

    _parent_cancel_requested: bool  # of asyncio.TaskGroup: it has cancelled whoever runs it
    _parent_task: asyncio.Task[object] | None

    async def __aenter__(self) -> Self:
        self._cancels = _cancels()
        return await super().__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        taken_back = self._parent_cancel_requested  # by asyncio itself
        try:
            return await super().__aexit__(kind, error, trace)
        except BaseExceptionGroup as group:
            failed = most_serious(group.with_traceback(None))
        del error, trace
        context = failed.__context__
        try:
            if sys.version_info < (3, 13) and self._parent_cancel_requested and not taken_back:
                _take_back()  # whoever waits at the end of the group is cancelled by it when a task fails
            if _cancels() > self._cancels:
                if not isinstance(failed, TriremeError):
                    log.warning("failed_while_cancelled", cause=repr(failed))
                raise asyncio.CancelledError from failed
            raise failed
        finally:
            failed.__context__ = context
            self._parent_task = None  # as Python 3.13 does
            del (
                failed,
                context,
            )  # an error that refers to itself keeps all that its frames refer to, until Python looks for circles


def _cancels() -> int:
    """How often the running task was asked to end."""
    task = asyncio.current_task()
    return task.cancelling() if task is not None else 0


def _take_back() -> None:
    """One request to the running task to end."""
    if (task := asyncio.current_task()) is not None:
        task.uncancel()


def most_serious(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that decides; a bug (no TriremeError) comes first. The others are its cause, if it has none."""
    error = max(leaves(group), key=_seriousness)
    others = group.subgroup(lambda each: each is not error and not isinstance(each, BaseExceptionGroup))
    if error.__cause__ is None and others is not None:
        error.__cause__ = others
    return error


def _seriousness(error: BaseException) -> tuple[bool, ...]:
    known = isinstance(error, TriremeError)
    return not known, isinstance(error, UserCodeError), isinstance(error, Gone), not isinstance(error, PeerError)
