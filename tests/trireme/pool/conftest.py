from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.trireme.pool.hosts import marked


@pytest.fixture(autouse=True)
def one_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_CURRENT_TEST", raising=False)


@pytest.fixture
def mark() -> Iterator[str]:
    with marked() as mark:
        yield mark
