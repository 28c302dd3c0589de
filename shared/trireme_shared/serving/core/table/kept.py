"""How many rows steps may keep for snapshots that are being written: beyond a number of bytes they wait until some are written.

kept <= snapshot_bytes of the job: the next step begins        more: it waits, as long as slots are written        LIMIT_S without any: given up
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.records.job_choices import SNAPSHOT_BYTES
from trireme_shared.tables.snapshot import TableSnapshot

LIMIT_S = 30.0


@dataclass(slots=True)
class KeptRows:
    """Of one parameter server. `waited_s`: seconds that steps have waited."""

    most_bytes: int = SNAPSHOT_BYTES
    waited_s: float = 0.0
    _begun: float | None = None  # since when a step waits
    _moved: float = 0.0  # when a slot was seen to be written
    _read: int = 0

    def may_step(self, snapshots: Sequence[TableSnapshot], now: float) -> bool:
        """Whether the next step may begin; ask again soon if not. So what is kept is `most_bytes`, and the rows of one step, at most."""
        snapshots = [each for each in snapshots if each.is_open]
        kept, read = sum(each.kept_bytes for each in snapshots), sum(each.slots_read for each in snapshots)
        if kept <= self.most_bytes:
            self._end(now)
            return True
        if self._begun is None:
            self._begun = self._moved = now
            self._read = read
        if read != self._read:
            self._read, self._moved = read, now
        if now - self._moved < LIMIT_S:
            return False
        problem = InvalidArgument(
            f"steps kept {kept} bytes of rows for it, {self.most_bytes} are allowed, and none were written for {LIMIT_S:g} s",
            hint="look at the storage, which is slow or does not answer",
        )
        for each in snapshots:
            each.give_up(problem)
        self._end(now)
        return True

    def _end(self, now: float) -> None:
        if self._begun is not None:
            self.waited_s += now - self._begun
            self._begun = None
