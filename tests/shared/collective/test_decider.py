"""Who decides about epochs may die, etcd may restart or fall silent: ids never repeat, and nobody is left out
who lives."""

from __future__ import annotations

import asyncio

import pytest

from tests.shared.collective.world import KEYS, TTL_S, epoch_of, named, virtual
from trireme_shared.collective import decider
from trireme_shared.collective.decider import next_members
from trireme_shared.collective.records import Trouble


@pytest.mark.parametrize(
    ("before", "present", "minimum", "wanted"),
    [
        ((), {"b": 7, "a": 9}, 1, "ba"),
        ("ab", {"a": 9, "b": 7}, 1, None),
        ("ab", {"b": 7}, 1, "b"),
        ("ba", {"c": 11, "a": 9, "b": 7}, 1, "bac"),
        ("ab", {"b": 7, "d": 14, "c": 14}, 1, "bcd"),
        ("ab", {}, 1, None),
        ("ab", {"b": 7}, 2, None),
        ("ab", {"b": 7, "c": 8}, 2, "bc"),
    ],
)
def test_survivors_keep_their_order_and_new_members_follow(before, present, minimum, wanted):
    found = next_members(
        epoch_of(*before) if before else None, {named(name): at for name, at in present.items()}, minimum
    )
    assert found == (tuple(map(named, wanted)) if wanted else None)


@virtual
async def test_members_that_start_together_are_in_one_epoch(world, group):
    world.begin(group, "a")
    await asyncio.sleep(0.05)
    world.begin(group, "b", "c")
    await world.until("abc", 2.0)
    assert len(world.ids) == 1


@virtual
async def test_a_death_that_is_proved_is_in_the_next_epoch_at_once_also_of_who_decides(world, group):
    world.begin(group, "a")
    await asyncio.sleep(0.1)  # it has the lock
    world.begin(group, "b", "c")
    await world.until("abc", 2.0)
    world.kill("b")
    await world.until("ac", 0.2)
    world.kill("a")
    await world.until("c", 0.5)
    assert world.ids == sorted(set(world.ids))


@virtual
async def test_who_is_silent_is_left_out_when_its_lease_is_over(world, group):
    world.begin(group, "a")
    await asyncio.sleep(0.1)
    world.begin(group, "b")
    await world.until("ab", 2.0)
    world.etcd.cut("b")
    await world.until("a", TTL_S + 1.0)
    world.etcd.mend("b")
    await world.until("ab", 10.0)


@virtual
async def test_a_restart_of_etcd_changes_nothing_and_what_follows_has_a_higher_id(world, group):
    world.begin(group, "a", "b", "c")
    await world.until("abc", 3.0)
    world.etcd.stop()
    await asyncio.sleep(20.0)
    world.etcd.start()
    await asyncio.sleep(5.0)
    assert await world.members() == "abc"
    assert len(world.ids) == 1
    world.kill("b")
    await world.until("ac", 1.0)
    assert world.ids[1] > world.ids[0]


async def _silent_etcd(world, group) -> str:
    world.begin(group, "a", "b", "c")
    await world.until("abc", 3.0)
    world.etcd.freeze()
    await asyncio.sleep(3 * TTL_S)
    world.etcd.thaw()
    await asyncio.sleep(8.0)
    await world.members()
    return f"{len(world.ids)}"


@virtual
async def test_members_whose_leases_ran_out_in_a_silence_of_etcd_are_waited_for(world, group):
    assert await _silent_etcd(world, group) == "1"


def test_ablation_without_that_wait_members_that_live_are_left_out(monkeypatch):
    monkeypatch.setattr(decider, "may_return_s", lambda *_: 0.0)
    epochs = []

    async def story(world, group):
        epochs.append(int(await _silent_etcd(world, group)))

    for seed in range(3):
        virtual(story, seed=seed)()
    assert max(epochs) > 1


@virtual
async def test_trouble_gives_the_same_members_a_new_epoch_and_ever_more_slowly(world, group):
    world.begin(group, "a", "b")
    await world.until("ab", 2.0)
    times = []
    for _ in range(6):
        told = Trouble(epoch=world.ids[-1], cause="cut")
        await world.observer.put(KEYS.collective_trouble("a"), told.to_bytes())
        began, count = asyncio.get_running_loop().time(), len(world.ids)
        while len(world.ids) == count:
            await world.members()
            await asyncio.sleep(0.01)
        times.append(asyncio.get_running_loop().time() - began)
    assert await world.members() == "ab"
    assert 0.1 <= times[0] < 0.3
    assert 1.0 < times[-1] < 3.0


@virtual
async def test_keys_of_an_epoch_are_gone_with_it(world, group):
    world.begin(group, "a", "b")
    await world.until("ab", 2.0)
    await world.observer.put(KEYS.collective_of(world.ids[0]) + "statements/0", b"x")
    world.kill("b")
    await world.until("a", 1.0)
    assert await world.observer.get(KEYS.collective_of(world.ids[0]) + "statements/0") is None
