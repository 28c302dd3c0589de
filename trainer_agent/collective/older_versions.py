"""How far back a trainer of a collective job keeps mean gradients that only a spare can need which is far behind.

    first ……… needed ……… has        needed: what others may lack, and what the trainer has not stepped yet; kept whatever it takes
      `─ older ones: KEPT_BYTES and MOST_KEPT at most

A spare that was without a processor for some steps goes on from where it was. Without older versions it fetches all parameters anew, and is behind again when they are there.
"""

from __future__ import annotations

from collections import deque

KEPT_BYTES = 8 << 20  # it stays in a processor's cache; a model of more than that keeps no older ones
MOST_KEPT = 128
RECORD_BYTES = 512  # of each lane's position in a version's record


class OlderVersions:
    """`first`: the first version that is kept."""

    def __init__(self, first: int) -> None:
        self.first = self._needed = first
        self._sizes = deque[int]()
        self._older_bytes = 0

    def __repr__(self) -> str:
        return f"<OlderVersions from {self.first} to {self._needed - 1}: {self._older_bytes} bytes>"

    def add(self, size: int) -> None:
        """One more version is kept. `size`: bytes that are of it alone."""
        self._sizes.append(size)

    def forget_before(self, needed: int) -> int:
        """Of the versions before `needed` the last ones stay, as many as go into the limits. Returns the first one that stays."""
        while self._needed < needed:
            self._older_bytes += self._sizes[self._needed - self.first]
            self._needed += 1
        while self.first < self._needed and (self._older_bytes > KEPT_BYTES or self._needed - self.first > MOST_KEPT):
            self._older_bytes -= self._sizes.popleft()
            self.first += 1
        return self.first
