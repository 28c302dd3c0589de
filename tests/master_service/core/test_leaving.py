"""Members that left because they were told to are not reported as lost."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from master_service.core.decisions.membership import reconcile
from master_service.core.state.job import LEFT_KEPT, Members
from master_service.store.schema import MembersWatch
from tests.equipment.etcd.simulated import SimulatedEtcd
from tests.equipment.waiting import until
from tests.master_service.cluster import spec_of
from tests.master_service.core.members import (
    RUNNING,
    SLOTS,
    SPEC,
    TRAINERS,
    pservers,
    state_after,
    trainers,
    whole,
)
from trireme_shared.platform.etcd import Etcd, KeyValue, WatchBatch, WatchEvent
from trireme_shared.platform.membership.directory import OwnKey
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import Mode, Phase, SlotMap, TrainerMember
from trireme_shared.protocol.records.checkpoints import CheckpointLatest, CheckpointRef

KEYS = Keys("test")
SAVED = CheckpointRef(uuid="newest", step=40, timeline=0, manifest="m")
LATEST = CheckpointLatest(
    uuid="newest", step=40, timeline=0, manifest="m", timestamp="", term=1, slots=SLOTS, kept=(SAVED,)
)


def reason_after(members: Members, slots: SlotMap = SLOTS) -> str:
    return state_after(reconcile(SPEC, RUNNING, TRAINERS, slots, replace(members, latest=LATEST))).reason


def test_a_trainer_that_was_told_to_leave_is_not_called_gone() -> None:
    assert reason_after(replace(whole("b"), left=("a",))) == "a left, as asked"
    assert reason_after(replace(whole("b"), left=("c",))) == "a is gone"


@pytest.mark.parametrize(
    "registered", [(0,), (0, 1)], ids=["its index is free", "its successor has its index"]
)
def test_a_parameter_server_that_was_told_to_leave_is_not_called_lost(registered: tuple[int, ...]) -> None:
    members = Members(
        trainers("a", "b"),
        pservers(*registered),
        {0: 5, 1: 99},
        layout_revision=10,
        init_done=True,
        left=("pserver-1",),
    )
    assert reason_after(members) == "pserver-1 left, as asked: training continues from step 40"


def test_a_job_without_any_member_of_before_continues_and_says_that_they_have_ended() -> None:
    ended = "all previous members have left: training continues from step 40"
    nobody = Members(layout_revision=10, init_done=True)
    assert reason_after(nobody) == ended
    new = replace(nobody, trainers=trainers("c"), pservers=pservers(0, 1), pserver_revisions={0: 98, 1: 99})
    assert reason_after(new) == ended
    assert reason_after(replace(new, trainers=trainers("a"))).startswith(
        "pserver-0 was replaced by an empty one"
    )
    assert reason_after(replace(nobody, pservers=pservers(0), pserver_revisions={0: 5})).startswith(
        "pserver-1 is gone"
    )


def test_an_asynchronous_job_goes_on_without_the_one_that_left_until_its_successor_has_loaded() -> None:
    spec = spec_of(mode=Mode.ASYNC, pservers=2, slot_count=128, checkpoint_kind="coordinated")
    members = Members(
        trainers("a", "b"),
        pservers(0),
        {0: 5},
        layout_revision=10,
        init_done=True,
        latest=LATEST,
        left=("pserver-1",),
    )
    state = state_after(reconcile(spec, RUNNING, TRAINERS, SLOTS, members))
    assert (state.phase, state.absent) == (Phase.RUNNING, (1,))
    assert state.reason == (
        "pserver-1 left, as asked; its successor loads its newest checkpoint, the others go on"
    )


async def test_a_key_says_that_its_holder_was_told_to_leave_before_it_vanishes() -> None:
    simulated = SimulatedEtcd()
    seen: list[Members] = []
    watch = MembersWatch(Etcd(simulated.transport("master")), KEYS, seen.append)
    following = asyncio.ensure_future(watch.run(1))
    for name, asked in (("told", True), ("ended", False)):
        record = TrainerMember(trainer=name, url="", incarnation=name, host="h", pid=1)
        own = OwnKey(Etcd(simulated.transport(name)), record)
        assert await own.claim(KEYS.trainer(name), 5.0)
        await until(lambda: name in watch.members().trainers, "it to be seen")  # noqa: B023  called at once
        await own.release(asked=asked)
        await until(lambda: name not in watch.members().trainers, "it to be seen leaving")  # noqa: B023
    following.cancel()
    assert watch.members().left == ("told",)


def test_only_the_last_word_of_a_member_counts_and_no_more_names_are_kept_than_a_bound() -> None:
    watch = MembersWatch(Etcd(SimulatedEtcd().transport("master")), KEYS, lambda _: None)

    def wrote(name: str, *, leaving: bool) -> KeyValue:
        record = TrainerMember(trainer=name, url="", incarnation=name, host="h", pid=1, leaving=leaving)
        return KeyValue(KEYS.trainer(name), record.to_bytes(), 1, 1, 1, 0)

    def left(name: str, *, leaving: bool) -> None:
        put = wrote(name, leaving=leaving)
        events = (WatchEvent("put", put), WatchEvent("delete", put))
        watch.take(WatchBatch(revision=1, events=events), KEYS.trainers, KEYS.trainers[:-1] + "0")

    left("a", leaving=True)
    left("b", leaving=True)
    assert watch.members().left == ("a", "b")
    left("a", leaving=False)
    assert watch.members().left == ("b",)
    for number in range(LEFT_KEPT + 10):
        left(f"t{number}", leaving=True)
    assert len(watch.members().left) == LEFT_KEPT
