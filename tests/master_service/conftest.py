"""Fixtures of the master's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from master_service.api.routes import dependencies
from tests.equipment.etcd.real import embedded_etcd
from tests.equipment.logs import configured
from trireme_shared.platform.etcd import Etcd, connect
from trireme_shared.platform.etcd.embedded import EmbeddedEtcd

__all__ = ["embedded_etcd"]


@pytest_asyncio.fixture
async def real_etcd(embedded_etcd: EmbeddedEtcd) -> AsyncIterator[Etcd]:
    etcd = connect([embedded_etcd.url])
    try:
        yield etcd
    finally:
        await etcd.close()


@pytest.fixture(autouse=True)
def _plain_logs() -> Iterator[None]:
    """Tracebacks drawn for terminals take seconds."""
    with configured(print):
        yield


@pytest.fixture(autouse=True)
def _patient_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may hold the process up for longer than requests wait for etcd."""
    monkeypatch.setattr(dependencies, "ANSWER_S", 60.0)
