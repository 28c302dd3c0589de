"""Storage that is slow with parts of checkpoints alone, as slow as a test says.

Whoever sees all parts first commits a checkpoint, which is drawn; a storage that is slow with everything
keeps all others waiting while its process holds the lock of the commit, or does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.equipment.replaced import replaced
from tests.simulation import collective, processes
from tests.simulation.plans import Plan
from trireme_shared.checkpoints.writer import write_part
from trireme_shared.serving.pserver import Pserver

#: By the name of a process and the version: how many seconds the part takes.
SecondsOf = Callable[[str, int], float]


@contextmanager
def parts_take(seconds_of: SecondsOf) -> Iterator[None]:
    """In jobs of both strategies."""
    at_once = processes.later

    def of_work(process: str, work: Callable[..., Any], arguments: tuple[Any, ...]) -> float:
        return seconds_of(process, arguments[2].version) if work is write_part else 0.0

    def of_trainer(_: Plan, trainer: str, work: Callable[..., Any], arguments: tuple[Any, ...]) -> float:
        return of_work(trainer, work, arguments)

    async def of_pserver(_: float, service: Pserver, work: Callable[..., Any], *arguments: Any) -> Any:
        return await at_once(of_work(service.incarnation, work, arguments), service, work, *arguments)

    with replaced(collective, "storage_s_of", of_trainer), replaced(processes, "later", of_pserver):
        yield
