"""Asynchronous jobs with `max_staleness`: which trainers compute with parameters that they pulled here, and how many pushes ago that was.

pull within a bound ──► oldest parameters that a live trainer computes with: more than `versions` pushes old? ─ yes ─► waits
                                                                                  `─ no ─► answered: the trainer computes with the newest ones
push ──► it computes no more with them, unless it says that it keeps them

Only one parameter server is asked (the lowest index with blocks), so nobody waits at one while it is waited for at another.
Who is dead, or takes much longer than any push before, is not waited for. A parameter server that came back, or a new one, knows of nobody yet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trireme_shared.protocol.wire.messages import StalenessBound

PATIENCE = 2.0  # times the longest time from a pull to its push


@dataclass(slots=True)
class _Held:
    """`pushes`: that had been applied when it pulled. `since`: its pull, or its last push since then; seconds of the clock."""

    pushes: int
    since: float


class ParametersInUse:
    """`pushes`: that were applied here."""

    def __init__(self) -> None:
        self.pushes = 0
        self._held: dict[str, _Held] = {}  # by trainer; the oldest parameters first
        self._longest_s = 0.0

    def __repr__(self) -> str:
        return f"<ParametersInUse after {self.pushes} pushes: {len(self._held)} trainers compute>"

    def slowest(self, bound: StalenessBound, is_live: Callable[[str], bool], now: float) -> tuple[str, int] | None:
        """The trainer that computes with the oldest parameters, and how many pushes old they are. Forgets those that are not waited for."""
        limit_s = bound.ceiling_s
        if self._longest_s:
            limit_s = min(limit_s, max(bound.floor_s, PATIENCE * self._longest_s))
        while self._held:
            name, held = next(iter(self._held.items()))
            if is_live(name) and now - held.since <= limit_s:
                return name, self.pushes - held.pushes
            del self._held[name]
        return None

    def age_of(self, trainer: str) -> int | None:
        """Of the parameters that it computes with, in pushes; None: it computes with none, as far as is known here."""
        held = self._held.get(trainer)
        return None if held is None else self.pushes - held.pushes

    def pulled(self, trainer: str, now: float) -> None:
        """It computes with the newest parameters from now on."""
        self._held.pop(trainer, None)
        self._held[trainer] = _Held(self.pushes, now)

    def pushed(self, trainer: str, now: float, *, keeps: bool) -> bool:
        """Its push has ended. `keeps`: it goes on with the same parameters. Whether the oldest parameters may be other ones now."""
        held = self._held.get(trainer)
        if held is None:
            return False
        self._longest_s, held.since = max(self._longest_s, now - held.since), now
        return False if keeps else self.let_go(trainer)

    def let_go(self, trainer: str) -> bool:
        """It computes with none. Whether the oldest parameters may be other ones now."""
        was_oldest = next(iter(self._held), None) == trainer
        self._held.pop(trainer, None)
        return was_oldest
