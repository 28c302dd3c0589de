"""What one member has of a communicator: its progress in the group's history, and its session in the epoch
under way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from trireme_shared.collective.group import Group
from trireme_shared.collective.records import Done, EpochMember, Statement
from trireme_shared.platform.runtime import clock

STATE = "state"  # the kind of the broadcast that gives new members the group's model
NOTHING = Done(number=0, epoch=0)  # of a process that was in no epoch yet


class Buffers:
    """Flat buffers that are used again, so that the kernel need not give memory each time. Used by one thread
    at a time."""

    def __init__(self, kept: int = 2) -> None:
        self._free: dict[tuple[torch.dtype, int, str], list[torch.Tensor]] = {}
        self._kept = kept

    def take(self, dtype: torch.dtype, size: int, device: torch.device) -> torch.Tensor:
        free = self._free.get((dtype, size, str(device)))
        return free.pop() if free else torch.empty(size, dtype=dtype, device=device)

    def give(self, flats: Sequence[torch.Tensor]) -> None:
        """Sizes that were not used lately are forgotten."""
        for flat in flats:
            key = (flat.dtype, flat.numel(), str(flat.device))
            free = self._free.pop(key, [])
            if len(free) < self._kept:
                free.append(flat)
            self._free[key] = free
        while len(self._free) > 8:
            self._free.pop(next(iter(self._free)))


@dataclass(slots=True)
class Result:
    """`flats` None: it is not kept here. `text`: what receivers need to read `flats`. `weight`: the sum of
    the members' weights. `factor`: the values are to be multiplied by it."""

    done: Done
    kind: str = ""
    digest: int = 0
    text: str = ""
    factor: float = 1.0
    weight: float = 0.0
    flats: list[torch.Tensor] | None = None


@dataclass(slots=True)
class Progress:
    """What one member has of the group's history: its last result, kept for those who have not got it.

    No operation begins anywhere before everybody has finished the one before. So members are at most one
    operation apart when a group breaks: who has the result gives it to the others, and all have the same; if
    nobody has it, it is done again.

    `delivered`: this member's caller knows `last`; else its next call gets it, without any communication.
    """

    last: Result = field(default_factory=lambda: Result(NOTHING))
    before: Done = NOTHING
    delivered: bool = True
    has_state: bool = False
    buffers: Buffers = field(default_factory=Buffers)

    def finish(self, result: Result, *, delivered: bool) -> None:
        """`result` is the next one."""
        if self.last.flats:
            self.buffers.give(self.last.flats)
        self.before, self.last, self.delivered = self.last.done, result, delivered
        self.has_state = self.has_state or result.kind == STATE

    def adopt(self, head: Done, *, has_state: bool) -> None:
        """This member is new, or lost the others: it goes on from where they are."""
        self.last, self.before, self.delivered, self.has_state = Result(head), NOTHING, True, has_state

    def state(self, manifest: dict[str, str], listener: tuple[str, int] | None, network: str) -> Statement:
        return Statement(
            manifest=manifest,
            last=self.last.done,
            before=self.before,
            gives=self.last.flats is not None,
            has_state=self.has_state,
            listener=listener,
            network=network,
        )

    def enter(self, line: Line, rank: int, epoch: int, given: Result | None) -> None:
        """As everybody of the epoch does. `given`: the giver's result, if somebody lacked it."""
        if given is not None and rank in line.behind:
            self.finish(given, delivered=False)
        elif not line.head.epoch:  # a group's beginning
            self.adopt(Done(number=0, epoch=epoch), has_state=self.has_state)
        elif rank in line.lost:
            self.adopt(line.head, has_state=False)


@dataclass(frozen=True, slots=True)
class Line:
    """What follows from all statements of an epoch, the same for all its members. `head`: the last operation
    that anybody of the group has. `lost`: ranks of those who are not of its history. `behind`: who lacks the
    result of `head`; `giver` has it. `stateless`: who needs the group's state. `root`: who has it."""

    head: Done
    lost: frozenset[int]
    behind: tuple[int, ...]
    giver: int
    stateless: frozenset[int]
    root: int

    @classmethod
    def of(cls, statements: list[Statement]) -> Line:
        """In the order of ranks: the oldest member with the group's state tells the history."""
        everybody = frozenset(range(len(statements)))
        leader = next((rank for rank, each in enumerate(statements) if each.has_state), None)
        if leader is None:  # whoever knew a history has gone: what members begin with now is another one
            return cls(NOTHING, frozenset(), (), 0, everybody, 0)
        told = statements[leader]
        ahead = [
            rank
            for rank, each in enumerate(statements)
            if each.before == told.last and each.last != told.last
        ]
        head = statements[ahead[0]].last if ahead else told.last
        before = told.last if ahead else told.before
        lost = {
            rank
            for rank, each in enumerate(statements)
            if each.last not in (head, before) or not each.last.epoch
        }
        behind = [rank for rank, each in enumerate(statements) if rank not in lost and each.last != head]
        givers = [rank for rank, each in enumerate(statements) if each.last == head and each.gives]
        if behind and not givers:  # nobody has it any more: then nobody may have used it
            lost |= {rank for rank, each in enumerate(statements) if each.last == head}
            head, behind = before, []
        stateless = lost | {rank for rank, each in enumerate(statements) if not each.has_state}
        roots = [rank for rank in range(len(statements)) if rank not in stateless]
        root = roots[0] if roots else next(rank for rank in range(len(statements)) if rank not in lost)
        return cls(
            head, frozenset(lost), tuple(behind), givers[0] if givers else 0, frozenset(stateless), root
        )


@dataclass(slots=True)
class Session:
    """One epoch in one member: who is in it, its group, and who may use or give up the group at what time.

    user's thread:  use ─► operations ─► leave
    background:  retire ─► (cut, if somebody has left already) ─► drop

    `group` None: of a single member, or of members that do not fit together (`refused` says why).
    `stateless`: who needs the group's state, which `root` has.
    """

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
