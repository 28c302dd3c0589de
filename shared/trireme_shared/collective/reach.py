"""Which members of a communicator are dead, and which do not reach each other although all of them reach
etcd.

lifeline, until_dead: a connection to each other member, which the kernel closes at its death
Reach, cut_off: a group that does not come together, or an operation that does not end, for as long as a lease
lasts
      ─► connect to each other member ─► no answer for as long as a lease lasts ─► told in etcd
    decider ─► the members with most such ways, the youngest of several, lose their leases
        ─► an epoch without them
    who was left out ─► registers anew when it reaches everybody of the epoch
        ─► after each time it rests longer before

So a partition costs an operation two leases, and not `timeout_s` again and again.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress

from trireme_shared.collective.records import Epoch, EpochMember, LeftOut, Mirror, Unreached
from trireme_shared.platform.etcd import Delete, Etcd, LeaseLost, Put
from trireme_shared.platform.etcd.reading import read_record
from trireme_shared.platform.membership.directory import OwnKey
from trireme_shared.platform.runtime import clock, http, ids, telemetry
from trireme_shared.platform.runtime.containment import backoff_s
from trireme_shared.protocol.errors import PeerError
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records.members import CommunicatorMember

CONNECT_S = 2.0
PAUSE_S = 0.5
LINE_BYTES = 256
MAX_CONNECTIONS = 4096

Held = tuple[asyncio.Server, set[asyncio.StreamWriter]]

_held: list[Held] = []  # of this process


def _let_go() -> None:
    """In a forked process. Nothing is shut down, and the descriptors stay taken: their objects close them at
    some time."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for server, writers in _held:
        own = [*server.sockets, *(writer.get_extra_info("socket") for writer in writers)]
        for descriptor in [each.fileno() for each in own]:
            if descriptor >= 0:
                os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)


@asynccontextmanager
async def lifeline(host: str, incarnation: str) -> AsyncIterator[int]:
    """Listen at a free port of `host`, which is yielded. A connection to it tells at once when this process
    is dead: the kernel closes it, and refuses the next one. Nothing is read from the connections, and nothing
    secret is said.

        member      listens, says who it is, holds the connection ◄───────────────┐
        observer    connect ─► its line ─► read until it ends ─► connects again ──┘
                                                                   └─ refused, or another process: dead
    A frozen process, or one behind a broken network, proves nothing: its lease runs out. A forked process
    lets go of what it has inherited: else the kernel would not close it when the member dies.
    """
    held: set[asyncio.StreamWriter] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(held) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        held.add(writer)
        try:
            writer.write(f"{incarnation}\n".encode())
            while await reader.read(LINE_BYTES):
                pass
        except OSError:
            pass
        finally:
            held.discard(writer)
            writer.close()

    server = await asyncio.start_server(answer, host, 0)
    own = server, held
    _held.append(own)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        _held[:] = [each for each in _held if each is not own]
        server.close()
        for writer in list(held):
            writer.transport.abort()


async def until_dead(member: CommunicatorMember) -> None:
    """Returns when that process is proved dead, else never: cancel it."""
    host, _, port = member.address.rpartition(":")
    proves = http.tells(f"tcp://{member.address}", member.network, http.own_network())
    short = 0  # connections in a row that ended soon
    while True:
        try:
            async with asyncio.timeout(CONNECT_S):
                reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), limit=LINE_BYTES)
        except ConnectionRefusedError:
            if proves:
                return
            await asyncio.sleep(ids.jitter(PAUSE_S))
            continue
        except (OSError, TimeoutError):
            await asyncio.sleep(ids.jitter(PAUSE_S))
            continue
        began = clock.monotonic()
        try:
            if await _is_another(reader, member) and proves:
                return
            while await reader.read(LINE_BYTES):
                pass
        except (OSError, ValueError):
            pass
        finally:
            writer.transport.abort()
            with suppress(OSError):
                await writer.wait_closed()
        # one that closes each connection at once shall not keep this process busy; one that died just now is
        # found at once
        short = short + 1 if clock.monotonic() - began < PAUSE_S else 0
        await asyncio.sleep(ids.jitter(PAUSE_S) if short > 1 else 0.001)


async def reaches(member: CommunicatorMember) -> bool:
    """Whether a connection to that process is made and answered within CONNECT_S. A refused one counts: then
    the way is open, and the process is dead, which is proved in another way."""
    host, _, port = member.address.rpartition(":")
    try:
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), limit=LINE_BYTES)
            try:
                return bool(await reader.readline())
            finally:
                writer.transport.abort()
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError, ValueError):
        return False


async def _is_another(reader: asyncio.StreamReader, member: CommunicatorMember) -> bool:
    """Whether another process than `member` listens there by now. Waits as long as a frozen process says
    nothing."""
    line = await reader.readline()
    return bool(line) and line.decode("ascii", "replace").strip() != member.incarnation


LOOK_S = 0.5
LOOK_EACH_S = 0.01  # and so long for each other member: in large groups connections are not most of the work
AT_ONCE = 64  # connections that are tried at the same time
REST_LIMIT_S = 60.0
FORGET_S = 600.0  # who was left out so long ago has not been lately

log = telemetry.logger("collective.reach")


def cut_off(
    members: Sequence[EpochMember], told: Iterable[Unreached]
) -> dict[EpochMember, tuple[EpochMember, ...]]:
    """Who has to go so that all of `members` (by rank) that stay reach each other, and whom each of them does
    not reach. One word is enough: a way that is open in one direction makes no group."""
    ways: dict[EpochMember, set[EpochMember]] = {member: set() for member in members}
    for each in told:
        for other in each.members:
            if each.by in ways and other in ways and other != each.by:
                ways[each.by].add(other)
                ways[other].add(each.by)
    out: dict[EpochMember, tuple[EpochMember, ...]] = {}
    ranks = {member: rank for rank, member in enumerate(members)}
    while any(ways.values()):
        worst = max(ways, key=lambda member: (len(ways[member]), ranks[member]))
        out[worst] = tuple(sorted(ways.pop(worst), key=ranks.__getitem__))
        for others in ways.values():
            others.discard(worst)
    return out


def look_s(count: int) -> float:
    """Between two looks at so many others."""
    return max(LOOK_S, LOOK_EACH_S * count)


def words_s(count: int) -> float:
    """How long after the first of so many members that says whom it does not reach all others have said so,
    too. Before, a member that nobody reaches looks as those who cannot reach it."""
    return 2 * look_s(count) + CONNECT_S


class Reach:
    """Of one process. `run` it in a TaskGroup. `own`: its key at present. `stuck_s`: for how long its epoch
    has made no progress, in seconds; 0: nothing is waited for. `reaches`: whether it can connect to a process
    now."""

    def __init__(
        self,
        etcd: Etcd,
        keys: Keys,
        mirror: Mirror,
        own: Callable[[], OwnKey[CommunicatorMember]],
        me: EpochMember,
        ttl_s: float,
        stuck_s: Callable[[], float],
        reaches: Callable[[CommunicatorMember], Awaitable[bool]] = reaches,
    ) -> None:
        self._etcd, self._keys, self._mirror, self._own, self._me = etcd, keys, mirror, own, me
        self._ttl_s, self._stuck_s, self._reaches = ttl_s, stuck_s, reaches
        self._told: tuple[int, tuple[EpochMember, ...]] = (0, ())  # under which lease
        self._notice = self._times = 0
        self._rests_until = self._left_out_at = -math.inf
        self.missed: list[CommunicatorMember] = []

    @property
    def trouble(self) -> str:
        """For people; "": there is none."""
        far = ", ".join(f"{member.member} at {member.address}" for member in self.missed[:3])
        more = f" and {len(self.missed) - 3} more" if len(self.missed) > 3 else ""
        return f"this process does not reach {far}{more}, which etcd has" if self.missed else ""

    async def run(self) -> None:
        """Tells who is not reached, and takes it back."""
        since: dict[EpochMember, float] = {}
        while True:
            others = self._others()
            await asyncio.sleep(ids.jitter(look_s(len(others))))
            if not self._is_member():
                since = {}
                continue
            if self._stuck_s() < self._ttl_s and not self._told[1]:
                since, self.missed = {}, []
                continue
            self.missed = await self._missed()
            now = clock.monotonic()
            since = {each: since.get(each, now) for each in map(_named, self.missed)}
            await self._tell(tuple(each for each, at in since.items() if now - at >= self._ttl_s))

    async def everybody(self) -> None:
        """Returns when this process, which is no member, reaches all members of the epoch."""
        while True:
            self._hear()
            if (rest_s := self._rests_until - clock.monotonic()) > 0:
                await asyncio.sleep(rest_s)
            self.missed = await self._missed()
            if not self.missed:
                return
            await asyncio.sleep(ids.jitter(LOOK_S))

    # ------------------------------------------------------------ parts

    def _hear(self) -> None:
        """Of having been left out."""
        found = self._mirror.values.get(self._keys.collective_left_out(self._me.member))
        told = read_record(LeftOut, found.key, found.value) if found is not None else None
        if (
            found is None
            or told is None
            or told.incarnation != self._me.incarnation
            or found.mod_revision <= self._notice
        ):
            return
        now, self._notice = clock.monotonic(), found.mod_revision
        self._times = self._times + 1 if now < self._left_out_at + FORGET_S else 0
        self._left_out_at = now
        rest_s = backoff_s(self._times + 1, self._ttl_s, REST_LIMIT_S)
        self._rests_until = now + rest_s
        log.error("left_out", unreached=told.members, rests_s=rest_s)

    def _members(self) -> tuple[EpochMember, ...]:
        found = self._mirror.values.get(self._keys.collective_epoch)
        epoch = read_record(Epoch, found.key, found.value) if found is not None else None
        return epoch.members if epoch is not None else ()

    def _is_member(self) -> bool:
        return self._me in self._members()

    def _others(self) -> list[CommunicatorMember]:
        """Of the epoch, those whose keys are there."""
        named = set(self._members()) - {self._me}
        read = (
            read_record(CommunicatorMember, kv.key, kv.value)
            for kv in self._mirror.below(self._keys.collective_members)
        )
        return [member for member in read if member is not None and _named(member) in named]

    async def _missed(self) -> list[CommunicatorMember]:
        turns = asyncio.Semaphore(AT_ONCE)

        async def look(member: CommunicatorMember) -> bool:
            async with turns:
                return await self._reaches(member)

        others = self._others()
        found = await asyncio.gather(*map(look, others))
        return [member for member, reached in zip(others, found, strict=True) if not reached]

    async def _tell(self, unreached: tuple[EpochMember, ...]) -> None:
        with suppress(PeerError, LeaseLost):  # again at the next look
            own = self._own()
            lease, key = own.lease.id, self._keys.collective_unreached_by(self._me.member)
            if self._told == (lease, unreached) or not (unreached or self._told[1]):
                return
            record = Unreached(by=self._me, members=unreached)
            await self._etcd.txn(
                [own.held], [Put(key, record.to_bytes(), lease) if unreached else Delete(key)]
            )
            self._told = (lease, unreached)
            if unreached:
                log.warning("unreached", members=[member.member for member in unreached])


def _named(member: CommunicatorMember) -> EpochMember:
    return EpochMember(member=member.member, incarnation=member.incarnation)
