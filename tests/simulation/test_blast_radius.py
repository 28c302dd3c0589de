"""An error raised in any task of any long-lived group ends at most what the table in ARCHITECTURE.md says: of
ours, of the system, of a library, an overflow, a wait that somebody else has cancelled.

Each run plays one error of each task's; `pytest -m soak` plays all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from tests.equipment.virtual_loop import Process, run_virtually
from tests.equipment.waiting import until
from tests.master_service.many_jobs import Jobs, job_of, leads
from tests.simulation.cluster import SimulatedCluster
from tests.simulation.compute import Speed
from tests.simulation.plans import Plan, plan_of
from tests.simulation.run import Outcome, simulate
from tests.simulation.strikes import ERRORS, names_in, strike, tasks_of
from trireme_shared.protocol.records import Mode
from trireme_shared.protocol.records.cluster import Standing

AT_S = 2.5  # the members have come, and train
LOOK_S = 0.1

#: Tasks of one step or one request: an error of theirs is one of whoever waits for it.
CALLS = {
    *("EventFeed.next", "Master.acquire_task", "Master.report_metrics", "Master.complete_task"),
    *("LaneReader._ahead", "Pulls.pull_from", "Pushes._push", "StepRepair.contribute", "AsyncLoop._ahead"),
    *("LaneHelper.help", "_Stream.__anext__"),
    "Agent.run",  # the process itself, while it leaves
    *("_watch", "MasterWriter._finish", "ClusterTerm._run_job", "CheckedPserver.push", "CheckedPserver.pull"),
}


def cases(*groups: str) -> Iterator[Any]:
    """Each task of the table with each error; one of them is played always."""
    for number, name in enumerate(names_in(groups)):
        for place, kind in enumerate(ERRORS):
            always = place == number % len(ERRORS)
            yield pytest.param(name, kind, marks=[] if always else [pytest.mark.soak], id=f"{name}-{kind}")


# ------------------------------------------------------------ the leader of a cluster

LEADER = ("leader", "lease", "job's term")
NOT_THERE = {"SeriesKeeper.run", "PauseRunner.run"}  # these jobs keep no metrics and save nothing
NAMES = ("a", "b", "c")


@dataclass
class Led:
    """What a leader did while one of its tasks was struck. `terms`: of the cluster; `job_terms`: of job a."""

    struck: bool = False
    process_ended: bool = False
    seen: set[str] = field(default_factory=set)
    terms: set[int] = field(default_factory=set)
    job_terms: set[int] = field(default_factory=set)
    standings: dict[str, Standing] = field(default_factory=dict)


async def lead(name: str = "", kind: str = "") -> Led:
    """Three jobs, of which the first one's tasks are struck if several have one of that name."""
    jobs, process, stopping = Jobs(tasks=20, task_s=0.4), Process("leader"), asyncio.Event()
    master, told = jobs.master(), Led()
    running = process.spawn(master.run(stopping))

    def note() -> None:
        told.seen |= tasks_of(process).keys() if not name else set()
        if (term := master.current_term) is not None:
            told.terms.add(term.lock.term)
            if "a" in term.jobs and (led := term.jobs["a"].master.current_term) is not None:
                told.job_terms.add(led.number)

    def done() -> bool:
        note()
        due = not told.struck and asyncio.get_running_loop().time() > AT_S
        if due and (found := tasks_of(process).get(name)):
            strike(found[0], kind)
            told.struck = True
        return running.done() or (
            leads(master) and all(job.standing.final for job in master.state.jobs.values())
        )

    async with jobs.pool(6, 3):
        await until(lambda: leads(master), "a leader")
        for each in NAMES:
            await master.create_job(job_of(each, {"max_trainers": 2}), None)
        async with asyncio.timeout(900):
            while not done():
                await asyncio.sleep(LOOK_S)
    told.process_ended = running.done()
    if not running.done():
        told.standings = {job.job: job.standing for job in master.state.jobs.values()}
        stopping.set()
    await asyncio.wait([running])
    return told


def test_the_table_has_each_task_of_a_leader() -> None:
    led = run_virtually(lead)
    assert led.standings == dict.fromkeys(NAMES, Standing.COMPLETED)
    assert led.seen - CALLS <= names_in(LEADER).keys(), "give these a row in ARCHITECTURE.md"


@pytest.mark.parametrize(("name", "kind"), list(cases(*LEADER)))
def test_an_error_in_a_task_of_a_leader_ends_no_job(name: str, kind: str) -> None:
    if name in NOT_THERE:
        pytest.skip("the master of a run has it, below")
    ends = names_in(LEADER)[name]
    led = run_virtually(lead, name, kind)
    assert led.struck, f"{name} was not there to be struck: take it out of the table"
    assert not led.process_ended
    failed = {"a": Standing.FAILED} if kind == "ours" and ends.startswith("the job's term") else {}
    assert led.standings in ({**dict.fromkeys(NAMES, Standing.COMPLETED), **end} for end in ({}, failed))
    if not ends.startswith("the leader's term"):
        assert len(led.terms) == 1, f"the leader's term has ended; the table says: {ends}"
    if ends.startswith("nothing"):
        assert len(led.job_terms) == 1, f"the job's term has ended; the table says: {ends}"


# ------------------------------------------------------------ the members of a job

MEMBERS = {
    "master": ("lease", "job's term"),
    "pserver": ("parameter server",),
    "trainer": ("trainer",),
}


def calm(mode: Mode, independent: bool) -> Plan:
    """Nothing but the strike happens. Checkpoints are made, by each parameter server alone if
    `independent`."""
    plan = plan_of(2, mode).undisturbed()
    job = replace(plan.job, files=(16, 16, 12), task_records=4, minibatch=2, epochs=2, push_every=1)
    return replace(
        plan,
        job=job,
        speed=Speed(0.2, 0.25),
        trainers=2,
        pservers=2,
        masters=1,
        checkpoint_every=4 if mode is Mode.SYNC else None,
        checkpoint_every_s=None if mode is Mode.SYNC else 1.0,
        independent=independent,
        slow=1.0,
    )


PLANS = {
    "sync": calm(Mode.SYNC, independent=False),
    "async": calm(Mode.ASYNC, independent=True),
    "paused": calm(Mode.ASYNC, independent=False),
}


@dataclass
class Striker:
    """`prepare` a cluster: once its job trains, a task of a process of that kind is struck."""

    kind: str
    name: str
    error: str
    struck: str = ""
    seen: set[str] = field(default_factory=set)
    started: dict[str, int] = field(default_factory=dict)

    def prepare(self, cluster: SimulatedCluster) -> None:
        follow = cluster.every_look

        def look(cluster: SimulatedCluster) -> None:
            follow(cluster)
            for node in cluster.nodes.values():
                if node.kind == self.kind and node.alive:
                    self._look(node.process)
            self.started = {node.name: node.incarnations for node in cluster.nodes.values()}

        cluster.every_look = look

    def _look(self, process: Process) -> None:
        if self.struck or asyncio.get_running_loop().time() < AT_S:
            return
        found = tasks_of(process)
        self.seen |= found.keys()
        if self.name in found:
            strike(found[self.name][0], self.error)
            self.struck = process.name


def play(plan: Plan, striker: Striker) -> Outcome:
    return simulate(2, plan.job.mode, plan=plan, prepare=striker.prepare)


def broken_by(outcome: Outcome, striker: Striker) -> list[str]:
    """Without the end of the process that was struck itself."""
    return [line for line in outcome.violations if not line.startswith(f"{striker.struck} crashed: ")]


@pytest.mark.parametrize("kind", MEMBERS)
@pytest.mark.parametrize("plan", PLANS)
def test_the_table_has_each_task_of_a_member(kind: str, plan: str) -> None:
    striker = Striker(kind, "", "")
    assert play(PLANS[plan], striker).violations == []
    assert striker.seen - CALLS <= names_in(MEMBERS[kind]).keys(), "give these a row in ARCHITECTURE.md"


def member_cases() -> Iterator[Any]:
    for kind, groups in MEMBERS.items():
        for case in cases(*groups):
            yield pytest.param(kind, *case.values, marks=case.marks, id=f"{kind}-{case.id}")


@pytest.mark.parametrize(("kind", "name", "error"), list(member_cases()))
def test_an_error_in_a_task_of_a_member_ends_at_most_its_process(kind: str, name: str, error: str) -> None:
    """The bits of the job are as ever."""
    for plan in PLANS.values():
        striker = Striker(kind, name, error)
        outcome = play(plan, striker)
        if not striker.struck:
            continue
        assert broken_by(outcome, striker) == []
        others = {
            node: count for node, count in striker.started.items() if node != striker.struck.partition("#")[0]
        }
        assert set(others.values()) == {1}, f"others were started again: {striker.started}"
        if names_in(MEMBERS[kind])[name].startswith("nothing"):
            assert striker.started[striker.struck.partition("#")[0]] == 1
        return
    raise AssertionError(f"{name} was not there to be struck: take it out of the table")
