"""How many parameter servers a job gets by `--pservers auto`, the default, and how many threads each of them steps blocks with.

min(cores / 2, bytes of the parameters / 32 MiB) --> parameter servers        cores / members on this host --> threads

Both are at least 1. Neither changes a bit of the result.
"""

from __future__ import annotations

import os

from shared.records import JobSpec
from trireme.launch.model_facts import Facts, parameter_bytes

BYTES_EACH = 32 << 20
MOST = 128


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def pservers_for(model: Facts | None, cores: int) -> int:
    """`model` None (--no-check): 1."""
    size = 0 if model is None else parameter_bytes(model)
    return max(1, min(cores // 2, size // BYTES_EACH, MOST))


def threads_for(spec: JobSpec, cores: int) -> int:
    """Of each parameter server, if all members are on this host: so many that together they have no more threads than cores."""
    return max(1, cores // (spec.pservers + spec.trainers * spec.threads_per_trainer))
