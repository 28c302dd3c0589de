"""Files in memory:// are gone after each test."""

from __future__ import annotations

import fsspec
import pytest


@pytest.fixture(autouse=True)
def empty_memory_filesystem():
    yield
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]
