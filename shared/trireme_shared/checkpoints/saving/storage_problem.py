"""Why checkpoints cannot be written: reported once when it begins and once when it is over.

part or commit fails ─► begin ─► log, the own key (the master makes it an event)      works again ─► end ─► the same
"""

from __future__ import annotations

from collections.abc import Callable

from trireme_shared.checkpoints.saving.part_owner import PartOwner
from trireme_shared.platform.runtime import telemetry
from trireme_shared.protocol.errors import InvalidArgument

log = telemetry.logger("checkpoints.storage")


def advice_for(error: Exception) -> str:
    """What to do about a checkpoint that could not be written because of `error`."""
    given = error.hint if isinstance(error, InvalidArgument) else ""
    remedy = given or "make room or give the job a storage that can be written"
    return f"training goes on and the checkpoints before it stay; {remedy}"


class StorageProblem:
    """`begin` and `end` are called for each checkpoint; only changes are reported. `what`: "part" or "commit".

    `tell` gets the first message of a problem, not those that follow, and "" when the problem is over."""

    def __init__(self, owner: PartOwner, tell: Callable[[str], None]) -> None:
        self._owner, self._tell = owner, tell
        self._current: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"<StorageProblem of {self._owner.name}: {self._current or 'none'}>"

    def begin(self, what: str, message: str) -> None:
        if what in self._current:
            log.debug("checkpoint_failed_again", owner=self._owner.name, cause=message)
        else:
            log.error("checkpoint_failed", owner=self._owner.name, message=message)
        self._change({**self._current, what: message})

    def end(self, what: str) -> None:
        if what in self._current:
            log.info("checkpoint_works_again", owner=self._owner.name)
            self._change({name: message for name, message in self._current.items() if name != what})

    def _change(self, current: dict[str, str]) -> None:
        before, self._current = self._current, current
        self._owner.checkpoint_error = next(iter(current.values()), "")
        if bool(before) != bool(current):
            self._tell(self._owner.checkpoint_error)
