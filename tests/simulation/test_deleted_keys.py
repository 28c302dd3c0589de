"""The key of a member is deleted, and its lease is never revoked: whoever evicts it may die in between. The
member starts again, and the job goes on."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.equipment.cluster.network import STEADY
from tests.equipment.replaced import replaced
from tests.equipment.virtual_loop import Process
from tests.simulation.cluster import SimulatedCluster
from tests.simulation.plans import Plan, plan_of
from tests.simulation.run import Outcome, simulate
from trireme_shared.platform.membership.directory import OwnKey
from trireme_shared.protocol.records import Mode, Phase

BOUND_S = 30.0


def deleted(kind: str, mode: Mode) -> Outcome:
    """A job of two members of each kind, one of which loses its key once it runs."""
    drawn = plan_of(3, mode)
    few = replace(drawn, trainers=2, pservers=2, masters=1, independent=False, skip_after_s=None)
    plan = replace(few, faults=(), requests=(), conditions=STEADY, slow=1.0)
    opened = SimulatedCluster.open

    async def delete(cluster: SimulatedCluster) -> None:
        kinds = cluster.keys.pservers if kind == "pserver" else cluster.keys.trainers
        # a parameter server's before the first checkpoint, which begins as soon as the job runs
        begun, look_s = {
            "pserver": ((Phase.RUNNING, Phase.CHECKPOINTING), 0.001),
            "trainer": ((Phase.RUNNING,), 0.02),
        }[kind]
        while cluster.state.phase not in begun or len(cluster.simulated.names(kinds)) < 2:
            await asyncio.sleep(look_s)
        await cluster.etcd.delete(kinds + min(cluster.simulated.names(kinds)))

    def open_and_delete(self: SimulatedCluster) -> None:
        opened(self)
        self.processes["operator"] = Process("operator")
        self.processes["operator"].spawn(delete(self))

    with (
        replaced(SimulatedCluster, "open", open_and_delete),
        replaced(Plan, "bound_s", property(lambda _: BOUND_S)),
    ):
        return simulate(3, mode, plan=plan)


@pytest.mark.parametrize("kind", ["pserver", "trainer"])
@pytest.mark.parametrize("mode", list(Mode))
def test_a_member_whose_key_was_deleted_starts_again(mode: Mode, kind: str) -> None:
    outcome = deleted(kind, mode)
    assert not outcome.violations, f"\n  {outcome}"
    assert outcome.started > 5


def test_without_a_look_at_its_own_key_it_is_waited_for_in_vain() -> None:
    with replaced(OwnKey, "look", lambda _: None):
        outcome = deleted("pserver", Mode.ASYNC)
    assert "waiting for 1 of 2 parameter servers" in outcome.violations[0], outcome.violations
