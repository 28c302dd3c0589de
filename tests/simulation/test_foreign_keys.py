"""Keys that nobody of ours wrote, under every prefix that somebody follows: each is passed over, and the job
is whole."""

from __future__ import annotations

import asyncio

import pytest

from tests.equipment.replaced import replaced
from tests.equipment.virtual_loop import Process
from tests.simulation.cluster import SimulatedCluster
from tests.simulation.plans import plan_of
from tests.simulation.run import simulate
from trireme_shared.protocol.records import Dispatch, Mode

FOREIGN = (
    *(
        "foreign",
        "job/foreign",
        "generation/foreign",
        "job/trainers/foreign",
        "master/foreign",
        "sweep/foreign",
        "init_ps/foreign",
    ),
    *("ps/foreign", "ps/7", "trainers/foreign", "trainers/foreign/0"),
    *("operations/foreign", "tasks/foreign", "tasks/foreign/0", "tasks/progress/foreign", "tasks/progress/0"),
    *("checkpoints/foreign", "checkpoints/foreign/0", "checkpoints/foreign/begun", "checkpoints/foreign/cut"),
    *(
        "checkpoints/foreign/finished/foreign",
        "checkpoints/foreign/finished/0",
        "checkpoints/foreign/finished/0/0",
    ),
    *("checkpoints/pservers/foreign", "checkpoints/latest/files/foreign"),
)
EVERY_S = 2.0
TIMES = 20


async def litter(cluster: SimulatedCluster) -> None:
    for number in range(TIMES):
        for name in FOREIGN:
            value = (b"{}", b"\xff no text", b"[1]")[(number + len(name)) % 3]
            cluster.etcd.store.execute(
                "/kv/put", {"key": (cluster.keys.prefix + name).encode(), "value": value}
            )
        cluster.etcd.overlook()
        await asyncio.sleep(EVERY_S)


@pytest.mark.parametrize("dispatch", list(Dispatch))
@pytest.mark.parametrize("mode", list(Mode))
def test_what_nobody_of_ours_wrote_disturbs_nobody(mode, dispatch):
    opened = SimulatedCluster.open

    def littered(self: SimulatedCluster) -> None:
        opened(self)
        if "litter" not in self.processes:  # the machine may restart
            self.processes["litter"] = Process("litter")
            self.processes["litter"].spawn(litter(self))

    with replaced(SimulatedCluster, "open", littered):
        for seed in range(3):
            outcome = simulate(seed, mode, plan=plan_of(seed, mode, dispatch))
            assert not outcome.violations, f"\n  {outcome}"
