"""What an answer to a push means."""

from __future__ import annotations

from trainer_agent.data_plane.pushes import Verdict, verdict
from trireme_shared.protocol.records import Mode
from trireme_shared.protocol.wire.messages import PushAnswer, Refusal


def test_the_worst_refusal_decides_what_a_push_was():
    def answer(*codes):
        return PushAnswer(
            refused=tuple(Refusal(block=1, lanes=(0, 1), code=code, version=2) for code in codes)
        )

    assert verdict(PushAnswer(applied=3, duplicate=2), Mode.SYNC) == (Verdict.ACKNOWLEDGED, "")
    assert verdict(answer("TOO_EARLY"), Mode.SYNC)[0] is Verdict.AGAIN
    assert verdict(answer("TOO_EARLY"), Mode.ASYNC)[0] is Verdict.BEHIND
    assert verdict(answer("TOO_EARLY", "STALE_GENERATION"), Mode.SYNC)[0] is Verdict.STALE
    assert verdict(answer("STALE_ATTEMPT", "STALE_GENERATION"), Mode.SYNC)[0] is Verdict.FENCED
    assert verdict(answer("NOT_READY", "LAYOUT_MISMATCH"), Mode.SYNC) == (
        Verdict.BROKEN,
        "block 1 refused: LAYOUT_MISMATCH, it is at version 2",
    )
