"""Rows of minibatches that come, asked for before they are computed, if the script says which they are (`ids`).

    lane k: rows at hand ─► lane k + 1: collate, ids ─► asked for, all tables at once ─► lane k is computed
    the last lane is computed ─► the first one of the next step: asked for; parameter servers answer when they have the version

What was asked for in vain (the job went back, a parameter server is gone) is asked for again when it is needed, and then fails as it would have
without.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from shared.errors import TriremeError
from shared.lanes import step_seed
from trainer_agent.data_plane.transfer import Transfer
from trainer_agent.model.compute import Compute, Ready, Records
from trainer_agent.tasks.source import outcome_of


@dataclass(frozen=True, slots=True)
class _Asked:
    """Of a lane's minibatch in the step from `version` on. `task`: None if it fails."""

    version: int
    records: Records
    task: asyncio.Task[Ready | None]


class RowsAhead:
    """Of one trainer."""

    def __init__(self, compute: Compute, transfer: Transfer, seed: int) -> None:
        self._compute, self._transfer, self._seed = compute, transfer, seed
        self._asked: dict[int, _Asked] = {}
        self._says = bool(compute.layout.tables)  # whether the script says which rows it will look up

    def __repr__(self) -> str:
        return f"<RowsAhead: {', '.join(f'lane {lane} of {asked.version}' for lane, asked in self._asked.items())}>"

    async def ready(self, version: int, lane: int, records: Records | None) -> Ready | None:
        """For Compute.gradient of that lane. Raises what getting the minibatch ready and looking up raise."""
        if not self._says or not records:
            return None
        asked = self._asked.get(lane)
        if asked is not None and asked.version == version and asked.records is records:
            found = await outcome_of(asked.task)
            self._asked.pop(lane, None)
            if found is not None:
                return found
        return await self._ready(version, lane, records)

    def ask(self, version: int, lane: int, records: Records | None, group: asyncio.TaskGroup) -> None:
        """For a `ready` that comes, which raises what fails here."""
        if not self._says or not records:
            return
        if (asked := self._asked.get(lane)) is not None:
            if asked.version == version and asked.records is records:
                return
            asked.task.cancel()
        self._asked[lane] = _Asked(version, records, group.create_task(self._in_vain_or(version, lane, records)))

    def drop(self) -> None:
        """Nothing that was asked for is needed any more."""
        for asked in self._asked.values():
            asked.task.cancel()
        self._asked.clear()

    async def _ready(self, version: int, lane: int, records: Records) -> Ready | None:
        ready = await self._compute.prepare(step_seed(self._seed, version, lane), records)
        self._says = ready is not None
        return None if ready is None else replace(ready, rows=await self._transfer.lookup(version, ready.ids))

    async def _in_vain_or(self, version: int, lane: int, records: Records) -> Ready | None:
        try:
            return await self._ready(version, lane, records)
        except TriremeError:
            return None
