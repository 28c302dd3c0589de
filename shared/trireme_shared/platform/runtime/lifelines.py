"""Child processes that die with their parent, and adoption of orphaned descendants (Linux; elsewhere these do nothing).

parent dies, even by SIGKILL ─► its children are killed           die_with_parent, die_with
a child's child loses its parent ─► it becomes a child of ours    adopting
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_adopters = 0


def die_with_parent() -> Callable[[], None] | None:
    """A `preexec_fn` that makes the kernel kill the child when its parent dies, even by SIGKILL; None on other systems.

    Linux kills the child when the *thread* that started it ends: start children from the main thread.
    """
    if sys.platform != "linux":
        return None
    _libc()  # load it now, not between fork and exec
    return partial(die_with, os.getpid())


def die_with(parent: int) -> None:
    """From now on the kernel kills this process when its parent dies. Exits at once if `parent` is not its parent (any more)."""
    _libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def hear_of_the_end_of(parent: int, number: signal.Signals) -> None:
    """From now on this process gets that signal when its parent dies, instead of being killed; at once if it is dead already. Linux."""
    if sys.platform != "linux":
        return
    _libc().prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


@contextmanager
def adopting() -> Iterator[None]:
    """Descendants that lose their parent inside the block become children of this process instead of init."""
    global _adopters  # noqa: PLW0603  a property of the process
    _adopters += 1
    _libc().prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _adopters -= 1
        if not _adopters:
            _libc().prctl(_PR_SET_CHILD_SUBREAPER, 0)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
