"""What a parameter server's answer to a push means for the whole push.

PushAnswer ──verdict──► ACKNOWLEDGED | MOVED | AGAIN | BEHIND | STALE generation | FENCED attempt | BROKEN
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from shared.errors import NotReady, StaleAttempt, StaleGeneration, TooEarly, WrongOwner
from shared.records import Mode
from shared.wire.messages import PushAnswer

MOVING = "MOVING"  # of a block that is on its way to another parameter server


class Verdict(Enum):
    """From good to bad. SKIPPED: given up, nobody answered. MOVED: another parameter server has some blocks, or will have them in a
    moment. BEHIND: the ledger expects an earlier minibatch."""

    ACKNOWLEDGED = "acknowledged"
    SKIPPED = "skipped"
    MOVED = "moved"
    AGAIN = "again"
    BEHIND = "behind"
    STALE = "stale"
    FENCED = "fenced"
    BROKEN = "broken"


_VERDICTS = {
    StaleGeneration.code: Verdict.STALE,
    StaleAttempt.code: Verdict.FENCED,
    TooEarly.code: Verdict.AGAIN,
    NotReady.code: Verdict.AGAIN,
    WrongOwner.code: Verdict.MOVED,
    MOVING: Verdict.MOVED,
}


_ORDER = {found: place for place, found in enumerate(Verdict)}


def verdict(answer: PushAnswer, mode: Mode) -> tuple[Verdict, str]:
    """The worst that the answer says about any block, with a sentence."""
    found_worst, sentence = Verdict.ACKNOWLEDGED, ""
    for refusal in answer.refused:
        found = _VERDICTS.get(refusal.code, Verdict.BROKEN)
        if mode is Mode.ASYNC and refusal.code == TooEarly.code:
            found = Verdict.BEHIND
        if _ORDER[found] > _ORDER[found_worst]:
            found_worst = found
            why = refusal.message or f"it is at version {refusal.version}"
            sentence = f"block {refusal.block} refused: {refusal.code}, {why}"
    return found_worst, sentence


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    return max(verdicts, key=_ORDER.__getitem__, default=Verdict.ACKNOWLEDGED)


def is_moving(answer: PushAnswer) -> bool:
    """Whether blocks are frozen because they are on their way."""
    return any(refused.code == MOVING for refused in answer.refused)


def moved_blocks(answer: PushAnswer) -> frozenset[int]:
    """The blocks that have to be pushed to another parameter server."""
    return frozenset(refused.block for refused in answer.refused if _VERDICTS.get(refused.code) is Verdict.MOVED)
