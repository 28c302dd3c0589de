"""How processes that compute with torch get memory from the system and give it back (glibc 2.35 on; elsewhere as it is).

A backward pass allocates and frees as much as the gradients take, in every step. glibc serves sizes up to 32 MiB from heaps,
one for each thread, and keeps most of what is freed: a trainer of 40 MB of parameters kept 60 to 90 MB for nothing.

    from 8 MiB    mapped for itself, given back when it is freed (`give_back`)
    mapped        in huge pages, one page fault for 2 MiB and not 512: that makes mapping anew cheap (`TUNABLES`)
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

VARIABLE = "GLIBC_TUNABLES"  # read when a process begins, so whoever starts it has to set it
HUGE_PAGES = "glibc.malloc.hugetlb"
TUNABLES = f"{HUGE_PAGES}=1"
MAPPED_BYTES = 8 << 20
KEPT_BYTES = 64 << 20  # at the end of a heap, where smaller pieces come and go in every step

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_SYSTEM = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_SINCE = (2, 35)


def tunables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variable for a process to be started in that environment; what the user says about huge pages there stays."""
    said = environment.get(VARIABLE, "")
    if HUGE_PAGES in said:
        return {VARIABLE: said}
    return {VARIABLE: f"{said}:{TUNABLES}" if said else TUNABLES}


def give_back() -> bool:
    """From now on big pieces go back to the system when they are freed. False: everything stays as it is, for without huge
    pages mapping anew costs more than it saves (a sixth of the training speed of a perceptron of 10M parameters)."""
    if TUNABLES not in os.environ.get(VARIABLE, "").split(":") or not _has_huge_pages():
        return False
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        return bool(libc.mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES) and libc.mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES))
    return False


def _has_huge_pages() -> bool:
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
        known = name == "glibc" and tuple(map(int, version.split("."))) >= _SINCE
        return known and "[never]" not in _SYSTEM.read_text()
    except (OSError, ValueError):
        return False
