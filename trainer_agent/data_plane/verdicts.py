"""What a parameter server's answer to a push means for the whole push.

PushAnswer ──verdict──► ACKNOWLEDGED | AGAIN | BEHIND | STALE generation | FENCED attempt | BROKEN
"""

from __future__ import annotations

from enum import Enum

from shared.errors import NotReady, StaleAttempt, StaleGeneration, TooEarly, WrongOwner
from shared.records import Mode
from shared.wire.messages import PushAnswer


class Verdict(Enum):
    """From good to bad. SKIPPED: given up, nobody answered. BEHIND: the ledger expects an earlier minibatch."""

    ACKNOWLEDGED = "acknowledged"
    SKIPPED = "skipped"
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
    WrongOwner.code: Verdict.AGAIN,
}


def verdict(answer: PushAnswer, mode: Mode) -> tuple[Verdict, str]:
    """The worst that the answer says about any block, with a sentence."""
    order = list(Verdict)
    worst, sentence = Verdict.ACKNOWLEDGED, ""
    for refusal in answer.refused:
        found = _VERDICTS.get(refusal.code, Verdict.BROKEN)
        if mode is Mode.ASYNC and refusal.code == TooEarly.code:
            found = Verdict.BEHIND
        if order.index(found) > order.index(worst):
            worst = found
            why = refusal.message or f"it is at version {refusal.version}"
            sentence = f"block {refusal.block} refused: {refusal.code}, {why}"
    return worst, sentence
