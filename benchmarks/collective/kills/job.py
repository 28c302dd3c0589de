"""What the others lose by one of four trainers that is killed or frozen at a random instant, again and again,
and whether all have the bits of a job that was left alone.

    all four have lanes ─ a random time ─► a signal to one ─► a generation without it
    SIGKILL     ─► four have lanes again ─ ...
    SIGSTOP     ─► the others go on ─► SIGCONT ─► four have lanes again ─ ...

A thawed trainer is a member again after 0.1 s, which is a generation of its own: it must not come while the
others recover from the freeze. With `spares` beside the four, one of them takes over at once, so that the
next kill need not wait for the dead one's replacement.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import shutil
import signal
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.collective.endless import endless
from benchmarks.collective.exchange import progress
from benchmarks.collective.kills.told import History, all_saved, equal_at_the_end, lines_of
from trireme.launch.cluster import LocalCluster
from trireme.launch.processes import Child
from trireme.launch.supervision import ClusterSettings
from trireme_shared.platform.runtime import clock

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "told_versions.py"
MEMBERS = 4
LEASE_S = 2.0  # of jobs in which members are frozen
MINIBATCH_S = 0.02  # longer, or four trainers on few processors would leave none to a replacement that starts
PAUSE_S = 0.5  # a fault comes within it, once all have lanes
LOOK_S, SEEN_S, LIMIT_S = 0.005, 0.05, 240.0


@dataclass(frozen=True)
class Fault:
    """`at`: the moment of the signal; `survivors`: the processes with lanes that did not get it."""

    at: float
    survivors: Sequence[int]


@dataclass(frozen=True)
class Found:
    """`seconds`: of each fault, until all survivors had finished the next step that began after it, None:
    never. `disagreed`: faults after which a trainer had another version than the undisturbed job, or one that
    it had before. `equal`: trainers, of MEMBERS at the end, whose parameters are torch.equal to the
    undisturbed job's. `versions`: steps of the job; `digests`: that were compared. `ended`: why the job had
    to be ended before all faults; empty: it had not."""

    seconds: Sequence[float | None]
    disagreed: int
    equal: int
    versions: int
    digests: int
    took: float
    ended: str = ""

    @property
    def right(self) -> bool:
        return not self.ended and not self.disagreed and self.equal == MEMBERS


async def measure(
    count: int,
    folder: Path,
    *,
    frozen: bool = False,
    spares: int = 0,
    seed: int = 1,
    within_s: float = math.inf,
) -> Found:
    """`count` faults, or as many as begin within that time."""
    began, told = clock.monotonic(), folder / "told"
    more = {"lease_ttl_s": LEASE_S} if frozen else {}
    spec = endless(SCRIPT, folder / "run", MEMBERS + spares, MEMBERS, **more)
    chance, faults, ended = random.Random(seed), list[Fault](), ""
    environment = {"TOLD": str(told), "TOLD_PAUSE_S": str(MINIBATCH_S)}
    async with LocalCluster(spec, folder / "run", ClusterSettings(environment=environment)) as cluster:
        await _until(lambda: _whole(cluster, 0), "all trainers")
        await asyncio.sleep(PAUSE_S)
        try:
            for number in range(count):
                if clock.monotonic() - began > within_s:
                    break
                await asyncio.sleep(PAUSE_S * chance.random())
                await _harm(cluster, chance, told, faults, frozen=frozen)
                if not spares:  # else a kill may come while the others still recover from the one before
                    pids = lambda: [child.pid for child in _owners(cluster)]  # noqa: E731
                    await _until(_go_on(told, pids, MEMBERS), "a step of all trainers", SEEN_S)
                if number % 10 == 9:
                    progress(f"{number + 1} of {count}, {clock.monotonic() - began:.0f} s")
            owners, end = [child.pid for child in _owners(cluster)], clock.monotonic()
            await _until(
                lambda: bool(all_saved(told, owners, end)), "parameters that all have saved", PAUSE_S
            )
        except TimeoutError as error:  # what was told until then still counts
            logs = shutil.copytree(cluster.folder / "logs", Path(tempfile.mkdtemp(prefix="kills-")) / "logs")
            ended = f"ended after {len(faults)} of {count}: {error}; {cluster!r}; logs: {logs}"
        took = clock.monotonic() - began
    lines = lines_of(told)
    _, newest_digest = max(own[-1] for own in lines.values() if own)
    alone = await _left_alone(
        folder / "alone", newest_digest, len({d for own in lines.values() for _, d in own})
    )
    history = History.of(lines, alone)
    edges = [*(fault.at for fault in faults), float("inf")]
    wrong = [history.wrong(first, last) for first, last in itertools.pairwise(edges)]
    equal = 0 if ended else equal_at_the_end(told, owners, folder / "alone" / "told", end)[0]
    seconds = [history.next_step_s(fault.at, fault.survivors) for fault in faults]
    newest = max(version or 0 for own in history.versions.values() for _, version in own)
    return Found(seconds, sum(map(bool, wrong)), equal, newest, sum(map(len, lines.values())), took, ended)


async def _harm(
    cluster: LocalCluster, chance: random.Random, told: Path, faults: list[Fault], *, frozen: bool
) -> None:
    """The fault is added at once, whatever becomes of the job."""
    owners = _owners(cluster)
    victim, before = chance.choice(owners), _generation(cluster)
    pid, survivors = victim.pid, [child.pid for child in owners if child is not victim]
    faults.append(Fault(clock.monotonic(), survivors))
    victim.send(signal.SIGSTOP if frozen else signal.SIGKILL)
    if frozen:
        await _until(lambda: victim not in _owners(cluster), "a generation without the frozen trainer")
        await _until(_go_on(told, lambda: survivors, len(survivors)), "a step of the others", SEEN_S)
        if victim.alive and victim.pid == pid:
            victim.send(signal.SIGCONT)
    await _until(lambda: _whole(cluster, before), "all trainers again")


def _go_on(told: Path, pids: Callable[[], Sequence[int]], number: int) -> Callable[[], bool]:
    """Whether these are so many, and all have begun with two versions since this was called."""
    before = _counts(told, pids())

    def there() -> bool:
        now = _counts(told, pids())
        return len(now) == number and all(count >= before.get(pid, 0) + 2 for pid, count in now.items())

    return there


def _counts(told: Path, pids: Sequence[int]) -> dict[int, int]:
    """How many versions each process has begun with."""
    files = {pid: told / str(pid) for pid in pids}
    return {pid: file.read_text().count("\n") if file.exists() else 0 for pid, file in files.items()}


def _whole(cluster: LocalCluster, beyond: int) -> bool:
    listed = cluster.directory.trainers
    return (
        beyond < listed.generation == _generation(cluster)
        and sum(child.alive for child in _owners(cluster)) == MEMBERS
    )


def _owners(cluster: LocalCluster) -> list[Child]:
    """Of lanes. A member's name is its process's and a part that no other one has."""
    names = (name.rpartition("-")[0] for name in cluster.directory.trainers.owners)
    return [cluster.children[name] for name in names if name in cluster.children]


def _generation(cluster: LocalCluster) -> int:
    return cluster.directory.state.generation if cluster.directory.state is not None else 0


async def _until(
    there: Callable[[], bool], what: str, look_s: float = LOOK_S, limit_s: float = LIMIT_S
) -> None:
    deadline = clock.monotonic() + limit_s
    while not there():
        if clock.monotonic() > deadline:
            raise TimeoutError(f"waited {limit_s:g} s for {what}")
        await asyncio.sleep(look_s)


async def _left_alone(folder: Path, last: str, most: int) -> list[str]:
    """Digests of the versions of a job of one trainer, in order, until `last` is among them, or `most` and
    some more are there."""
    spec = endless(SCRIPT, folder / "run", 1, MEMBERS)
    told = folder / "told"

    def digests() -> list[str]:
        return [digest for own in (lines_of(told) if told.exists() else {}).values() for _, digest in own]

    def there() -> bool:
        found = digests()
        return last in found or len(found) > most + MEMBERS

    async with LocalCluster(spec, folder / "run", ClusterSettings(environment={"TOLD": str(told)})):
        limit_s = LIMIT_S + most * MINIBATCH_S
        await _until(there, f"the version with digest {last} of the job that is left alone", PAUSE_S, limit_s)
        return digests()
