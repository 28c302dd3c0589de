"""Work of a timeline that the job has left does not begin: it would take a task that nobody then works on."""

from __future__ import annotations

import pytest

from tests.equipment.etcd.simulated import SimulatedEtcd
from tests.equipment.virtual_loop import run_virtually
from trainer_agent.loops.context import RolledBack, on_timeline
from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.membership.directory import Directory
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import JobState, Phase


@pytest.mark.parametrize("timeline", [2, 4])
def test_work_of_a_timeline_that_is_over_does_not_begin(timeline):
    begun = []

    async def work():
        begun.append(timeline)
        return "done"

    async def main():
        directory = Directory(Etcd(SimulatedEtcd().transport("test")), Keys("j"))
        directory.state = JobState(phase=Phase.RUNNING, timeline=4)
        if timeline == 4:
            assert await on_timeline(directory, timeline, work()) == "done"
            return
        with pytest.raises(RolledBack, match="in timeline 4, not in 2"):
            await on_timeline(directory, timeline, work())

    run_virtually(main)
    assert begun == ([4] if timeline == 4 else [])
