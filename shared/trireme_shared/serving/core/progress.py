"""How far a pserver's blocks are: which lanes the step under way lacks, what a pull may ask for and what the puller has already; how many calls there were."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trireme_shared.protocol.errors import InvalidArgument, WrongOwner
from trireme_shared.protocol.lanes import Interval, gaps, intervals
from trireme_shared.protocol.records import Mode
from trireme_shared.protocol.wire.messages import PullRequest
from trireme_shared.serving.core.blocks import BlockState
from trireme_shared.serving.core.store import Store
from trireme_shared.serving.core.stores import AsyncStore


@dataclass(slots=True)
class Counters:
    """Since the process started, for /metrics."""

    pushes: int = 0
    pulls: int = 0
    blocks_applied: int = 0
    blocks_duplicate: int = 0
    blocks_refused: int = 0
    bytes_pushed: int = 0
    bytes_pulled: int = 0


def progress_of(store: Store) -> dict[str, Any]:
    """The fields of PserverInfo that say it."""
    return {
        "lowest": store.lowest,
        "highest": store.highest,
        "missing": missing_lanes(store),
        "updates": store.updates,
        "schedules": store.schedules.kept if isinstance(store, AsyncStore) else (),
    }


def missing_lanes(store: Store) -> tuple[Interval, ...]:
    """The lanes [first, last) that some block of the lowest version has no data of in its step."""
    if store.mode is not Mode.SYNC:
        return ()
    lowest = store.lowest
    waiting = {frozenset(state.tree.nodes) for state in store.collected if state.version == lowest}
    if store.rows is not None and store.rows.version == lowest:
        waiting.add(store.rows.lanes_there)
    lacking = {lane for nodes in waiting for first, last in gaps(nodes, store.lanes) for lane in range(first, last)}
    return tuple(intervals(sorted(lacking)))


def squares_at(blocks: Mapping[int, BlockState], numbers: Iterable[int], version: int) -> tuple[tuple[int, float], ...]:
    """Of the gradients that are held at `version`, or that made it."""
    found = ((number, blocks[number]) for number in numbers)
    return tuple((n, state.squares) for n, state in found if state.version == version and state.squares is not None)


def check_pull(store: Store, request: PullRequest, index: int) -> None:
    """Raises WrongOwner, InvalidArgument."""
    if store.rows is not None and 0 < request.slots < store.rows.since:
        msg = f"slot map {request.slots} is old: the rows at pserver-{index} moved by {store.rows.since}; read the slot map again"
        raise WrongOwner(msg, slots=store.rows.since)
    if request.version is not None and store.mode is Mode.ASYNC:
        msg = (
            f"version {request.version} was asked for in async mode, where blocks have no common version: ask for None"
        )
        raise InvalidArgument(msg)
    wanted = set(request.blocks)
    if foreign := wanted - store.blocks.keys():
        block = min(foreign)
        msg = f"block {block} is not at pserver-{index}: read the slot map again"
        raise WrongOwner(msg, block=block)
    if len(wanted) < len(request.blocks):
        twice = min(block for block, times in Counter(request.blocks).items() if times > 1)
        msg = f"block {twice} is named twice in one pull: name each block once"
        raise InvalidArgument(msg, block=twice)


def known_of(store: Store, version: int | None) -> str:
    """A name for the values that a pull of `version` brings if it begins now; "" if blocks may be of several versions."""
    moment = store.moment(version)
    return "" if moment is None else f"{store.name}@{moment}"


def moment_of(store: Store, known: str | None) -> int | None:
    """Of a name that `known_of` of this store made, else None."""
    name, _, moment = (known or "").rpartition("@")
    return int(moment) if name and name == store.name and moment.isascii() and moment.isdecimal() else None


def is_same(store: Store, number: int, version: int | None, moment: int | None) -> bool:
    """Whether it is certain that a pull of `version` finds a block with the bits that a whole pull had at `moment` (None: there was none). Only
    blocks of buffers are watched, and who has a newer version than it asks for gets everything. A block without any values is left out as well."""
    state = store.blocks[number]
    if state.is_empty_at(version):
        return True
    if moment is None:
        return False
    return state.is_buffer and state.changed <= moment <= store.newest_moment(state, version)
