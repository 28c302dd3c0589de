"""All rows of an embedding table, from all parameter servers: some slots at a time, so that no answer is large.

each parameter server: slots from 0 on ──► ids, rows, next slot ──► ... ──► all, in the order of their ids
"""

from __future__ import annotations

from shared.errors import BadFrame
from shared.tables.hashing import Ids
from shared.tables.payload import ids_in, rows_in
from shared.wire.messages import TableEnd, TableRequest
from trainer_agent.data_plane.lookups import Lookups, Rows
from trainer_agent.data_plane.routing import Routes
from trainer_agent.tables.files import in_order

Part = tuple[Ids, Rows]


class WholeTables(Lookups):
    """At the newest version (`version` None: whichever that is). All raise Gone if there is a newer one, DeadlineExceeded if a parameter server stays away."""

    async def count_rows(self, table: int, version: int | None) -> int:
        """How many rows the table has, maybe with some that are expired."""

        async def ask(routes: Routes, index: int) -> int:
            end, _ = await self._portion(routes, index, version, table, self._layout.slot_count)
            return end.total

        return sum(await self._ask_by_one_map(ask))

    async def whole_table(self, table: int, version: int | None) -> Part:
        """int64 (n,), ascending, and float32 (n, dim)."""
        dim = self._dims[table]

        async def ask(routes: Routes, index: int) -> list[Part]:
            found, slot, part = [], 0, 0
            while slot < self._layout.slot_count:
                end, payload = await self._portion(routes, index, version, table, slot, part)
                if (end.next, end.part) <= (slot, part):
                    raise BadFrame(f"pserver-{index} sent slots {slot} to {end.next} of a table: none at all")
                (ids,) = ids_in(payload, [end.rows], [dim], rows=True)
                (rows,) = rows_in(payload, [end.rows], [dim], ids=True)
                found.append((ids, rows))
                slot, part = end.next, end.part
            return found

        parts = [part for found in await self._ask_by_one_map(ask) for part in found]
        return in_order([ids for ids, _ in parts], [rows for _, rows in parts], dim)

    async def _portion(
        self, routes: Routes, index: int, version: int | None, table: int, first: int, part: int = 0
    ) -> tuple[TableEnd, memoryview]:
        fields = {"version": version, "table": table, "first": first, "part": part, "slots": routes.version}
        request = TableRequest(**self.envelope(), **fields)
        return await self._ask(index, lambda port: port.table(request), routes=routes)
