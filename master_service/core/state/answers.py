"""Answers to requests that came with an Idempotency-Key, by a digest of the key: a bounded number, for a bounded time."""

from __future__ import annotations

import heapq

from master_service.core.changes import DropAnswer
from trireme_shared.protocol.records.operations import KeptAnswer
from trireme_shared.protocol.times import rfc3339

KEPT = 1000
KEPT_S = 24 * 3600.0
AT_ONCE = 20  # are forgotten when a new one comes


class KeptAnswers:
    """Only `apply` changes it."""

    def __init__(self) -> None:
        self._records: dict[str, KeptAnswer] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KeptAnswers) and self._records == other._records

    __hash__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        return len(self._records)

    def apply(self, change: KeptAnswer | DropAnswer) -> None:
        """In place."""
        match change:
            case KeptAnswer():
                self._records[change.key] = change
            case DropAnswer(key):
                self._records.pop(key, None)

    def find(self, key: str, wall_time: float) -> KeptAnswer | None:
        """`wall_time`: seconds since 1970. None: the key is new, or was used too long ago."""
        found = self._records.get(key)
        return None if found is None or found.create_time < _oldest(wall_time) else found

    def surplus(self, wall_time: float) -> tuple[DropAnswer, ...]:
        """What a new one takes the place of, the oldest first: at most AT_ONCE, more with the next ones."""
        many, oldest = len(self._records) + 1 - KEPT, _oldest(wall_time)
        first = heapq.nsmallest(AT_ONCE, ((kept.create_time, key) for key, kept in self._records.items()))
        return tuple(DropAnswer(key) for number, (time, key) in enumerate(first) if number < many or time < oldest)


def _oldest(wall_time: float) -> str:
    """The first time that counts: such times, all in UTC, are in the order of their texts."""
    return rfc3339(wall_time - KEPT_S)
