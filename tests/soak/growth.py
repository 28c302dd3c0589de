"""Whether processes that live long, and etcd, hold more and more.

a fault is over ─► file descriptors, threads and memory of every process, keys of the job
    ─► at the end the last third is compared with the first
"""

from __future__ import annotations

import os
import socket
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import psutil

from tests.soak.run import Run, SoakError
from trireme.cli.chaos import ANSWER_S, JobProbe, alive
from trireme_shared.protocol.errors import PeerError

FEWEST = 9  # samples of one process that say something
HISTORY = ("events/", "operations/", "tasks/", "checkpoints/")  # kept up to numbers of their own
MIB = 1 << 20


@dataclass(frozen=True)
class Holds:
    """`bytes`: resident memory that is its own. `kinds`: descriptors of each kind, see `kinds_of`."""

    generation: int
    descriptors: int
    threads: int
    bytes: int
    kinds: Counter[str] = field(default_factory=Counter)


class Growth:
    """Of a job with so many trainers and lanes. `sample` after each fault; `check` raises SoakError."""

    def __init__(self, trainers: int = 4, lanes: int = 4) -> None:
        self._most_memories = most_memories(trainers, lanes)
        self._holds: dict[tuple[str, int], list[Holds]] = defaultdict(list)
        self.keys: list[int] = []

    async def sample(self, run: Run) -> None:
        async with JobProbe(run.folder) as probe:
            try:
                found = await probe.etcd.range(
                    probe.keys.prefix, prefix=True, keys_only=True, timeout_s=ANSWER_S
                )
                await probe.directory.wait_for(
                    lambda view: view.state is not None, ANSWER_S, "the job's state"
                )
            except PeerError:
                return
            names = [each.key.removeprefix(probe.keys.prefix) for each in found.kvs]
            self.keys.append(sum(not name.startswith(HISTORY) for name in names))
            generation = probe.state.generation
        for name, pid in alive(run.folder).items():
            try:
                process = psutil.Process(pid)
                with process.oneshot():
                    memory = process.memory_info()
                    kinds = kinds_of(pid)
                    own = memory.rss - memory.shared
                    held = Holds(generation, kinds.total(), process.num_threads(), own, kinds)
            except (psutil.Error, OSError):
                continue
            self.add(name, pid, held)

    def add(self, name: str, pid: int, held: Holds) -> None:
        self._holds[name, pid].append(held)

    def check(self) -> None:
        """Of trainers: more than a few threads, and descriptors beside those of shared memory, of which there
        are `most_memories`; more than a fifth of the memory. Of etcd: more keys than members come and go
        with, besides the history of the job. A master that begins to lead holds more, so masters are only
        told."""
        trainers = [(name, holds) for name, holds in self._long() if name.startswith("trainer")]
        grown = [text for name, holds in trainers if (text := _grown(name, holds, self._most_memories))]
        if len(self.keys) >= FEWEST and (first := _first(self.keys)) + 20 < (last := _last(self.keys)):
            grown.append(f"etcd: {first:g} keys at first, {last:g} in the end")
        if grown:
            raise SoakError("; ".join(grown))

    def __str__(self) -> str:
        lines = [_line(name, holds) for name, holds in self._long()]
        if len(self.keys) >= FEWEST:
            lines.append(f"etcd: {_first(self.keys):g} keys at first, {_last(self.keys):g} in the end")
        return "\n".join(lines)

    def _long(self) -> list[tuple[str, list[Holds]]]:
        return [
            (name, holds)
            for (name, _), holds in self._holds.items()
            if len(holds) >= FEWEST and name != "etcd"
        ]


def kinds_of(pid: int) -> Counter[str]:
    """How many descriptors of each kind a process has: `memfd`, `tcp`, `unix`, `eventfd`, `pipe`, `file`, ...
    Raises OSError, psutil.Error."""
    families = {each.fd: each.family for each in psutil.Process(pid).net_connections("all")}
    found: Counter[str] = Counter()
    for name in os.listdir(folder := f"/proc/{pid}/fd"):  # noqa: PTH208
        try:
            link = os.readlink(f"{folder}/{name}")  # noqa: PTH115
        except FileNotFoundError:
            continue  # closed meanwhile
        family = families.get(int(name))
        found[_kind(link) if family is None else "unix" if family == socket.AF_UNIX else "tcp"] += 1
    return found


def _kind(link: str) -> str:
    """`anon_inode:[eventfd]`, `socket:[17]`, `pipe:[17]`, `/memfd:name (deleted)`, or a path."""
    if link.startswith("/"):
        return "memfd" if link.startswith("/memfd:") else "device" if link.startswith("/dev/") else "file"
    kind, _, what = link.partition(":")
    return what.strip("[]") if kind == "anon_inode" else kind


def most_memories(trainers: int, lanes: int) -> int:
    """Descriptors of shared memory that a trainer of a collective job may have. It has a region for its share
    and one for each node of gradients that was ever in use at once: as many as it had lanes, so more of them
    after it was alone for a while. Each of its own has two descriptors (one is mmap's), one of another
    trainer that it has mapped has one."""
    regions = 1 + lanes
    return 2 * regions + (trainers - 1) * regions


def _grown(name: str, holds: Sequence[Holds], most: int) -> str:
    _, threads, sizes = _columns(holds)
    memories = [each.kinds["memfd"] for each in holds]
    others = [each.descriptors - each.kinds["memfd"] for each in holds]
    more = (
        _last(others) > _first(others) + 12
        or _last(memories) > most
        or _last(threads) > _first(threads) + 8
        or _last(sizes) > 1.2 * _first(sizes) + 32 * MIB
    )
    return _line(name, holds) if more else ""


def _line(name: str, holds: Sequence[Holds]) -> str:
    descriptors, threads, sizes = _columns(holds)
    rebuilds = holds[-1].generation - holds[0].generation
    return (
        f"{name}: {rebuilds} generations, descriptors {_first(descriptors):g} -> {_last(descriptors):g}, "
        f"threads {_first(threads):g} -> {_last(threads):g}, MiB {_first(sizes) / MIB:.0f} -> "
        f"{_last(sizes) / MIB:.0f}"
        f"{_of_which(holds)}"
    )


def _of_which(holds: Sequence[Holds]) -> str:
    """The kinds of descriptors of which there are not as many as at first."""
    found = []
    for kind in sorted({kind for each in holds for kind in each.kinds}):
        counts = [each.kinds[kind] for each in holds]
        if (first := _first(counts)) != (last := _last(counts)):
            found.append(f"{kind} {first:g} -> {last:g}")
    return f" ({', '.join(found)})" if found else ""


def _columns(holds: Sequence[Holds]) -> tuple[list[int], list[int], list[int]]:
    return (
        [each.descriptors for each in holds],
        [each.threads for each in holds],
        [each.bytes for each in holds],
    )


def _first(numbers: Sequence[int]) -> float:
    return statistics.median(numbers[: len(numbers) // 3])


def _last(numbers: Sequence[int]) -> float:
    return statistics.median(numbers[-(len(numbers) // 3) :])
