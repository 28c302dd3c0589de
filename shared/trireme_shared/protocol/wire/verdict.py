"""What a parameter server says of a block, or of rows, that were pushed or asked for."""

from __future__ import annotations

from enum import StrEnum


class Verdict(StrEnum):
    """The result of pushing or pulling a block: applied, duplicate, or a code of trireme_shared.protocol.errors."""

    APPLIED = "APPLIED"
    DUPLICATE = "DUPLICATE"
    TOO_EARLY = "TOO_EARLY"
    GONE = "GONE"
    STALE_GENERATION = "STALE_GENERATION"
    STALE_ATTEMPT = "STALE_ATTEMPT"
    WRONG_OWNER = "WRONG_OWNER"
    MOVING = "MOVING"
    LAYOUT_MISMATCH = "LAYOUT_MISMATCH"
    BAD_FRAME = "BAD_FRAME"
