"""Values that hypothesis draws, without what it does to shrink and to find novel ones: for a fuzz that sends
each request once.

hypothesis' own backend draws a long string character by character, and keeps a tree of all draws, in which a
system under test that does not answer twice the same is an error. A system that remembers what it was asked
does not. An alternative backend has no part in that tree, except for prefixes that two examples share;
`NUMBER` first makes every example's prefix its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st
from hypothesis.internal.conjecture.providers import (
    AVAILABLE_PROVIDERS,
    COLLECTION_DEFAULT_MAX_SIZE,
    HypothesisProvider,
)
from hypothesis.internal.intervalsets import IntervalSet

BACKEND = "quick"
LONG = 64  # characters: strings that must be as long are drawn at once
NUMBER = st.binary(min_size=16, max_size=16)
QUICKLY: dict[str, Any] = {
    "backend": BACKEND,
    "phases": [Phase.generate],
    "deadline": None,
    "database": None,
    "derandomize": True,
    "suppress_health_check": list(HealthCheck),
}


class QuickDraws(HypothesisProvider):
    def draw_string(
        self, intervals: IntervalSet, *, min_size: int = 0, max_size: int = COLLECTION_DEFAULT_MAX_SIZE
    ) -> str:
        if min_size < LONG or not len(intervals):
            return super().draw_string(intervals, min_size=min_size, max_size=max_size)
        random = self._random
        assert random is not None
        among = range(len(intervals) if random.random() < 0.2 else min(len(intervals), 256))
        length = random.randint(min_size, min(max_size, min_size + LONG))
        return "".join(intervals.char_in_shrink_order(each) for each in random.choices(among, k=length))


@contextmanager
def quick_draws() -> Iterator[None]:
    """In here, `settings(**QUICKLY)` can be used."""
    AVAILABLE_PROVIDERS[BACKEND] = QuickDraws
    try:
        yield
    finally:
        del AVAILABLE_PROVIDERS[BACKEND]
