"""Slots of embedding tables that take lanes and step together: those of one parameter server, or some that came later."""

from __future__ import annotations

from dataclasses import dataclass, field

from trireme_shared.protocol.wire.messages import Verdict
from trireme_shared.tables.lanes import LaneRows
from trireme_shared.tables.table import Flags


@dataclass(slots=True, eq=False)
class RowsPart:
    """Slots that take lanes and step together. `slots`: bool (slots,)."""

    slots: Flags
    version: int
    waiting: dict[int, list[LaneRows]] = field(default_factory=dict)

    def judge(self, step: int, lane: int) -> Verdict | None:
        """Why it takes nothing of a lane; None: it takes it."""
        if self.version > step or (self.version == step and lane in self.waiting):
            return Verdict.DUPLICATE
        return Verdict.TOO_EARLY if self.version < step else None
