"""How processes that compute with torch get memory from the system and return it (glibc 2.35 or later; no effect elsewhere).

A backward pass allocates and frees as much as the gradients take, in every step. glibc serves sizes up to 32 MiB from heaps,
one for each thread, and keeps most of the freed memory: a trainer with 40 MB of parameters held 60 to 90 MB unused.

    from 8 MiB    each allocation has its own mapping, returned when it is freed (`give_back`)
    mappings      use huge pages: one page fault for 2 MiB instead of 512, so a new mapping is cheap (`TUNABLES`)
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

VARIABLE = "GLIBC_TUNABLES"  # read at the start of a process, so its parent has to set it
HUGE_PAGES = "glibc.malloc.hugetlb"
TUNABLES = f"{HUGE_PAGES}=1"
MAPPED_BYTES = 8 << 20
KEPT_BYTES = 64 << 20  # kept at the end of a heap, where small allocations come and go in every step

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_SYSTEM = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_SINCE = (2, 35)


def tunables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variable for a process that starts in that environment; the user's own setting for huge pages wins."""
    given = environment.get(VARIABLE, "")
    if HUGE_PAGES in given:
        return {VARIABLE: given}
    return {VARIABLE: f"{given}:{TUNABLES}" if given else TUNABLES}


def give_back() -> bool:
    """From now on large allocations go back to the system when they are freed. False: nothing has changed, because without huge
    pages new mappings cost more than they save (a sixth of the training speed of a perceptron with 10M parameters)."""
    if TUNABLES not in os.environ.get(VARIABLE, "").split(":") or not has_huge_pages():
        return False
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        return bool(libc.mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES) and libc.mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES))
    return False


def has_huge_pages() -> bool:
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
        known = name == "glibc" and tuple(map(int, version.split("."))) >= _SINCE
        return known and "[never]" not in _SYSTEM.read_text()
    except (OSError, ValueError):
        return False
