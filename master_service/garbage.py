"""Garbage collections of a process that leads many jobs: seldom, and not while a schedule is waited for.

what a deleted job leaves refers to itself in circles, 50 KiB each; all else goes without a collection
    ─► once ENDED jobs have ended, `after_schedule` collects: no place waits then
a thousand jobs that wait hold 60,000 objects which come and go
    ─► by themselves collections are rare: THRESHOLDS
a thousand jobs are led ─► a look at all their objects takes a second, in which nobody gets an answer
    ─► who survives a long one is set aside, and the next ones look only at what came since
    ─► after ALL_S all are looked at again
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from trireme_shared.platform.runtime import clock

THRESHOLDS = 50_000, 4, 4
ENDED = 64
LONG_S = 0.03
ALL_S = 600.0


@contextmanager
def put_off() -> Iterator[None]:
    """No collection meanwhile: for what makes many objects that are gone with it."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class Collections:
    """Of this process, from `begin` on."""

    def __init__(self) -> None:
        self._began = self._set_aside = 0.0

    def __repr__(self) -> str:
        return f"<Collections: {gc.get_freeze_count()} objects are set aside>"

    def begin(self) -> None:
        gc.set_threshold(*THRESHOLDS)
        gc.callbacks.append(self._note)

    def _note(self, phase: str, info: dict[str, int]) -> None:
        now = clock.monotonic()
        if phase == "start":
            self._began = now
        elif info["generation"] and now - self._began > LONG_S:
            gc.freeze()
            self._set_aside = now
        elif self._set_aside and now - self._set_aside > ALL_S:
            gc.unfreeze()  # the next collection of all objects, soon, looks at these
            self._set_aside = 0.0


class EndedJobs:
    """Counted, until there are enough for a collection."""

    def __init__(self) -> None:
        self._count = 0

    def __repr__(self) -> str:
        return f"<EndedJobs: {self._count}>"

    def add(self) -> None:
        self._count += 1

    def after_schedule(self) -> None:
        if self._count >= ENDED and gc.isenabled():
            self._count = 0
            gc.collect()
