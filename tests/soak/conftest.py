"""The longest test is begun first, so that nobody waits for it alone at the end."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: "soak" not in item.path.parts)
