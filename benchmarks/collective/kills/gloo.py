"""The same with plain Gloo: of four processes in a loop of all_reduce one is killed, and each survivor tells
how many operations it finished.

A group is dropped at its first error, so that its neighbours hear of it. The processes are forked from this
one, which has torch imported already.
"""

from __future__ import annotations

import os
import random
import select
import signal
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from benchmarks.collective.kills.job import MEMBERS

ELEMENTS, TIMEOUT_S, LIMIT_S = 4096, 10.0, 60.0
RUNNING_S = 0.02  # a process is killed within that, once all have finished an operation


def disagreements(count: int, folder: Path, seed: int = 1) -> int:
    """After how many of `count` kills survivors had finished different numbers of operations."""
    import torch

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    chance, found = random.Random(seed), 0
    folder.mkdir()
    for number in range(count):
        found += len(set(_one(folder / str(number), chance))) > 1
    return found


def _one(store: Path, chance: random.Random) -> Sequence[int]:
    """One kill; operations that each survivor finished."""
    started, finished = os.pipe(), os.pipe()
    pids = []
    for rank in range(MEMBERS):
        if not (pid := os.fork()):
            _member(rank, store, started[1], finished[1])
        pids.append(pid)
    for _ in pids:
        if not select.select([started[0]], [], [], LIMIT_S)[0]:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            raise TimeoutError(f"waited {LIMIT_S:g} s for the first operation of {MEMBERS} processes")
        os.read(started[0], 1)
    time.sleep(RUNNING_S * chance.random())
    os.kill(victim := chance.choice(pids), signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)
    told = os.read(finished[0], 1 << 12).decode().splitlines()
    for descriptor in (*started, *finished):
        os.close(descriptor)
    assert len(told) == MEMBERS - 1, (victim, told)
    return [int(line) for line in told]


def _member(rank: int, store: Path, started: int, finished: int) -> None:
    """Never returns."""
    import torch
    from torch import distributed

    operations = 0
    try:
        limit = timedelta(seconds=TIMEOUT_S)
        file = distributed.FileStore(str(store), MEMBERS)
        group = distributed.ProcessGroupGloo(file, rank, MEMBERS, limit)
        tensor = torch.ones(ELEMENTS)
        while True:
            group.allreduce([tensor]).wait()
            if not operations:
                os.write(started, b".")
            operations += 1
    except RuntimeError:
        del group
        os.write(finished, f"{operations}\n".encode())
    finally:
        os.kill(os.getpid(), signal.SIGKILL)  # nothing of the parent is run at its end
