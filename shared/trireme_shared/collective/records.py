"""What communicators of a job agree on: the settings that all members of a group must have been told alike;
and what they keep in etcd: who is there, which epoch they are in, and what each has done so far, with a copy
of it in each of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from trireme_shared.platform.etcd import Etcd, KeyValue, WatchBatch
from trireme_shared.protocol.records.record import Id, Int64, Message, Name, Record

PROTOCOL = 1
GLOO, NCCL = "gloo", "nccl"
NATIVE, CANONICAL = "native", "canonical"


@dataclass(frozen=True, slots=True)
class Settings:
    """Seconds. `host`: the address at which other members reach this process. `transport_dtype`: "": each
    value's own."""

    host: str = "127.0.0.1"
    timeout_s: float = 60.0
    lease_ttl_s: float = 5.0
    min_members: int = 1
    reduction: str = NATIVE
    transport_dtype: str = ""
    backend: str = GLOO
    share_state: bool = True

    def manifest(self, size: int) -> dict[str, str]:
        return {
            "protocol": str(PROTOCOL),
            "members": str(size),
            "reduction": self.reduction,
            "transport_dtype": self.transport_dtype or "none",
            "backend": self.backend,
            "share_state": str(self.share_state),
        }


class EpochMember(Record):
    member: Id
    incarnation: Id


class Epoch(Record):
    """The members by rank; rank 0 is the oldest. Its id is the revision at which it was written, so none
    repeats."""

    members: tuple[EpochMember, ...]


class Trouble(Record):
    """A member's group of that epoch is of no use any more, though its members may all live."""

    epoch: Int64
    cause: Message


class Unreached(Record):
    """`by` has not been able to connect to these members of its epoch for as long as a lease lasts, though
    their leases go on."""

    by: EpochMember
    members: tuple[EpochMember, ...]


class LeftOut(Record):
    """What a member is told whose lease is revoked because it and `members` do not reach each other."""

    incarnation: Id
    members: tuple[Id, ...]


class Done(Record):
    """One operation of the group's history: its number, and the epoch in which it was done. Two members that
    name the same have the same result of it, and of all before."""

    number: Int64
    epoch: Int64


class Statement(Record):
    """What a member says before the first operation of an epoch. `manifest`: what has to be equal in all
    members. `last`, `before`: its last two operations. `gives`: it has the result of `last` still.
    `has_state`: its model is the group's. `listener`: host and port at which its group accepts
    connections."""

    manifest: dict[Name, Name]
    last: Done
    before: Done
    gives: bool
    has_state: bool
    listener: tuple[Name, int] | None = None
    network: str = ""


T = TypeVar("T")


class Mirror:
    """A copy of the keys below one prefix of etcd, kept current by a watch; waiting for what it shows.

    etcd --watch--> Mirror.values --change--> every `until` looks again

    `values`: the keys below `prefix` as etcd had them at `revision`, a moment ago. `known`: the first
    snapshot is there.
    """

    def __init__(self, etcd: Etcd, prefix: str) -> None:
        self.prefix = prefix
        self.values: dict[str, KeyValue] = {}
        self.revision = 0
        self.known = asyncio.Event()
        self._etcd = etcd
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Mirror of {self.prefix}: {len(self.values)} keys at revision {self.revision}>"

    async def follow(self) -> None:
        """Run it in a TaskGroup; it ends only by WentBack."""
        async with aclosing(self._etcd.watch(self.prefix, prefix=True)) as batches:
            async for batch in batches:
                self._take(batch)
                self.known.set()
                self.notify()

    def _take(self, batch: WatchBatch) -> None:
        self.revision = batch.revision
        if batch.reset:
            self.values = {kv.key: kv for kv in batch.kvs}
        for event in batch.events:
            if event.type == "put":
                self.values[event.kv.key] = event.kv
            else:
                self.values.pop(event.kv.key, None)

    def notify(self) -> None:
        """Something that waiters look at has changed."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def until(self, found: Callable[[], T | None], limit_s: float | None = None) -> T:
        """What `found` answers as soon as it is not None. Raises TimeoutError after `limit_s`."""
        async with asyncio.timeout(limit_s):
            while True:
                changed = self._changed  # before the look: no change may be missed
                if (answer := found()) is not None:
                    return answer
                await changed.wait()

    def below(self, prefix: str) -> list[KeyValue]:
        """In no particular order."""
        return [kv for key, kv in self.values.items() if key.startswith(prefix)]
