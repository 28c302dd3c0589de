"""A member's view of its job: current while etcd answers, stale while it does not, and current again
afterwards."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.equipment.etcd.simulated import SimulatedEtcd
from tests.equipment.virtual_loop import VirtualLoop, run
from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.membership.directory import Directory
from trireme_shared.platform.runtime import clock
from trireme_shared.protocol.errors import DeadlineExceeded
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import (
    JobState,
    MasterAddress,
    Phase,
    PserverMember,
    SlotMap,
    TrainerList,
)
from trireme_shared.protocol.records.layout import Layout, OptimizerSpec, Segment

KEYS = Keys("job")


class Scene:
    def __init__(self, rng):
        self.simulated = SimulatedEtcd(rng=rng, delay_s=(0.0005, 0.003))
        self.master = Etcd(self.simulated.transport("master"))
        self.directory = Directory(Etcd(self.simulated.transport("member")), KEYS)


def simulate(main, seed=0):
    rng = random.Random(seed)

    async def wrapped():
        scene = Scene(rng)
        running = asyncio.create_task(scene.directory.run())
        await main(scene)
        assert not running.done(), "run() never ends by itself"
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert scene.simulated.open_watches == 0

    run(VirtualLoop(rng), wrapped(), rng)


def pserver(index):
    return PserverMember(index=index, url=f"http://h:{index}", incarnation="i", host="h", pid=1)


LAYOUT = Layout(
    segments=(Segment(kind="param", dtype="float32", elements=10, group=0),),
    block_bytes=1024,
    digest="d",
    optimizer=OptimizerSpec(name="SGD", defaults={}, groups=({},)),
)


def test_it_holds_what_was_there_before_and_what_came_after():
    async def main(scene):
        state = JobState(phase=Phase.RUNNING, generation=3)
        trainers, slots = (
            TrainerList(generation=3, lanes=8, names=("t", "u")),
            SlotMap(version=1, owners=(0, 1)),
        )
        values = {
            KEYS.state: state.to_bytes(),
            KEYS.trainer_list: trainers.to_bytes(),
            KEYS.trainers_change: TrainerList().change_to(trainers).to_bytes(),
            KEYS.slots: slots.to_bytes(),
            KEYS.layout: LAYOUT.to_bytes(),
            KEYS.master_address: MasterAddress(url="http://m", term=7).to_bytes(),
            KEYS.pservers_desired: b"2",
            KEYS.pserver(1): pserver(1).to_bytes(),
            KEYS.pserver(0): pserver(0).to_bytes(),
            KEYS.init_done: b"trainer-0",
            KEYS.trainer("t"): b"not followed",
            KEYS.cursor(0): b"not followed",
        }
        for key, value in values.items():
            await scene.master.put(key, value)
            await asyncio.sleep(0.1)
        view = scene.directory
        await view.wait_for(lambda d: d.init_done, 5, "init")
        assert (view.state, view.trainers, view.slots, view.layout) == (state, trainers, slots, LAYOUT)
        assert (view.master.url, view.master.term, view.pservers_desired) == ("http://m", 7, 2)
        assert list(view.pservers.items()) == [(0, pserver(0)), (1, pserver(1))]
        assert view.spec is None
        assert "RUNNING generation 3, 2 pservers, master http://m" in repr(view)

        await scene.master.delete(KEYS.pserver(1))
        await scene.master.delete(KEYS.master_address)
        await view.wait_for(lambda d: d.master is None, 5, "no master")
        assert (list(view.pservers), view.master) == ([0], None)
        assert not await view.changed(view.revision, 0.5)

    simulate(main)


def test_a_value_that_cannot_be_read_counts_as_missing_until_the_next():
    async def main(scene):
        view = scene.directory
        await scene.master.put(KEYS.state, JobState(generation=1).to_bytes())
        await view.wait_for(lambda d: d.state is not None, 5, "a state")
        for key in (KEYS.state, KEYS.pserver(0), KEYS.pservers + "x", KEYS.pservers_desired):
            await scene.master.put(key, b"{broken")
        await view.wait_for(lambda d: d.state is None, 5, "the broken state")
        await scene.master.put(KEYS.state, JobState(generation=2).to_bytes())
        await view.wait_for(lambda d: d.state is not None, 5, "the next state")
        assert (view.state.generation, view.pservers, view.pservers_desired) == (2, {}, None)

    simulate(main)


def test_an_outage_only_makes_it_stale_and_then_it_catches_up():
    async def main(scene):
        view = scene.directory
        await scene.master.put(KEYS.state, JobState(generation=1).to_bytes())
        await scene.master.put(KEYS.pserver(0), pserver(0).to_bytes())
        await view.wait_for(lambda d: bool(d.pservers), 5, "a pserver")
        scene.simulated.stop()
        await asyncio.sleep(60)
        assert view.state.generation == 1
        scene.simulated.start()
        scene.simulated.cut("member")
        await scene.master.put(KEYS.state, JobState(generation=2).to_bytes())
        await scene.master.delete(KEYS.pserver(0))
        await scene.master.compact(scene.simulated.revision)
        await asyncio.sleep(30)
        assert view.state.generation == 1
        scene.simulated.mend("member")
        await view.wait_for(lambda d: d.state.generation == 2, 5, "generation 2")
        assert view.pservers == {}

    for seed in range(5):
        simulate(main, seed)


def test_waiting_ends_at_its_limit_and_names_what_it_waited_for():
    async def main(scene):
        with pytest.raises(DeadlineExceeded, match=r"waited 3 s for the slot map; the job is <Directory job"):
            await scene.directory.wait_for(lambda d: d.slots is not None, 3, "the slot map")
        assert 3 <= clock.monotonic() < 3.1

    simulate(main)
