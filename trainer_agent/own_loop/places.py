"""Where a script with a loop of its own is, or waits."""

from __future__ import annotations

from enum import Enum


class Place(Enum):
    """As error messages call it."""

    START = "before trireme.prepare"
    PREPARED = "in trireme.prepare"
    ASKS = "at the top of its loop"
    COMPUTES = "in the body of its loop"
    LOSS = "in trireme.backward"
    HAS_GRADIENTS = "between trireme.backward and optimizer.step"
    STEPPED = "in optimizer.step"
    AFTER = "after its loop"
    OVER = "at its end"


GOES_ON = {Place.PREPARED: Place.PREPARED, Place.ASKS: Place.COMPUTES, Place.LOSS: Place.HAS_GRADIENTS}
