"""Who is registered in etcd, and what they have written there: initialised parameters, checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trireme_shared.protocol.records import Holding, PserverMember, TrainerMember
from trireme_shared.protocol.records.checkpoints import CheckpointLatest, OwnCheckpoints
from trireme_shared.protocol.records.layout import Layout


def started_by(member: TrainerMember | PserverMember) -> str:
    """The name that its process was started with. In a cluster that is the pool member whose place it has."""
    return member.incarnation.rpartition("-")[0]


def has(holds: Holding | None, timeline: int, checkpoint: str) -> bool:
    """Collective: whether a trainer that says so has the parameters of that timeline."""
    return holds is not None and not holds.error and (holds.timeline, holds.checkpoint) == (timeline, checkpoint)


LEFT_KEPT = 4096  # names; those that left earlier are no news any more


@dataclass(frozen=True, slots=True)
class Members:
    """Trainers in order of arrival. The revisions are those at which etcd created each `ps/<index>` and `layout` (0: not there).
    `latest`: the newest checkpoint, written at `latest_revision`; `own`: independent checkpoints, by pserver.
    `initialiser`: the trainer that gave the parameters their first values, once they have them. `left`: trainers and pservers (`pserver-0`) that gave their keys up because they were told to, the latest LEFT_KEPT."""

    trainers: Mapping[str, TrainerMember] = field(default_factory=dict)
    pservers: Mapping[int, PserverMember] = field(default_factory=dict)
    pserver_revisions: Mapping[int, int] = field(default_factory=dict)
    layout_revision: int = 0
    layout: Layout | None = None
    init_done: bool = False
    initialiser: str = ""
    latest: CheckpointLatest | None = None
    latest_revision: int = 0
    own: Mapping[int, OwnCheckpoints] = field(default_factory=dict)
    left: tuple[str, ...] = ()

    def starters(self) -> frozenset[str]:
        """`started_by` of each trainer and parameter server."""
        trainers, pservers = map(started_by, self.trainers.values()), map(started_by, self.pservers.values())
        return frozenset((*trainers, *pservers))

    def holding(self, timeline: int, checkpoint: str) -> tuple[str, ...]:
        """Collective: the trainers that have the parameters of that timeline, in order of arrival."""
        return tuple(name for name, member in self.trainers.items() if has(member.holds, timeline, checkpoint))

    def absence(self, name: str) -> str:
        """For people: `trainer-0 left, as asked` or `trainer-0 is gone`."""
        return f"{name} left, as asked" if name in self.left else f"{name} is gone"

    def __repr__(self) -> str:
        done = "initialised" if self.init_done else "not initialised"
        return f"<Members: {len(self.pservers)} pservers, {len(self.trainers)} trainers, {done}>"
