"""One epoch in one member: who is in it, its group, and who may use or give up the group at what time.

user's thread:  use ─► operations ─► leave          background:  retire ─► (cut, if somebody has left already) ─► drop
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from trireme_shared.collective.group import Group
from trireme_shared.collective.progress import Progress, Result
from trireme_shared.collective.records import Done, EpochMember
from trireme_shared.platform.runtime import clock


@dataclass(slots=True)
class Session:
    """`group` None: of a single member, or of members that do not fit together (`refused` says why). `stateless`: who needs the group's
    state, which `root` has."""

    epoch: int
    rank: int
    members: tuple[EpochMember, ...]
    progress: Progress
    group: Group | None = None
    refused: str = ""
    stateless: frozenset[int] = frozenset()
    root: int = 0
    broken: str = ""
    busy: bool = False
    busy_since: float | None = None
    retiring: bool = False
    condition: threading.Condition = field(default_factory=threading.Condition)
    on_free: Callable[[], None] = lambda: None

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def usable(self) -> bool:
        return not (self.broken or self.retiring)

    def use(self) -> bool:
        """Begin to use the group; False: it is over."""
        with self.condition:
            if not self.usable:
                return False
            self.busy, self.busy_since = True, clock.monotonic()
            return True

    def leave(self) -> None:
        with self.condition:
            self.busy, self.busy_since = False, None
            group, self.group = (self.group, None) if self.broken else (None, self.group)
        if group is not None:
            group.drop()
        self.on_free()

    def retire(self) -> bool:
        """No operation begins any more. Answers whether none is under way."""
        with self.condition:
            self.retiring = True
            return not self.busy

    def cut(self) -> None:
        if (group := self.group) is not None:
            group.cut()

    def drop(self) -> None:
        """Only when it is not used any more."""
        with self.condition:
            group, self.group = self.group, None
        if group is not None:
            group.drop()

    def finish(self, result: Result) -> None:
        """The operation under way has succeeded here."""
        self.progress.finish(result, delivered=True)
        if not self.stateless or self.size == 1:
            self.progress.has_state = True
        if result.kind == "state":
            self.stateless = frozenset()

    def next_number(self) -> Done:
        return Done(number=self.progress.last.done.number + 1, epoch=self.epoch)
