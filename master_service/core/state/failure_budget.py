"""How many errors of the user's code a job has had, against how many it may have."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.records.queue import FailureCounts


@dataclass
class FailureBudget:
    """`counts` is what etcd holds, so a new master goes on counting. `started`: the first step is committed."""

    allowed: int
    started: bool = False
    counts: FailureCounts = field(default_factory=FailureCounts)
