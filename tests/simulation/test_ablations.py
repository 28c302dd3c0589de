"""Each safeguard, switched off, must be missed: the simulation finds a broken promise within so many
seeds."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace

import pytest

from tests.equipment.cluster.network import STEADY
from tests.equipment.replaced import replaced
from tests.simulation.ablations import ABLATIONS, no_copy_on_write, no_previous_version
from tests.simulation.cluster import SimulatedCluster
from tests.simulation.compute import Speed
from tests.simulation.plans import Fault, FaultKind, Job, Plan, plan_of
from tests.simulation.run import Outcome, simulate
from trireme_shared.protocol.records import Dispatch, Mode

# (mode, dispatch, chance that a request is doubled in a storm, first seed known to show it); a seed may
# change its meaning when the product changes, so more are tried; 0: the seed's own conditions
SHOWN = {
    "term": (Mode.ASYNC, Dispatch.MASTER, 0.2, 6),
    "commit chain": (Mode.ASYNC, Dispatch.ETCD, 0.0, 0),
    "attempt": (Mode.SYNC, Dispatch.ETCD, 0.3, 0),
    "generation": (Mode.SYNC, Dispatch.MASTER, 0.2, 27),
    "tree": (Mode.SYNC, Dispatch.MASTER, 0.6, 39),
    "ledger": (Mode.ASYNC, Dispatch.MASTER, 0.0, 15),
    "saved ledger": (Mode.ASYNC, Dispatch.MASTER, 0.0, 10),
    "results": (Mode.SYNC, Dispatch.MASTER, 0.0, 20),
    "order of steps": (Mode.SYNC, Dispatch.MASTER, 0.0, 54),
    "lanes without ids": (Mode.SYNC, Dispatch.MASTER, 0.0, 0),
    "rows before the ledger": (Mode.ASYNC, Dispatch.MASTER, 0.0, 1),
    "pushes without rows": (Mode.ASYNC, Dispatch.MASTER, 0.0, 1),
    "rows in checkpoints": (Mode.SYNC, Dispatch.MASTER, 0.0, 20),
    "wait for rows": (Mode.SYNC, Dispatch.MASTER, 0.0, 0),
    "rows of the version before": (Mode.SYNC, Dispatch.MASTER, 0.0, 94),
    "roll-back of rows": (Mode.SYNC, Dispatch.MASTER, 0.0, 1),
    "kept chains": (Mode.SYNC, Dispatch.MASTER, 0.0, 4),
}
OF_ROWS = {
    "lanes without ids",
    "rows before the ledger",
    "pushes without rows",
    "rows in checkpoints",
    "wait for rows",
    "rows of the version before",
    "roll-back of rows",
    "kept chains",
}
STORM = replace(STEADY, high_s=0.05, slow=0.03, slow_s=2.0, lose_request=0.01, lose_reply=0.02)
MOST_SEEDS = 100
ENOUGH_S = 5.0
"""Of virtual time, for a short job; without the safeguard it would take for ever."""


def test_every_ablation_is_tried():
    assert SHOWN.keys() == ABLATIONS.keys()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", list(SHOWN))
def test_the_simulation_misses_the_safeguard(name):
    mode, dispatch, doubled, first = SHOWN[name]

    def outcome(seed: int) -> Outcome:
        drawn = plan_of(seed, mode, dispatch)
        if name in OF_ROWS:
            drawn = replace(drawn, skip_after_s=None, job=replace(drawn.job, tables=True))
        return simulate(
            seed, mode, plan=replace(drawn, conditions=replace(STORM, double=doubled)) if doubled else drawn
        )

    for seed in range(first, first + MOST_SEEDS):
        with ABLATIONS[name]():
            broken = outcome(seed).violations
        # a storm of doubled requests can break other promises as well
        if broken and not outcome(seed).violations:
            return
    pytest.fail(
        f"{MOST_SEEDS} seeds ran without the safeguard {name!r}, and no promise was broken for lack of it"
    )


def test_without_the_chain_of_commits_a_task_is_given_to_two_trainers():
    with ABLATIONS["commit chain"]():
        broken = [
            line
            for seed in range(4)
            for line in simulate(seed, Mode.ASYNC, dispatch=Dispatch.ETCD).violations
        ]
    assert any(
        re.match(r"task \d+ is at (\S+) \(attempt \d+\) and given to (?!\1)", line) for line in broken
    ), broken


def torn_once() -> Outcome:
    """Every trainer dies at the first moment at which blocks are of different versions; they are started
    again at once."""
    short = plan_of(0, Mode.SYNC)
    job = replace(short.job, epochs=1)
    short = replace(
        short, job=job, speed=Speed(0.01, 0.02), conditions=STEADY, faults=(), requests=(), slow=1.0
    )
    check, torn = SimulatedCluster.check_versions, []

    def checked(self: SimulatedCluster) -> None:
        check(self)
        versions = {state.version for _, store in self.stores() for state in store.blocks.values()}
        if len(versions) > 1 and not torn:
            torn.append(versions)
            for node in self.nodes.values():
                if node.kind == "trainer" and node.alive:
                    self.kill(node)
                    self.report_dead(node.name)
                    node.due_s = asyncio.get_running_loop().time() + 0.1

    with (
        replaced(SimulatedCluster, "check_versions", checked),
        replaced(Plan, "bound_s", property(lambda _: ENOUGH_S)),
    ):
        outcome = simulate(0, Mode.SYNC, plan=short)
    assert torn, "no step was torn"
    return outcome


def test_without_the_version_before_a_torn_step_never_gets_whole_again():
    assert not torn_once().violations
    with no_previous_version():
        assert "not over 5 s after" in torn_once().violations[0]


def rolled_back_to_a_part_that_was_written_late() -> Outcome:
    """Each part waits on the storage for longer than a step takes, and a parameter server dies once some of
    them are written."""
    job = Job(Mode.SYNC, files=(24,), task_records=6, minibatch=4, lanes=4, epochs=3, seed=0, tables=True)
    death = Fault(7.0, FaultKind.KILL_PSERVER, lasts_s=0.1, noticed=True)
    plan = replace(
        plan_of(0, Mode.SYNC), job=job, trainers=2, pservers=2, masters=1, checkpoint_every=1, slow=1.0
    )
    plan = replace(
        plan, speed=Speed(0.2, 0.3), storage_s=1.0, conditions=STEADY, faults=(death,), requests=()
    )
    outcome = simulate(0, Mode.SYNC, plan=plan)
    assert outcome.timeline, "the job did not go back"
    return outcome


def test_without_copy_on_write_a_job_goes_back_to_rows_of_later_steps():
    assert not rolled_back_to_a_part_that_was_written_late().violations
    with no_copy_on_write():
        broken = rolled_back_to_a_part_that_was_written_late().violations
    assert any("final rows of the embedding table differ" in line for line in broken), broken
