"""Processes that the scripts of members have started, and that would outlive the members.

    a member ends ─► it is waited for ─► nobody is in its group any more: that is all
        ─► else the number is nobody else's as long as the group has a process
        ─► SIGTERM to what is left of it ─► SIGKILL after LEAVE_S ─► its end is told
    a launcher is killed ─► its members die with it ─► their fork server does the same to its session, which
        has the groups of all members that it has forked

Daemons of libraries (multiprocessing's resource tracker, torch's manager of shared memory) free what they
keep once those who use it are gone: hence the time between the two signals. A process that has made a session
of its own is not found here: whoever does that wants it to live on.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from trireme_shared.platform.runtime import clock

LEAVE_S = 1.0
LOOK_S = 0.02
PARENT_S = 5.0  # a process closes its files before its children get another parent
_GONE = "ZX"
_STATE, _PARENT, _GROUP, _SESSION = range(4)  # fields 3 to 6 of proc_pid_stat(5)


def left_of_group(leader: int) -> list[int]:
    """Living processes of the group of a process that has ended and was waited for. All processes of the
    machine are looked at only if there is one: of thousands that takes a tenth of a second."""
    try:
        os.killpg(leader, 0)
    except ProcessLookupError:
        return []
    except PermissionError:
        pass
    return [pid for pid, fields in _processes() if int(fields[_GROUP]) == leader and pid != leader]


def left_of_session(leader: int) -> list[int]:
    """As `left_of_group`, of a session."""
    return [pid for pid, fields in _processes() if int(fields[_SESSION]) == leader and pid != leader]


def signal_group(leader: int, number: signal.Signals) -> None:
    """Call it if the group has a process: without one its number may be another's."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def end_session_without(parent: int) -> None:
    """Called by the leader of a session, whose launcher `parent` has closed its end of the connection: if
    that has died, no other process of the session is left afterwards. Blocks for at most PARENT_S +
    LEAVE_S."""
    if not _within(PARENT_S, lambda: os.getppid() != parent):
        return
    own = os.getpid()
    if _within(0.0, lambda: not left_of_session(own)):
        return
    _signal_session(own, signal.SIGTERM)
    if not _within(LEAVE_S, lambda: not left_of_session(own)):
        _signal_session(own, signal.SIGKILL)


def _signal_session(leader: int, number: signal.Signals) -> None:
    """A process may end meanwhile, so each is looked at again once its descriptor is open: what that shows is
    what gets the signal."""
    for pid in left_of_session(leader):
        with suppress(OSError):
            descriptor = os.pidfd_open(pid)
            try:
                if (fields := _fields(str(pid))) is not None and int(fields[_SESSION]) == leader:
                    signal.pidfd_send_signal(descriptor, number)
            finally:
                os.close(descriptor)


def _within(limit_s: float, so: Callable[[], bool]) -> bool:
    end = clock.monotonic() + limit_s
    while not so():
        if clock.monotonic() >= end:
            return False
        clock.sleep(LOOK_S)
    return True


def _processes() -> Iterator[tuple[int, list[str]]]:
    for entry in os.scandir("/proc"):
        name = entry.name
        if name.isdecimal() and (fields := _fields(name)) is not None and fields[_STATE] not in _GONE:
            yield int(name), fields


def _fields(pid: str) -> list[str] | None:
    """From the third one on: the second, a name, may have spaces and brackets. None: it is gone."""
    try:
        return Path("/proc", pid, "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
