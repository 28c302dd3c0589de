"""How soon the kernel gives an event loop's thread a processor that others keep busy.

A loop wakes often and works little. Linux (6.12 and later) gives a thread with short slices its processor sooner, not more of
it: it takes the place of threads with longer slices when it wakes, and is interrupted sooner itself. Between threads of one
group, that is: a session (autogroup) or a container is scheduled as one, so an idle loop waits there for its busy neighbours.
"""

from __future__ import annotations

import ctypes
import os
import platform

SLICE_NS = 100_000  # the shortest there is; 0.7 to 3 ms unless asked for
SCHED_SETATTR = {"x86_64": 314, "aarch64": 274, "riscv64": 274}
RESET_ON_FORK = 1


class _Attributes(ctypes.Structure):
    """struct sched_attr of its first version; man 2 sched_setattr."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


def serve_soon() -> None:
    """Ask for short slices for the calling thread; threads and processes that it starts have the kernel's own. A wish: nothing
    happens where the kernel knows none, or somebody has chosen how this thread is scheduled."""
    number = SCHED_SETATTR.get(platform.machine())
    if number is None or platform.system() != "Linux" or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    if nice < 0:  # would not be passed on to the threads that it starts
        return
    wish = _Attributes(size=ctypes.sizeof(_Attributes), flags=RESET_ON_FORK, nice=nice, runtime=SLICE_NS)
    ctypes.CDLL(None).syscall(ctypes.c_long(number), 0, ctypes.byref(wish), 0)
