"""Members that do not reach each other although all of them reach etcd: one of the two ends of each such way has to go.

    a group that does not come together, or an operation that does not end, for as long as a lease lasts
      ─► connect to each other member ─► no answer for as long as a lease lasts ─► told in etcd
    decider ─► the members with most such ways, the youngest of several, lose their leases ─► an epoch without them
    who was left out ─► registers anew when it reaches everybody of the epoch; after each time it rests longer before

So a partition costs an operation two leases, and not `timeout_s` again and again.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress

from trireme_shared.collective.members.lifeline import CONNECT_S, reaches
from trireme_shared.collective.mirror import Mirror
from trireme_shared.collective.records import Epoch, EpochMember, LeftOut, Unreached
from trireme_shared.platform.etcd import Delete, Etcd, LeaseLost, Put
from trireme_shared.platform.etcd.reading import read_record
from trireme_shared.platform.membership.own_key import OwnKey
from trireme_shared.platform.runtime import clock, ids, telemetry
from trireme_shared.protocol.errors import PeerError
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records.members import CommunicatorMember

LOOK_S = 0.5
LOOK_EACH_S = 0.01  # and so long for each other member: in large groups connections are not most of the work
AT_ONCE = 64  # connections that are tried at the same time
REST_LIMIT_S = 60.0
FORGET_S = 600.0  # who was left out so long ago has not been lately

log = telemetry.logger("collective.reach")


def cut_off(members: Sequence[EpochMember], told: Iterable[Unreached]) -> dict[EpochMember, tuple[EpochMember, ...]]:
    """Who has to go so that all of `members` (by rank) that stay reach each other, and whom each of them does not reach. One word is enough: a way that is
    open in one direction makes no group."""
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
    """How long after the first of so many members that says whom it does not reach all others have said so, too. Before, a member that nobody reaches
    looks as those who cannot reach it."""
    return 2 * look_s(count) + CONNECT_S


class Reach:
    """Of one process. `run` it in a TaskGroup. `own`: its key at present. `stuck_s`: for how long its epoch has made no progress, in seconds; 0: nothing is waited for.
    `reaches`: whether it can connect to a process now."""

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
        rest_s = min(self._ttl_s * 2.0**self._times, REST_LIMIT_S)
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
            await self._etcd.txn([own.held], [Put(key, record.to_bytes(), lease) if unreached else Delete(key)])
            self._told = (lease, unreached)
            if unreached:
                log.warning("unreached", members=[member.member for member in unreached])


def _named(member: CommunicatorMember) -> EpochMember:
    return EpochMember(member=member.member, incarnation=member.incarnation)
