"""Memory that goes back to the system: what is set, when it is left as it is, and that big pieces do go
back."""

from __future__ import annotations

import subprocess
import sys

import pytest

from trireme_shared.platform.runtime import process_setup

TOUCH = """
import sys, ctypes
from pathlib import Path
from trireme_shared.platform.runtime import process_setup
given = process_setup.give_memory_back()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
resident = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * 4096
def pieces():
    places = [libc.malloc(8 << 20) for _ in range(4)]
    for place in places:
        ctypes.memset(place, 1, 8 << 20)
    return places
for place in pieces():
    libc.free(place)  # glibc raises its own limit then
places = pieces()
full = resident()
for place in places[:-1]:  # the last one stays, so that no heap can shrink
    libc.free(place)
print(given, (full - resident()) >> 20)
"""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, "glibc.malloc.hugetlb=1"),
        ({"GLIBC_TUNABLES": "glibc.malloc.check=1"}, "glibc.malloc.check=1:glibc.malloc.hugetlb=1"),
        ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}, "glibc.malloc.hugetlb=0"),
    ],
)
def test_what_the_user_says_about_huge_pages_stays(before, after):
    assert process_setup.memory_tunables(before) == {"GLIBC_TUNABLES": after}


@pytest.mark.skipif(not process_setup.has_huge_pages(), reason="no transparent huge pages, or no glibc")
@pytest.mark.parametrize(("wanted", "given", "back"), [("1", "True", 24), ("0", "False", 0)])
def test_big_pieces_go_back_unless_huge_pages_are_refused(wanted, given, back):
    environment = {"GLIBC_TUNABLES": f"glibc.malloc.hugetlb={wanted}"}
    done = subprocess.run(
        [sys.executable, "-c", TOUCH], env=environment, capture_output=True, text=True, timeout=30
    )
    assert done.stdout.split()[0] == given, done.stderr
    assert abs(int(done.stdout.split()[1]) - back) <= 2


def test_nothing_is_changed_without_huge_pages(tmp_path, monkeypatch):
    monkeypatch.setenv("GLIBC_TUNABLES", process_setup.TUNABLES)
    for text in ("always madvise [never]\n", None):
        if text is not None:
            (tmp_path / "enabled").write_text(text)
        monkeypatch.setattr(process_setup, "_SYSTEM", tmp_path / ("enabled" if text else "absent"))
        assert not process_setup.give_memory_back()
