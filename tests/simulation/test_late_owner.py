"""A trainer of a collective job is late with a minibatch while others compute its lanes and get ahead; then
the generation changes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from tests.equipment.cluster.network import STEADY
from tests.equipment.replaced import replaced
from tests.simulation import collective
from tests.simulation.cluster import SimulatedCluster
from tests.simulation.collective import CheckedShare, collective_plan
from tests.simulation.collective_moments import Once
from tests.simulation.compute import Speed, TinyCompute
from tests.simulation.plans import Plan
from tests.simulation.run import simulate
from trainer_agent.waiting import to_its_end
from trireme_shared.protocol.lanes import step_seed
from trireme_shared.protocol.records import Mode

EVERY = 14  # versions: the first one that is evaluated comes when the usual time of a step is known
LATE_S = 0.8
LATE_LANE = 1  # that of lane 0 is computed by nobody else


class LateOwner:
    """The owner of a lane is late in the step before an evaluated version. A spare is killed once all others
    have made the step behind that version."""

    def __init__(self, plan: Plan) -> None:
        self.late_seed: int | None = step_seed(plan.job.seed, EVERY - 1, LATE_LANE)
        self.spare_dies = Once(1)
        self.gradient, self.look_at = TinyCompute.gradient, SimulatedCluster.check_versions

    def patched_gradient(self) -> Any:
        owner = self

        async def gradient(self: TinyCompute, node: Any, lane: int, seed: int, *rest: Any) -> Any:
            if seed == owner.late_seed:
                owner.late_seed = None
                await to_its_end(asyncio.sleep(LATE_S))
            return await owner.gradient(self, node, lane, seed, *rest)

        return replaced(TinyCompute, "gradient", gradient)

    def patched_look(self) -> Any:
        def look(cluster: SimulatedCluster) -> None:
            self.look_at(cluster)
            stores = {
                node.name: node.share.store
                for node in cluster.nodes.values()
                if node.alive and isinstance(node.share, CheckedShare) and node.share.store is not None
            }
            spares = [name for name, store in stores.items() if not store.own]
            in_use = sorted(store.in_use for store in stores.values() if store.own)
            if self.spare_dies.left and spares and in_use == [EVERY - 1, *[EVERY + 1] * (len(in_use) - 1)]:
                self.spare_dies.kill(cluster, cluster.nodes[spares[-1]])

        return replaced(SimulatedCluster, "check_versions", look)


def plan_of_it(seed: int) -> Plan:
    drawn = collective_plan(seed)
    job = replace(drawn.job, files=(48, 40), task_records=4, minibatch=1, lanes=4, epochs=1, tables=False)
    settings: Any = {"trainers": 5, "masters": 1, "faults": (), "slow": 1.0, "stragglers": True}
    settings |= {"checkpoint_every": None, "evaluate": True, "evaluate_every": EVERY}
    steady = replace(STEADY, low_s=0.001, high_s=0.01)
    return replace(drawn, job=job, speed=Speed(0.02, 0.03), conditions=steady, **settings)


@pytest.mark.parametrize("seed", [0, 1])
def test_an_evaluated_version_that_an_owner_reaches_after_the_others_have_left_it_is_saved(seed):
    """The others copied their parts in the generation before, in which that owner had its mean gradients."""
    plan, said = plan_of_it(seed), list[str]()
    owner = LateOwner(plan)
    with owner.patched_gradient(), owner.patched_look(), replaced(collective, "STORAGE_S", (0.0,)):
        outcome = simulate(seed, Mode.SYNC, said.append, plan)
    assert not outcome.violations, f"\n  {outcome}"
    assert not owner.spare_dies.left
    assert [line for line in said if "evaluation_begun" in line]
    assert not [line for line in said if "evaluation_left_out" in line]
