"""Faults at exact moments of a trainer of a collective job, which it does to itself. Loaded by the soak's
scripts where MOMENTS says which.

MOMENTS: the schedule. MARKS: a folder; a fault that is done is a file there, so that a trainer's replacement
does not do it again; whoever runs the soak wakes who is stopped, and kills etcd.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.soak.moments.cutting import cut_all
from tests.soak.moments.schedule import OF_JOBS, Fault, parse

DELAY_S = 0.5


class Moments:
    """`step`: the newest that this trainer knows of."""

    def __init__(self, faults: list[Fault], marks: Path) -> None:
        self._faults, self._marks = faults, marks
        self._lock = threading.Lock()
        self.step = 0
        self.wrong = False

    def reach(self, operation: str, phase: str, step: int | None = None) -> None:
        """Do what is due here."""
        self.step = max(self.step, step or 0)
        with self._lock:
            due = [each for each in self._faults if each.step <= self.step]
            found = next((each for each in due if (each.operation, each.phase) == (operation, phase)), None)
            if found is None:
                return
            self._faults.remove(found)
        try:
            with (self._marks / str(found)).open("x") as mark:
                mark.write(f"{os.getpid()} {time.monotonic()} {self.step}")
        except FileExistsError:
            return
        self._inflict(found.kind)

    def _inflict(self, kind: str) -> None:
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == "cut":
            cut_all(unix="trainer")
        elif kind == "delay":
            time.sleep(DELAY_S)
        elif kind == "size":
            self.wrong = True


def install() -> None:
    """Only in trainers."""
    name, faults = os.environ.get("TRIREME_NAME", ""), os.environ.get("MOMENTS", "")
    if not name.startswith("trainer-") or not faults:
        return
    own = [each for each in parse(faults, OF_JOBS) if each.member == int(name.removeprefix("trainer-"))]
    _wrap(Moments(own, Path(os.environ["MARKS"])))


def _wrap(moments: Moments) -> None:
    from trainer_agent.collective.exchange import CollectiveGroup
    from trainer_agent.collective.gathering import MeanGradients
    from trainer_agent.collective.groups import Group
    from trainer_agent.collective.mean_blocks import Arriving
    from trainer_agent.collective.replica import Replica
    from trainer_agent.collective.state.catching_up import CatchingUp
    from trainer_agent.collective.state.giving import StateGiver
    from trainer_agent.data_plane.pushes import Outbox

    reach = moments.reach
    _around(MeanGradients, "form", "form", reach, lambda self, *_: self.has)
    _after(Group, "learn", lambda *_: reach("form", "during"))
    _around(MeanGradients, "_gather", "pull", reach, lambda self, *_: self.has + 1)
    _after(Arriving, "_put", lambda self, *_: reach("pull", "during", self.version))
    _after(Outbox, "add", lambda *_: reach("push", "during"))
    _around(StateGiver, "_in_turn", "give", reach, lambda *_: None)
    _after(StateGiver, "_portion", lambda *_: reach("give", "during"))
    # it knows no step earlier
    _before(CatchingUp, "_fetch_all", lambda self: reach("join", "before", self.version))
    _after_all(CatchingUp, "run", lambda: reach("join", "after"))
    _after(CatchingUp, "_take", lambda self, *_: reach("join", "during", self.version))

    pushing, stepping, streaming = CollectiveGroup.pushing, Replica.step, Outbox.stream

    @asynccontextmanager
    async def reaching(self: Any, header: Any, outboxes: Any, *more: Any) -> Any:
        reach("push", "before", header.step)
        async with pushing(self, header, outboxes, *more) as verdicts:
            yield verdicts
        reach("push", "after")

    def step(self: Any, gradients: Any, record: Any) -> Any:
        reach("step", "before", record.version - 1)
        made = self._optimizer.step

        def half(*values: Any) -> None:
            made(*values)
            reach("step", "during")

        self._optimizer.step = half
        try:
            return stepping(self, gradients, record)
        finally:
            self._optimizer.step = made
            reach("step", "after")

    def stream(self: Any) -> Any:
        return _CutShort(streaming(self), moments)

    CollectiveGroup.pushing, Replica.step, Outbox.stream = reaching, step, stream  # type: ignore[method-assign,assignment]


class _CutShort:
    """The blocks of a push; if that is asked for, the next one lacks its last element."""

    def __init__(self, stream: Any, moments: Moments) -> None:
        self._stream, self._moments = stream, moments

    def __aiter__(self) -> Any:
        return self

    async def __anext__(self) -> Any:
        block, payload = await anext(self._stream)
        if self._moments.wrong:
            self._moments.wrong = False
            payload = memoryview(bytes(payload)[:-4])
        return block, payload


def _around(
    kind: type, name: str, operation: str, reach: Callable[..., None], step: Callable[..., int | None]
) -> None:
    """A coroutine's begin and end."""
    work = getattr(kind, name)

    @functools.wraps(work)
    async def watched(self: Any, *given: Any) -> Any:
        reach(operation, "before", step(self, *given))
        found = await work(self, *given)
        reach(operation, "after")
        return found

    setattr(kind, name, watched)


def _before(kind: type, name: str, reach: Callable[..., None]) -> None:
    """Before a call."""
    work = getattr(kind, name)

    @functools.wraps(work)
    def watched(self: Any, *given: Any) -> Any:
        reach(self, *given)
        return work(self, *given)

    setattr(kind, name, watched)


def _after_all(kind: type, name: str, reach: Callable[[], None]) -> None:
    """After a coroutine has returned."""
    work = getattr(kind, name)

    @functools.wraps(work)
    async def watched(self: Any, *given: Any) -> Any:
        found = await work(self, *given)
        reach()
        return found

    setattr(kind, name, watched)


def _after(kind: type, name: str, reach: Callable[..., None]) -> None:
    """After a call."""
    work = getattr(kind, name)

    @functools.wraps(work)
    def watched(self: Any, *given: Any) -> Any:
        found = work(self, *given)
        reach(self, *given)
        return found

    setattr(kind, name, watched)
