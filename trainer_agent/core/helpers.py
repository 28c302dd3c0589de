"""Which trainer computes a late lane in its owner's place. All trainers find the same answer without asking anybody.

owners a b c d, lane 5 of b is late ──helper_of──► c in round 0, d in round 1, a in round 2, …; the next lane of b one further
"""

from __future__ import annotations

from collections.abc import Iterable

from trireme_shared.protocol.lanes import Interval
from trireme_shared.protocol.records import TrainerList


def helper_of(trainers: TrainerList, lane: int, number: int) -> str | None:
    """The trainer that computes `lane` in round `number` if it is late; None if its owner is the only one with lanes.

    The lanes of one owner go to different helpers, so they are computed side by side. A helper that is late itself is followed
    by another one in the next round.
    """
    owners = trainers.owners
    if len(owners) < 2:
        return None
    place = trainers.place_of(lane)
    first, _ = trainers.lanes_of(owners[place])
    return owners[(place + 1 + (lane - first + number) % (len(owners) - 1)) % len(owners)]


def lanes_to_help(trainers: TrainerList, me: str, missing: Iterable[Interval], number: int) -> list[int]:
    """The missing lanes that this trainer computes in round `number`. Never lane 0: its push also says which checkpoint is
    due, and only its owner knows what it has said."""
    return [
        lane
        for first, last in missing
        for lane in range(max(first, 1), min(last, trainers.lanes))
        if helper_of(trainers, lane, number) == me
    ]


def usual_share_s(trainers: TrainerList, me: str, share_s: float) -> float:
    """How long the trainer with the most lanes usually needs, if this one needs `share_s`. Shares by measured speed take all
    trainers the same time."""
    first, last = trainers.lanes_of(me)
    most = -(-trainers.lanes // max(1, trainers.owner_count))
    return share_s if trainers.shares or last == first else share_s * most / (last - first)
