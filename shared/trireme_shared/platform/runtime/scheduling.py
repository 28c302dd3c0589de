"""How soon the kernel runs an event loop's thread when other threads keep the processors busy.

A loop wakes often and works little. Linux (6.12 and later) runs a thread with short slices sooner, but not for longer: when it
wakes it preempts threads with longer slices, and it is preempted sooner itself. This holds between threads of one scheduling
group; a session (autogroup) or a container is one group, so a loop in another group still waits for its turn.
"""

from __future__ import annotations

import ctypes
import os
import platform

SLICE_NS = 100_000  # the shortest possible; the default is 0.7 to 3 ms
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
    """Request short slices for the calling thread; threads and processes that it starts get the kernel's default. Does nothing if the
    kernel does not support them, or if the thread already has a scheduling policy or priority of its own."""
    number = SCHED_SETATTR.get(platform.machine())
    if number is None or platform.system() != "Linux" or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    if nice < 0:  # threads that it starts would not inherit it
        return
    request = _Attributes(size=ctypes.sizeof(_Attributes), flags=RESET_ON_FORK, nice=nice, runtime=SLICE_NS)
    ctypes.CDLL(None).syscall(ctypes.c_long(number), 0, ctypes.byref(request), 0)
