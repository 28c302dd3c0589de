"""How many trainers each job should have: its least number first, then priority, then weighted max-min fairness.

Of two jobs with the same priority the one with fewer trainers for its weight gets the next one, until it has all that are of use
to it. A job's least number is a floor, as in Hadoop's fair scheduler: it is not added to its fair share.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Claim:
    """`held`: what the job has now: of two that are equal, the one that has the trainer keeps it."""

    job: str
    least: int
    most: int
    priority: int
    weight: float
    held: int
    number: int


def shares(claims: Iterable[Claim], trainers: int) -> dict[str, int]:
    """Job -> trainers. The sum is more than `trainers` only if the least numbers alone are."""
    claims = list(claims)
    found = {claim.job: claim.least for claim in claims}
    left = trainers - sum(found.values())
    by_priority: dict[int, list[Claim]] = {}
    for claim in claims:
        by_priority.setdefault(claim.priority, []).append(claim)
    for priority in sorted(by_priority, reverse=True):
        level = by_priority[priority]
        if (wanted := sum(claim.most - claim.least for claim in level)) <= left:
            found.update((claim.job, claim.most) for claim in level)
            left -= wanted
            continue
        heap = [(_turn(claim, claim.least), claim.job, claim) for claim in level if claim.most > claim.least]
        heapq.heapify(heap)
        while heap and left > 0:
            _, job, claim = heapq.heappop(heap)
            found[job] += 1
            left -= 1
            if found[job] < claim.most:
                heapq.heappush(heap, (_turn(claim, found[job]), job, claim))
        break
    return found


def _turn(claim: Claim, has: int) -> tuple[float, float, bool, int]:
    return has / claim.weight, -claim.weight, claim.held <= has, claim.number
