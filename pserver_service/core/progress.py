"""How far a pserver's blocks are, and which lanes the step under way still lacks."""

from __future__ import annotations

from typing import Any

from pserver_service.core.store import Store
from shared.lanes import Interval, gaps, intervals
from shared.records import Mode


def progress_of(store: Store) -> dict[str, Any]:
    """The fields of PserverInfo that say it."""
    return {
        "lowest": store.lowest,
        "highest": store.highest,
        "missing": missing_lanes(store),
        "updates": store.updates,
    }


def missing_lanes(store: Store) -> tuple[Interval, ...]:
    """The lanes [first, last) that some block of the lowest version has no data of in its step."""
    if store.mode is not Mode.SYNC:
        return ()
    lowest = store.lowest
    waiting = {frozenset(state.tree.nodes) for state in store.blocks.values() if state.version == lowest}
    if store.rows is not None and store.rows.version == lowest:
        waiting.add(store.rows.lanes_there)
    lacking = {lane for nodes in waiting for first, last in gaps(nodes, store.lanes) for lane in range(first, last)}
    return tuple(intervals(sorted(lacking)))
