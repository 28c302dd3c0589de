"""How often a trainer joins again while what it joins is gone each time, on virtual time."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from tests.equipment.etcd.simulated import SimulatedEtcd
from tests.equipment.virtual_loop import run_virtually
from trainer_agent.core.duties import Duty, Next
from trainer_agent.loops.sync import Joiner
from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.membership.directory import Directory
from trireme_shared.protocol.errors import Gone
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import JobState, Phase

MOST = 1000


def joiner() -> Joiner:
    directory = Directory(Etcd(SimulatedEtcd().transport("test")), Keys("j"))
    directory.state = JobState(phase=Phase.RUNNING)
    nothing = SimpleNamespace(trainer="t", keep=lambda lanes: None)
    context = SimpleNamespace(
        directory=directory,
        compute=nothing,
        exchange=nothing,
        source=nothing,
        stopping=asyncio.Event(),
        spec=nothing,
        duty=lambda: Next(Duty.TRAIN),
    )
    return Joiner(context, nothing, nothing, nothing)  # type: ignore[arg-type]


def attempts_within(seconds: float, steps_made: int) -> int:
    """Each makes so many steps before it ends with Gone."""

    async def main() -> int:
        one, now, begun = joiner(), asyncio.get_running_loop().time, 0

        async def steps() -> None:
            nonlocal begun
            begun += 1
            for _ in range(steps_made + 1):  # the version that it joins, and one for each step
                one.may_go_on(SimpleNamespace(version=0))  # type: ignore[arg-type]
            raise Gone("it is overtaken")

        end = now() + seconds
        while now() < end and begun < MOST:  # without a pause no time passes
            assert await one.attempt(steps)
        return begun

    return run_virtually(main)


def test_a_trainer_whose_version_is_gone_joins_again_with_growing_pauses():
    assert attempts_within(10.0, steps_made=0) < 20


def test_there_is_no_pause_after_a_step():
    assert attempts_within(10.0, steps_made=1) == MOST
