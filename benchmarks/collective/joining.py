"""What a trainer that joins costs those that train: a job of `members` trainers is resized to one more and
back, again and again.

    alone ──── the process starts ─► its key ─ it gets parameters and momentum ─► it has them
         ─► it is counted in ──── resized back

    alone                 steps/s before
    from its key on       steps/s meanwhile, against those before
    counted in            the longest step, against those before

`apart`: everything that was there before has one processor, and the joiner, only it, has the other, as if it
were a machine of its own. Steps are told by the script (scripts/large_state.py), where their minibatches
begin: those of the trainers that were there before. The joiner's keys are watched, not asked for again and
again, which would take processor time of what is measured, and only meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import re
import statistics
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path

from benchmarks.collective.endless import endless
from benchmarks.collective.exchange import progress
from benchmarks.measurements import machine_ms
from benchmarks.spread import spread
from benchmarks.step_rows import Usage
from trireme.launch.cluster import LocalCluster
from trireme.view.job_address import client_of
from trireme_shared.platform.etcd.reading import read_record
from trireme_shared.platform.runtime import clock, ids
from trireme_shared.protocol.errors import DeadlineExceeded, PeerError
from trireme_shared.protocol.records import TrainerMember

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "large_state.py"
LOOK_S, LIMIT_S = 0.02, 300.0
BEFORE_S, AFTER_S = 6.0, 2.0
HEAD = (
    "| members before | MiB | joins | processors | seconds: asked for, process starts | imports, "
    "script | copying | following | is counted in | step ms before | slower meanwhile, % "
    "| longest step at the switch, in steps lost | cores before, meanwhile | members' CPU ms of a "
    "step before, meanwhile |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Join:
    """Seconds. `asked`: until its process started; `starting`: until its key was there; `copying`: until it
    had every block, `following`: until all were at one version. `cpu_ms`: of all members before, for each of
    their steps, before and meanwhile. `before`, `meanwhile`: of each step; `longest`: of the steps from the
    moment at which the joiner has everything. `cores`: of the machine, before and meanwhile."""

    asked: float
    starting: float
    copying: float
    following: float
    counted_in: float
    before: Sequence[float]
    meanwhile: Sequence[float]
    longest: float
    cores: tuple[float, float]
    cpu_ms: tuple[float, float]

    @property
    def slower(self) -> float:
        """By means, so that one long step counts as what it costs."""
        return statistics.mean(self.meanwhile) / statistics.mean(self.before) - 1.0

    @property
    def lost(self) -> float:
        usual = statistics.median(self.before)
        return (self.longest - usual) / usual


async def measure(members: int, mib: int, joins: int, folder: Path, *, apart: bool = False) -> list[Join]:
    processors = os.sched_getaffinity(0)
    first, *others = sorted(processors)
    if apart and not others:
        raise SystemExit("joins with a processor for the joiner need two processors, and there is one")
    try:
        os.sched_setaffinity(0, {first} if apart else processors)  # and so have all that are started
        return await _measure(members, mib, joins, folder, others[0] if apart else None)
    finally:
        os.sched_setaffinity(0, processors)


async def _measure(members: int, mib: int, joins: int, folder: Path, processor: int | None) -> list[Join]:
    """`processor`: of the joiner alone."""
    os.environ["STATE_MIB"] = str(mib)
    run = folder / f"joining-{members}-{processor}"
    lanes = 1 << (members * (members + 1) - 1).bit_length()  # about as many for each, before and after
    spec = endless(SCRIPT, run, members, lanes, global_batch_size=16 * lanes)
    found: list[Join] = []
    async with LocalCluster(spec, run) as cluster, asyncio.timeout(LIMIT_S * (joins + 1)):
        await _counted_in(cluster, members)
        for number in range(joins):
            found.append(await _join(cluster, members, folder / "begun", processor))
            progress(
                f"{members} members, join {number + 1}/{joins}: {found[-1].slower:+.1%}, "
                f"{found[-1].lost:.2f} steps"
            )
            await _resize(cluster, members)
            await _counted_in(cluster, members)
    return found


async def _join(cluster: LocalCluster, members: int, folder: Path, processor: int | None) -> Join:
    await asyncio.sleep(AFTER_S)  # whatever went before is over
    names, quiet, busy = set(await _trainers(cluster)), clock.monotonic(), machine_ms()
    pids = _running(cluster)
    used = Usage({"members": pids})
    await asyncio.sleep(BEFORE_S)
    quiet_use = Usage({"members": pids}).since(used)
    began, cores = clock.monotonic(), (machine_ms() - busy) / 1000 / BEFORE_S
    asked = asyncio.create_task(_resize(cluster, members + 1))
    while not (there := set(_running(cluster)) - set(pids)):
        await asyncio.sleep(LOOK_S / 4)
    ((pid,), started) = there, clock.monotonic()
    if processor is not None:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {processor})
    name = (await _first(cluster, lambda member: member.trainer not in names)).trainer
    registered, busy = clock.monotonic(), machine_ms()
    used = Usage({"members": pids})
    await _first(cluster, lambda member: member.trainer == name and member.holds is not None)
    whole = clock.monotonic()
    busy_use = Usage({"members": pids}).since(used)
    meanwhile_cores = (machine_ms() - busy) / 1000 / (whole - registered)
    await _counted_in(cluster, members + 1)
    counted = clock.monotonic()
    await asked
    await asyncio.sleep(AFTER_S)
    while not (
        after := _between(steps := [_steps(folder / str(each)) for each in pids], whole, clock.monotonic())
    ):
        await asyncio.sleep(LOOK_S)
    copying = _copying_s(cluster.children[name.rpartition("-")[0]].log)
    before, meanwhile = _between(steps, quiet, began), _between(steps, registered, whole)
    return Join(
        started - began,
        registered - started,
        copying,
        whole - registered - copying,
        counted - whole,
        before,
        meanwhile,
        max(after),
        (cores, meanwhile_cores),
        (quiet_use.roles["members"] / len(before), busy_use.roles["members"] / len(meanwhile)),
    )


def _running(cluster: LocalCluster) -> list[int]:
    return [
        child.pid for name, child in cluster.children.items() if name.startswith("trainer") and child.alive
    ]


def _copying_s(log: Path) -> float:
    """As the joiner logged it, the last time."""
    return float(re.findall(r"copying_s\W+([0-9.]+)", log.read_text())[-1])


def _steps(file: Path) -> list[tuple[float, float]]:
    """(begin, end) of each step of a process: from its first minibatch to that of the next step."""
    lines = [line.split() for line in file.read_text().split("\n")[:-1]]
    firsts = [next(group) for _, group in groupby(lines, key=itemgetter(1))]
    return list(pairwise(float(moment) for moment, _ in firsts))


def _between(steps: Sequence[Sequence[tuple[float, float]]], first: float, last: float) -> list[float]:
    """How long those took that ended between two moments."""
    return [end - begin for each in steps for begin, end in each if first <= end <= last]


async def _trainers(cluster: LocalCluster) -> dict[str, TrainerMember]:
    keys = cluster.directory.keys
    found = (await cluster.etcd.range(keys.trainers, prefix=True)).kvs
    members = [read_record(TrainerMember, kv.key, kv.value) for kv in found if keys.is_trainer(kv.key)]
    return {member.trainer: member for member in members if member is not None}


async def _first(cluster: LocalCluster, found: Callable[[TrainerMember], bool]) -> TrainerMember:
    """The first trainer of which that holds, as soon as it does."""
    keys = cluster.directory.keys
    async with aclosing(cluster.etcd.watch(keys.trainers, prefix=True)) as batches:
        async for batch in batches:
            for kv in (*batch.kvs, *(event.kv for event in batch.events if event.type == "put")):
                member = read_record(TrainerMember, kv.key, kv.value) if keys.is_trainer(kv.key) else None
                if member is not None and found(member):
                    return member
    raise AssertionError("a watch has no end")


async def _counted_in(cluster: LocalCluster, number: int) -> None:
    while (
        cluster.directory.trainers.owner_count != number
        or cluster.directory.state is None
        or cluster.directory.trainers.generation != cluster.directory.state.generation
    ):
        await asyncio.sleep(LOOK_S)


async def _resize(cluster: LocalCluster, trainers: int) -> None:
    key = ids.new_id("join")
    job, made = cluster.spec.job, None
    while made is None or made.running:
        with suppress(PeerError, DeadlineExceeded):
            async with client_of(await cluster.master_url()) as client:
                made = await (
                    client.get_operation(job, made.operation_id, wait_s=1.0)
                    if made
                    else client.create_resize(job, key=key, trainers=trainers)
                )


def table(members: int, mib: int, joins: Sequence[Join], *, apart: bool = False) -> str:
    columns = [
        "the joiner has one" if apart else "shared",
        spread([join.asked for join in joins], 1),
        spread([join.starting for join in joins], 1),
        spread([join.copying for join in joins], 1),
        spread([join.following for join in joins], 1),
        spread([join.counted_in for join in joins]),
        spread([1000 * statistics.median(join.before) for join in joins], 0),
        spread([100 * join.slower for join in joins], 1),
        spread([join.lost for join in joins]),
        ", ".join(spread([join.cores[place] for join in joins]) for place in range(2)),
        ", ".join(spread([join.cpu_ms[place] for join in joins], 0) for place in range(2)),
    ]
    return f"| {members} | {mib} | {len(joins)} | {' | '.join(columns)} |"
