"""Members, lanes and the state of a small synchronous job, as values."""

from __future__ import annotations

from master_service.core.changes import Decision
from master_service.core.state.job import Members
from tests.master_service.cluster import spec_of
from trireme_shared.protocol.records import (
    JobState,
    Mode,
    Phase,
    PserverMember,
    SlotMap,
    TrainerList,
    TrainerMember,
)

SPEC = spec_of(mode=Mode.SYNC, lanes=4, pservers=2, slot_count=128)


def trainers(*names: str) -> dict[str, TrainerMember]:
    return {n: TrainerMember(trainer=n, url=f"http://{n}", incarnation=n, host="h", pid=1) for n in names}


def pservers(*indexes: int) -> dict[int, PserverMember]:
    return {
        i: PserverMember(index=i, url=f"http://p{i}", incarnation=f"p{i}", host="h", pid=1) for i in indexes
    }


def whole(*names: str) -> Members:
    revisions = {0: 5, 1: 6}
    return Members(trainers(*names), pservers(0, 1), revisions, layout_revision=10, init_done=True)


def state_after(decision: Decision[None]) -> JobState:
    return next(change for change in decision.changes if isinstance(change, JobState))


def list_after(decision: Decision[None]) -> TrainerList:
    return next(change for change in decision.changes if isinstance(change, TrainerList))


RUNNING = JobState(phase=Phase.RUNNING, generation=4)
TRAINERS = TrainerList(generation=4, lanes=4, names=("a", "b"))
NOBODY = TrainerList()
SLOTS = SlotMap(version=1, owners=(0, 1) * 64)
