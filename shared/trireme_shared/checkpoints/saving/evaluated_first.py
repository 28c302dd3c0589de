"""No checkpoint is committed before an older one that is evaluated and may still become whole: behind a newer one it could not be committed any more.

Owners write their parts in order. So this concerns owners of the older version alone that own nothing of the newer one: collective jobs take lanes
from a slow trainer, which goes on writing; parameter servers are removed.
"""

from __future__ import annotations

from collections.abc import Mapping

from trireme_shared.checkpoints import stored
from trireme_shared.checkpoints.saving.part_owner import SavingContext
from trireme_shared.checkpoints.saving.pending import PendingCheckpoint
from trireme_shared.checkpoints.saving.view import CheckpointView
from trireme_shared.platform.runtime import clock, telemetry
from trireme_shared.protocol.records.checkpoints import CheckpointStarted

SOON_S = 30.0  # for one that has all parts, or whose owners this process does not know

log = telemetry.logger("checkpoints.commit")


class EvaluatedFirst:
    """Which checkpoints are held back. The wait for a part of one that is evaluated ends after `recovery_timeout_s`."""

    def __init__(self, context: SavingContext) -> None:
        self._context = context
        self._since: dict[tuple[str, float], float] = {}  # by uuid of an evaluated one and the limit of the wait

    def holds(self, newer: PendingCheckpoint, pending: Mapping[str, PendingCheckpoint], seen: CheckpointView) -> bool:
        """Whether `newer`, which is complete, has to wait. `pending`: the checkpoints that this process has a part of."""
        self._since = {wait: since for wait, since in self._since.items() if wait[0] in seen.begun}
        return any(self._waits_for(uuid, begun, newer, pending.get(uuid), seen) for uuid, begun in seen.begun.items())

    def _waits_for(
        self,
        uuid: str,
        begun: CheckpointStarted,
        newer: PendingCheckpoint,
        own: PendingCheckpoint | None,
        seen: CheckpointView,
    ) -> bool:
        older = begun.timeline == newer.timeline and begun.step < newer.record.version
        saved = seen.latest is not None and seen.latest.covers(begun.timeline, begun.step)
        if not begun.evaluation or not older or saved or uuid in seen.failed:
            return False
        limit_s = SOON_S
        slots = own.slots if own is not None else self._context.slots_of(begun.slots)
        if slots is not None:
            missing = {*stored.writers(newer.layout, slots)} - seen.parts.get(uuid, set())
            living, later = self._context.living(slots), self._context.living(newer.slots)
            if not missing <= living.keys() or not {living[index] for index in missing}.isdisjoint(later.values()):
                return False
            if missing:
                limit_s = self._context.spec.recovery_timeout_s
        if (uuid, limit_s) not in self._since:
            log.info("commit_held", step=newer.record.version, evaluated=begun.step, limit_s=limit_s)
        return clock.monotonic() - self._since.setdefault((uuid, limit_s), clock.monotonic()) < limit_s
