"""The list of trainers and its changes: what members follow is short, and gives exactly the list that the
master wrote."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.equipment.etcd.simulated import SimulatedEtcd
from tests.equipment.virtual_loop import VirtualLoop, run
from trireme_shared.platform.etcd import Etcd, Put
from trireme_shared.platform.membership.directory import Directory
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import TrainerList

KEYS = Keys("job")
NAMES = st.lists(st.integers(0, 12).map("t{}".format), unique=True, max_size=12).map(tuple)


@given(before=NAMES, after=NAMES)
def test_a_change_gives_exactly_the_list_it_leads_to(before, after):
    old = TrainerList(generation=3, lanes=8, names=before)
    new = TrainerList(generation=4, lanes=8, names=after)
    assert old.changed(old.change_to(new)) == new
    assert new.changed(old.change_to(new)) is new, "taken twice"


def test_a_change_that_does_not_follow_the_list_is_refused_unless_it_says_all():
    lists = [TrainerList(generation=n, names=tuple(f"t{m}" for m in range(n))) for n in range(1, 4)]
    assert lists[0].changed(lists[1].change_to(lists[2])) is None
    assert lists[0].changed(TrainerList().change_to(lists[2])) == lists[2]


def test_a_change_brings_the_shares_along():
    names = tuple(f"t{n}" for n in range(1000))
    old = TrainerList(generation=3, lanes=1024, names=names)
    new = TrainerList(generation=4, lanes=1024, names=names, shares=((2, 24), (1, 976)))
    assert old.changed(old.change_to(new)) == new
    assert new.lanes_of("t24") == (48, 49)
    assert len(old.change_to(new).to_bytes()) < 200


def test_one_join_among_a_thousand_is_told_in_a_few_bytes():
    names = tuple(f"trainer-{n}-{n:012x}" for n in range(1000))
    old = TrainerList(generation=7, lanes=1024, names=names)
    new = TrainerList(generation=8, lanes=1024, names=(*names[:500], "new", *names[500:]))
    assert len(old.to_bytes()) > 20_000
    assert len(old.change_to(new).to_bytes()) < 100
    a_spare_takes_over = TrainerList(generation=8, lanes=1024, names=(names[999], *names[1:999]))
    assert len(old.change_to(a_spare_takes_over).to_bytes()) < 200


class Scene:
    """A master that writes lists, and members that follow them; `reads`: how often a member read a whole
    list."""

    def __init__(self, rng):
        self.simulated = SimulatedEtcd(rng=rng, delay_s=(0.0005, 0.003))
        self.master = Etcd(self.simulated.transport("master"))
        self.known = TrainerList()
        self.reads = 0

    def member(self):
        etcd = Etcd(self.simulated.transport("member"))
        read = etcd.range

        async def counted(key, *arguments, **options):
            self.reads += key == KEYS.trainer_list
            return await read(key, *arguments, **options)

        etcd.range = counted
        return Directory(etcd, KEYS)

    async def write(self, *lists):
        """One transaction: the change is that of the last list, as when two decisions share a transaction."""
        for after in lists:
            change, self.known = self.known.change_to(after), after
        await self.master.txn(
            [], [Put(KEYS.trainer_list, after.to_bytes()), Put(KEYS.trainers_change, change.to_bytes())]
        )


def simulate(main, seed=0):
    rng = random.Random(seed)

    async def wrapped():
        scene = Scene(rng)
        directories = [scene.member() for _ in range(3)]
        tasks = [asyncio.create_task(directory.run()) for directory in directories]
        await main(scene, directories)
        for task in tasks:
            assert not task.done()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run(VirtualLoop(rng), wrapped(), rng)


def listed(generation, *names):
    return TrainerList(generation=generation, lanes=4, names=names)


async def see(directories, expected):
    for directory in directories:
        await directory.wait_for(lambda view: view.trainers == expected, 5, f"{expected}")


def test_members_read_the_list_once_and_then_follow_its_changes():
    async def main(scene, directories):
        for number in range(1, 20):
            await scene.write(listed(number, *(f"t{n}" for n in range(number))))
            await see(directories, scene.known)
        assert scene.reads == 0, "they were there from the first list on"
        late = scene.member()
        following = asyncio.create_task(late.run())
        await see([late], scene.known)
        await scene.write(listed(30, "t3", "t1", "new"))
        await see([late, *directories], scene.known)
        assert scene.reads == 1
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    simulate(main)


def test_a_member_that_missed_a_change_reads_the_list_again():
    async def main(scene, directories):
        await scene.write(listed(1, "a", "b"))
        await see(directories, scene.known)
        await scene.write(listed(2, "a", "b", "c"), listed(3, "b", "c", "d"))  # generation 2 is never seen
        await see(directories, scene.known)
        assert scene.reads == len(directories)

    simulate(main)


@pytest.mark.parametrize("seed", range(5))
def test_after_an_outage_and_compaction_members_know_the_newest_list(seed):
    async def main(scene, directories):
        await scene.write(listed(1, "a", "b"))
        await see(directories, scene.known)
        scene.simulated.cut("member")
        for number in range(2, 9):
            await scene.write(listed(number, *(f"t{n}" for n in range(number))))
        found = await scene.master.get(KEYS.trainer_list)
        await scene.master.compact(found.mod_revision)
        await asyncio.sleep(10)
        assert directories[0].trainers == listed(1, "a", "b"), "a stale view, but a whole one"
        scene.simulated.mend("member")
        await see(directories, scene.known)

    simulate(main, seed)
