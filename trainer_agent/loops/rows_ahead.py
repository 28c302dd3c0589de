"""Rows of minibatches that come, asked for before they are computed, if the script says which they are (`ids`).

    lane k: rows at hand ─► lane k + 1: collate, ids ─► asked for, all tables at once ─► lane k is computed
    the last lane is computed ─► the first one of the next step: asked for; parameter servers answer when they have the version
    asynchronous: the minibatches of a push as lanes; the first one of the next push when this one is acknowledged, so it sees this one's rows

What was asked for in vain (the job went back, a parameter server is gone) is asked for again when it is needed, and then fails as it would have
without.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trainer_agent.model.compute import Compute, Ready, Records
from trainer_agent.tasks.source import outcome_of
from trireme_shared.protocol.errors import TriremeError

if TYPE_CHECKING:
    from trireme_shared.tables.grouping import Numbers
    from trireme_shared.tables.memory import Floats


Lookup = Callable[[int | None, "Sequence[Numbers]"], Awaitable["Sequence[Floats]"]]


@dataclass(frozen=True, slots=True)
class _Asked:
    """Of a lane's minibatch. `task`: None if it fails."""

    seed: int
    records: Records
    task: asyncio.Task[Ready | None]


class RowsAhead:
    """Of one trainer. `lookup`: version, and ids of each table -> their rows."""

    def __init__(self, compute: Compute, lookup: Lookup) -> None:
        self._compute, self._lookup = compute, lookup
        self._asked: dict[int, _Asked] = {}
        self._says = bool(compute.layout.tables)  # whether the script says which rows it will look up

    def __repr__(self) -> str:
        return f"<RowsAhead of lanes {sorted(self._asked)}>"

    async def ready(self, lane: int, version: int | None, seed: int, records: Records | None) -> Ready | None:
        """For Compute.gradient of that lane, with rows at `version`. Raises what getting the minibatch ready and looking up raise."""
        if not self._says or not records:
            return None
        asked = self._asked.get(lane)
        if asked is not None and asked.seed == seed and asked.records is records:
            found = await outcome_of(asked.task)
            self._asked.pop(lane, None)
            if found is not None:
                return found
        return await self._ready(version, seed, records)

    def ask(self, lane: int, version: int | None, seed: int, records: Records | None, group: asyncio.TaskGroup) -> None:
        """For a `ready` that comes, which raises what fails here."""
        if not self._says or not records:
            return
        if (asked := self._asked.get(lane)) is not None:
            if asked.seed == seed and asked.records is records:
                return
            asked.task.cancel()
        self._asked[lane] = _Asked(seed, records, group.create_task(self._ready_or_none(version, seed, records)))

    def drop(self) -> None:
        """Nothing that was asked for is needed any more."""
        for asked in self._asked.values():
            asked.task.cancel()
        self._asked.clear()

    async def _ready(self, version: int | None, seed: int, records: Records) -> Ready | None:
        ready = await self._compute.prepare(seed, records)
        self._says = ready is not None
        return None if ready is None else replace(ready, rows=await self._lookup(version, ready.ids))

    async def _ready_or_none(self, version: int | None, seed: int, records: Records) -> Ready | None:
        try:
            return await self._ready(version, seed, records)
        except TriremeError:
            return None
