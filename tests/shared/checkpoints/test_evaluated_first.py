"""A checkpoint waits for an older one that is evaluated, as long as that one may still become whole, and not
for ever."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from tests.equipment.replaced import replaced
from tests.pserver_service.checkpoints.parts import layout_of
from trireme_shared.checkpoints.commit import SOON_S, CheckpointView, EvaluatedFirst
from trireme_shared.checkpoints.saving_context import PendingCheckpoint
from trireme_shared.platform.runtime import clock
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import Mode, SlotMap
from trireme_shared.protocol.records.assignments import spread
from trireme_shared.protocol.records.checkpoints import CheckpointLatest, CheckpointStarted
from trireme_shared.protocol.records.step import StepRecord

LIMIT_S = 100.0
LAYOUT = layout_of()
OWNERS = {1: ("a", "b", "slow"), 2: ("a", "b"), 3: ("a", "slow")}  # by the version of the map


def map_of(version: int) -> SlotMap:
    return SlotMap(version=version, owners=spread(128, len(OWNERS[version])))


class Saving:
    """What a process sees: version 4 was begun by the owners of map 1, and version 6 is complete."""

    def __init__(self) -> None:
        self.now, self.dead, self.known = 0.0, set[str](), {1, 2, 3}
        self.seen = CheckpointView(Keys("ctr"))
        self.seen.parts["four"] = {0, 1}
        self.begin(evaluation=2)
        spec = SimpleNamespace(recovery_timeout_s=LIMIT_S)
        context: Any = SimpleNamespace(spec=spec, living=self.living, slots_of=self.slots_of)
        self.first = EvaluatedFirst(context)

    def begin(self, timeline: int = 0, step: int = 4, evaluation: int = 0) -> None:
        place = {"timeline": timeline, "step": step, "slots": 1, "evaluation": evaluation}
        self.seen.begun["four"] = CheckpointStarted(pserver=0, incarnation="i", **place)

    def living(self, slots: SlotMap) -> Mapping[int, str]:
        owners = OWNERS[slots.version] if slots.version in self.known else ()
        return {index: name for index, name in enumerate(owners) if name not in self.dead}

    def slots_of(self, version: int) -> SlotMap | None:
        return map_of(version) if version in self.known else None

    def holds(self, slots: int = 2, own: Mapping[str, PendingCheckpoint] | None = None) -> bool:
        with replaced(clock, "monotonic", lambda: self.now):
            return self.first.holds(pending(6, slots), own or {}, self.seen)


def pending(version: int, slots: int) -> PendingCheckpoint:
    record = StepRecord(version=version, positions=())
    of: dict[str, Any] = {
        "timeline": 0,
        "slots": map_of(slots),
        "layout": LAYOUT,
        "mode": Mode.SYNC,
        "record": record,
    }
    return PendingCheckpoint(uuid=str(version), index=0, file="f", lanes=8, restored="", **of)


def test_it_waits_for_an_owner_that_has_nothing_of_the_newer_one_and_not_for_ever() -> None:
    saving = Saving()
    assert saving.holds()
    saving.now = LIMIT_S - 1
    assert saving.holds()
    saving.now = LIMIT_S + 1
    assert not saving.holds()


def test_it_is_committed_first_by_whoever_has_a_part_of_it() -> None:
    saving = Saving()
    assert saving.holds()
    saving.now = LIMIT_S - 1
    saving.seen.parts["four"].add(2)
    assert saving.holds(), "the time for that begins with its last part"
    saving.now += SOON_S - 1
    assert saving.holds()
    saving.seen.latest = CheckpointLatest(
        uuid="four", step=4, timeline=0, term=1, timestamp="", manifest="m", slots=map_of(1), kept=()
    )
    assert not saving.holds()


def test_one_that_is_complete_and_that_nobody_commits_is_not_waited_for_long() -> None:
    saving = Saving()
    saving.seen.parts["four"].add(2)
    assert saving.holds()
    saving.now = SOON_S + 1
    assert not saving.holds()


@pytest.mark.parametrize("own", [{}, {"four": pending(4, 1)}], ids=["without a part", "with a part"])
def test_nobody_waits_for_the_dead(own: Mapping[str, PendingCheckpoint]) -> None:
    saving = Saving()
    assert saving.holds(own=own)
    saving.dead.add("slow")
    assert not saving.holds(own=own)


def test_nobody_waits_for_a_part_that_failed() -> None:
    saving = Saving()
    saving.seen.failed["four"] = {2}
    assert not saving.holds()


def test_nobody_waits_for_an_owner_that_has_written_its_part_of_the_newer_one() -> None:
    """It writes in order, so it has given up the older one."""
    assert not Saving().holds(slots=3)


@pytest.mark.parametrize(
    "place", [{"evaluation": 0}, {"evaluation": 2, "timeline": 1}, {"evaluation": 2, "step": 8}], ids=str
)
def test_nobody_waits_for_one_that_is_not_evaluated_of_another_timeline_or_newer(
    place: dict[str, int],
) -> None:
    saving = Saving()
    saving.begin(**place)
    assert not saving.holds()


def test_who_does_not_know_its_owners_waits_for_a_while() -> None:
    saving = Saving()
    saving.known = {2}
    assert saving.holds()
    saving.now = SOON_S + 1
    assert not saving.holds()


def test_the_time_begins_anew_once_its_keys_are_deleted() -> None:
    saving = Saving()
    assert saving.holds()
    del saving.seen.begun["four"]
    assert not saving.holds()
    saving.now = LIMIT_S + 1
    saving.begin(evaluation=2)
    assert saving.holds()
