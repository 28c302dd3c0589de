"""What a host agent keeps of its places: their keys in the pool, and its folder.

PlaceKeys keeps the keys of a host's places, `pool/<kind>/<member>`, under one lease and equal to the wanted
    records:
    claim (create = 0) ─► hold: renew the lease, write what was `set` ─► another agent has a key: lost
                           └─ lease over ─► a new one as soon as etcd answers, and every key is written again
Unlike a member of a job an agent needs no fence: what its children may do is decided by their own keys. So
while etcd is silent, or has lost the lease, nothing is stopped here.

HostFolder is DATA_DIR/{agent.lock, agent.json, logs/<job>/<member>-<epoch>.log, sources/, sockets}. One agent
at a time: it holds a flock while it lives. So whoever gets the lock knows that the agent before is dead, and
may revoke the lease that agent.json names instead of waiting until it runs out.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from trireme.launch.run_folder import read_json, write_json
from trireme_shared.platform.etcd import Compare, Etcd, Get, KeyValue, Lease, LeaseLost, OutcomeUnknown, Put
from trireme_shared.platform.etcd.reading import read_record
from trireme_shared.platform.runtime import clock, ids, telemetry
from trireme_shared.platform.runtime.containment import LongLivedGroup
from trireme_shared.platform.security import private_files
from trireme_shared.protocol.errors import Conflict, InvalidArgument, PeerError, TriremeError
from trireme_shared.protocol.keys import ClusterKeys
from trireme_shared.protocol.records.cluster import PoolMember

BATCH = 100  # keys of one transaction
PAUSE_S = 0.5
RELEASE_S = 2.0
LOCK, AGENT_FILE = "agent.lock", "agent.json"

log = telemetry.logger("registration")


class PlaceKeys:
    """`records`: the wanted values by key; their lease is filled in. `on_lease` is called with the id of each
    new lease."""

    def __init__(
        self,
        etcd: Etcd,
        keys: ClusterKeys,
        members: Iterable[PoolMember],
        ttl_s: float,
        on_lease: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.records = {keys.member(member.kind, member.member): member for member in members}
        self._etcd, self._keys, self._ttl_s, self._on_lease = etcd, keys, ttl_s, on_lease
        self._lease: Lease | None = None
        self._dirty: set[str] = set()
        self._changed = asyncio.Event()
        self._lost = self._released = False

    def __repr__(self) -> str:
        return f"<PlaceKeys: {len(self.records)} places, {self._lease!r}>"

    @property
    def alive(self) -> bool:
        """Whether the keys are there and their lease is not over, by the local clock."""
        return self._lease is not None and self._lease.alive

    async def claim(self, limit_s: float) -> None:
        """Create all keys. Waits for those of an agent whose lease has to run out. Raises Conflict if another
        agent still has one after `limit_s`, PeerError if etcd does not answer for so long."""
        deadline = clock.monotonic() + limit_s
        while True:
            try:
                await self._new_lease()
                taken = await self._write(self.records)
            except (PeerError, LeaseLost) as error:
                log.warning("etcd_away", doing="registering the places", cause=str(error))
                if clock.monotonic() > deadline:
                    raise
                taken = None
            if taken == "":
                return
            if taken is not None and clock.monotonic() > deadline:
                await self.release()
                msg = f"{taken} is another agent's, and was for {limit_s:g} s"
                raise Conflict(msg, hint="give each host a name of its own (TRIREME_NAME)")
            await asyncio.sleep(ids.jitter(PAUSE_S))

    async def hold(self) -> None:
        """Keep the lease and the values; returns when the keys are released, or another agent has one of
        them."""
        async with LongLivedGroup() as group:
            writing = group.create_task(self._keep_values())
            while not (self._lost or self._released):
                assert self._lease is not None
                await self._lease.keep_alive()
                if not (self._lost or self._released):
                    await self._renew()
            if not self._lost:  # else it releases the other keys and ends
                writing.cancel()

    def set(self, key: str, **fields: Any) -> None:
        """Change a wanted record; `hold` writes it, again while etcd is away. Nothing is written if it is
        equal."""
        record = self.records[key].model_copy(update=fields)
        if record != self.records[key]:
            self.records[key] = record
            self._dirty.add(key)
            self._changed.set()

    async def release(self) -> None:
        """Give the keys up at once; if etcd is away, their lease runs out by itself."""
        self._released = True
        if self._lease is not None:
            with contextlib.suppress(TriremeError, TimeoutError):
                async with asyncio.timeout(RELEASE_S):
                    await self._lease.revoke()

    # ------------------------------------------------------------ parts

    async def _new_lease(self) -> None:
        """If there is none, or it is over."""
        if self._lease is None or not self._lease.alive:
            self._lease = await self._etcd.grant(self._ttl_s)
            self._on_lease(self._lease.id)

    async def _renew(self) -> None:
        """Wait until etcd gives a new lease; all keys are written again with it."""
        while not self._released:
            try:
                await self._new_lease()
            except (PeerError, LeaseLost) as error:
                log.warning("etcd_away", doing="asking for a new lease", cause=str(error))
                await asyncio.sleep(ids.jitter(PAUSE_S))
                continue
            self._dirty |= self.records.keys()
            self._changed.set()
            return

    async def _keep_values(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            dirty, self._dirty = self._dirty, set()
            try:
                taken = await self._write(dirty)
            except (PeerError, LeaseLost) as error:
                log.warning("etcd_away", doing="writing the places", cause=str(error))
                self._dirty |= dirty
                await asyncio.sleep(ids.jitter(PAUSE_S))
                self._changed.set()
                continue
            if taken:
                log.error("place_lost", key=taken, cause="another agent has registered it")
                self._lost = True
                await self.release()
                return

    async def _write(self, keys: Iterable[str]) -> str:
        """Make etcd's values of these keys equal to the records; the key that another agent has, "": none.
        Raises PeerError, LeaseLost: not all may be written."""
        assert self._lease is not None
        for batch in _batches(sorted(keys)):
            while True:
                self._lease.check()
                found = await self._etcd.txn([], [Get(key) for key in batch])
                held = {key: found.range(place).first for place, key in enumerate(batch)}
                if taken := next(
                    (key for key, kv in held.items() if kv is not None and not self._is_mine(kv)), ""
                ):
                    return taken
                # mod, not create: a write whose answer was lost must not arrive late and put an old value
                # back
                proofs = [
                    Compare.mod(key, "==", 0 if kv is None else kv.mod_revision) for key, kv in held.items()
                ]
                with contextlib.suppress(OutcomeUnknown):
                    if (await self._etcd.txn(proofs, [self._put(key) for key in batch])).succeeded:
                        break
                await asyncio.sleep(ids.jitter(PAUSE_S))
        return ""

    def _put(self, key: str) -> Put:
        assert self._lease is not None
        record = self.records[key] = self.records[key].with_fields(lease=self._lease.id)
        return Put(key, record.to_bytes(), self._lease.id)

    def _is_mine(self, found: KeyValue) -> bool:
        record = read_record(PoolMember, found.key, found.value)
        return record is not None and record.incarnation == self.records[found.key].incarnation


def _batches(keys: Sequence[str]) -> Iterator[Sequence[str]]:
    for first in range(0, len(keys), BATCH):
        yield keys[first : first + BATCH]


class HostFolder:
    """Made by `opened_folder`."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.sources = place / "sources"
        self.logs = place / "logs"

    def __repr__(self) -> str:
        return f"<HostFolder {self.place}>"

    @property
    def last_lease(self) -> int:
        """Of the agent before; 0: it had none."""
        lease = (read_json(self.place / AGENT_FILE) or {}).get("lease", 0)
        return lease if isinstance(lease, int) else 0

    def note_lease(self, lease: int) -> None:
        """If it cannot be written, the next agent waits until the lease has run out."""
        with contextlib.suppress(OSError):
            write_json(self.place / AGENT_FILE, {"pid": os.getpid(), "lease": lease})

    def log_of(self, job: str, member: str, epoch: int) -> Path:
        return self.logs / job / f"{member}-{epoch}.log"


@contextlib.contextmanager
def opened_folder(place: Path) -> Iterator[HostFolder]:
    """Raises InvalidArgument if it cannot be written, Conflict if another agent has it."""
    place = place.absolute()
    try:
        private_files.make_folder(place)
        lock = private_files.open_private(place / LOCK, "a")
    except OSError as error:
        msg = f"the data directory {place} cannot be written: {error.strerror}"
        raise InvalidArgument(msg, hint="choose another in TRIREME_DATA_DIR") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = (read_json(place / AGENT_FILE) or {}).get("pid", "unknown")
            msg = f"another host agent (process {owner}) uses {place}"
            raise Conflict(
                msg, hint="give each agent a TRIREME_DATA_DIR and a TRIREME_NAME of its own"
            ) from error
        yield HostFolder(place)
