"""The storage fails at single members for a while: what they write or read there raises OSError, before it is
done or although it is done."""

from __future__ import annotations

import asyncio
import errno
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.simulation.cluster import SimulatedCluster

Offload = Callable[..., Awaitable[Any]]

WORK = {
    "write": ("write_part",),
    "commit": ("write_manifest",),
    "delete": ("remove", "remove_file"),
    "load": ("load_replica",),
    "evaluate": ("read_checkpoint", "read_tables"),
}
KINDS = (
    ("write", "commit"),
    ("write", "commit"),
    ("load",),
    ("write", "commit", "load"),
    ("delete",),
    tuple(WORK),
)


class StorageError(StrEnum):
    FULL = "no space left on device"
    REFUSED = "permission denied"
    AWAY = "no answer"

    def to_error(self) -> OSError:
        match self:
            case StorageError.FULL:
                return OSError(errno.ENOSPC, "No space left on device")
            case StorageError.REFUSED:
                return PermissionError(errno.EACCES, "Permission denied")
            case StorageError.AWAY:
                return ConnectionError("the storage does not answer")


@dataclass(frozen=True)
class StorageFault:
    """From `from_s` to `until_s` the works of these kinds fail at that member. `done`: although they are
    done."""

    member: str
    from_s: float
    until_s: float
    kinds: tuple[str, ...]
    error: StorageError
    done: bool = False

    def __str__(self) -> str:
        what = f"{' and '.join(self.kinds)} at {self.member} until {self.until_s:.3f}"
        return f"{self.from_s:7.3f} storage: {self.error}: {what}{' (although done)' if self.done else ''}"

    def concerns(self, node: str, work: str, now: float) -> bool:
        named = any(work in WORK[kind] for kind in self.kinds)
        return named and node == self.member and self.from_s <= now < self.until_s


def storage_faults(rng: random.Random, window_s: float, trainers: int) -> tuple[StorageFault, ...]:
    """At trainers."""
    found = []
    for _ in range(rng.choice([0, 1, 2, 3, 5])):
        from_s = window_s * rng.random()
        kinds = rng.choice(KINDS)
        lasts_s = rng.choice([0.3, 1.0, 3.0, 8.0])
        fault = StorageFault(
            f"trainer-{rng.randrange(max(1, trainers))}",
            from_s,
            from_s + lasts_s,
            kinds,
            rng.choice(list(StorageError)),
            rng.random() < 0.3,
        )
        found.append(fault)
    return tuple(sorted(found, key=lambda fault: fault.from_s))


def failing(cluster: SimulatedCluster, node: str, offload: Offload) -> Offload:
    """As `offload`, with the faults of the cluster's plan."""

    async def offloaded(work: Callable[..., Any], *arguments: Any) -> Any:
        def fails() -> Any:
            now, name = asyncio.get_running_loop().time(), getattr(work, "__name__", "")
            fault = next(
                (each for each in cluster.plan.storage_faults if each.concerns(node, name, now)), None
            )
            if fault is None:
                return work(*arguments)
            if fault.done:
                work(*arguments)
            cluster.say(f"{name} fails at {node}: {fault.error}")
            raise fault.error.to_error()

        return await offload(fails)

    return offloaded if cluster.plan.storage_faults else offload
