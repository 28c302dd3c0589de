"""What a simulated cluster consists of: nodes with their processes, and the requests that masters have
accepted."""

from __future__ import annotations

import asyncio
import traceback
from dataclasses import dataclass, field
from typing import Any

from master_service.masterless.dispatcher import Dispatcher
from tests.equipment.virtual_loop import Process
from trireme.launch.processes import RestartPolicy
from trireme_shared.protocol.errors import TriremeError
from trireme_shared.protocol.records.operations import Operation


def described(error: BaseException) -> str:
    """With the place where it was raised; groups are unfolded."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(described(inner) for inner in error.exceptions)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else ""
    return f"{error!r}{where}"


def expected(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(expected(inner) for inner in error.exceptions)
    return isinstance(error, TriremeError)


@dataclass
class Node:
    """`service` is what the current process serves: a Master, a Pserver or nothing; a masterless trainer has
    a dispatcher, one of a collective job a `share`."""

    name: str
    kind: str
    url: str = ""
    process: Process = field(default_factory=lambda: Process("none"))
    service: Any = None
    dispatcher: Dispatcher | None = None
    share: Any = None
    incarnations: int = 0
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    exits: list[int] = field(default_factory=list)
    restarts: RestartPolicy = field(default_factory=RestartPolicy)
    started_s: float = 0.0
    due_s: float | None = None
    wanted: bool = True

    @property
    def alive(self) -> bool:
        return self.incarnations > 0 and not self.process.dead


@dataclass(frozen=True)
class AcceptedRequest:
    """An operation that a master has begun. `version`, `timeline`: the job's when it was asked for."""

    operation: Operation
    version: int
    timeline: int
