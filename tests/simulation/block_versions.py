"""Versions of the blocks of a synchronous job, at any moment."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trireme_shared.serving.core.store import Store


def versions_apart(stores: Sequence[tuple[int, Store]], owner_of: Callable[[int], int | None]) -> list[int]:
    """All versions if they differ by more than one, which must never be; else none. `stores`: with the index
    of the parameter server."""
    versions = [state.version for _, store in stores for state in store.blocks.values()]
    if (
        versions and max(versions) - min(versions) > 1
    ):  # a frozen copy may stay until its server hears that the block has moved
        versions = [
            state.version
            for index, store in stores
            for number, state in store.blocks.items()
            if not state.frozen or owner_of(number) == index
        ]
    return sorted(versions) if versions and max(versions) - min(versions) > 1 else []
