"""Who decides which processes make up a communicator's group: whoever of them holds a lock. It may die at any
time.

    candidate --lock--> decider: members' keys gone or new, trouble told
        ─► the next epoch, written with the lock as its fence
        └── the holder is proved dead: its lease is revoked, so that nobody waits for its end
    decider: members that do not reach each other (reach.py) ─► those who have to go lose their leases

An epoch's id is the revision of its write: no restart of anybody, and none of etcd, can give it again.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial

from trireme_shared.collective.reach import cut_off, until_dead, words_s
from trireme_shared.collective.records import Epoch, EpochMember, LeftOut, Mirror, Trouble, Unreached
from trireme_shared.platform.etcd import Compare, Delete, Etcd, KeyValue, Lease, LeaseLost, Put
from trireme_shared.platform.etcd.fenced import try_acquire
from trireme_shared.platform.etcd.reading import read_record
from trireme_shared.platform.membership.directory import OwnKey, may_return_s
from trireme_shared.platform.runtime import clock, ids, telemetry
from trireme_shared.protocol.errors import PeerError, leaves
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records.members import CommunicatorMember

SETTLE_S = 0.2  # members that start together shall be in one epoch, not in several
SETTLE_LIMIT_S = 2.0
TROUBLE_S = 0.1  # whose group broke often has a dead peer, and that will be known soon
TROUBLE_LIMIT_S = 2.0
STEADY_S = 10.0  # an epoch that lasted so long was a good one
RECHECK_S = 5.0
LOST_S = 0.05
JITTER_S = 0.03

log = telemetry.logger("collective.decider")


def next_members(
    epoch: Epoch | None, present: Mapping[EpochMember, int], minimum: int
) -> tuple[EpochMember, ...] | None:
    """Who is in the next epoch, by rank: those of `epoch` that are present still, then the new ones by the
    revision at which they came. None: there is nothing to change, or fewer than `minimum` are there."""
    before = epoch.members if epoch is not None else ()
    stayed = [member for member in before if member in present]
    came = sorted(present.keys() - set(stayed), key=lambda member: (present[member], member.member))
    wanted = (*stayed, *came)
    return wanted if wanted != before and len(wanted) >= max(1, minimum) else None


class Decider:
    """`run` it in a TaskGroup in every member. `own`: answers the key of this process, under whose lease it
    holds the lock. `minimum`: an epoch has at least so many members. `proved_dead` returns when a process
    is."""

    def __init__(
        self,
        etcd: Etcd,
        keys: Keys,
        mirror: Mirror,
        own: Callable[[], OwnKey[CommunicatorMember]],
        minimum: int,
        proved_dead: Callable[[CommunicatorMember], Awaitable[None]] = until_dead,
    ) -> None:
        self._proved_dead = proved_dead
        self._etcd, self._keys, self._mirror, self._own, self._minimum = etcd, keys, mirror, own, minimum
        self._troubled = 0  # epochs in a row that were renewed for trouble alone
        self._last_came = self._published_at = 0.0
        # this process's lease was over then: those of others may have been, too
        self._in_doubt_at = -math.inf
        self._lifelines: dict[str, asyncio.Task[None]] = {}
        self._left_out: set[int] = set()  # leases
        self._told_at: float | None = None  # since then members say whom they do not reach

    async def run(self) -> None:
        """Ends only by errors that are nobody's: WentBack, for example."""
        while True:
            try:
                lease = self._own().lease
                if not lease.alive:
                    self._in_doubt_at = clock.since_boot()
                token = await self._acquired(lease)
                if token:
                    await self._decide(lease, token)
            except* (PeerError, LeaseLost) as errors:
                log.debug("decider_waits", cause=str(next(leaves(errors))))
            await asyncio.sleep(ids.jitter(LOST_S))

    # ------------------------------------------------------------ candidate

    async def _acquired(self, lease: Lease) -> int:
        """The token of the lock; 0: its holder is gone, or the time is over; try again."""
        value = self._own().record.with_fields(lease=lease.id).to_bytes()
        taken = await try_acquire(self._etcd, self._keys.collective_lock, value, lease)
        if isinstance(taken, int):
            log.info("deciding", member=self._own().record.member)
            return taken
        holder = read_record(CommunicatorMember, taken.key, taken.value)
        async with asyncio.TaskGroup() as group:
            looking = group.create_task(self._revoke_dead(holder)) if holder is not None else None
            with suppress(TimeoutError):
                await self._mirror.until(lambda: self._is_free(taken) or None, RECHECK_S)
            if looking is not None:
                looking.cancel()
        await asyncio.sleep(ids.jitter(JITTER_S))
        return 0

    def _is_free(self, taken: KeyValue) -> bool:
        found = self._mirror.values.get(self._keys.collective_lock)
        if found is None:
            return self._mirror.revision >= taken.create_revision
        return found.create_revision > taken.create_revision

    # ------------------------------------------------------------ decider

    async def _decide(self, lease: Lease, token: int) -> None:
        """Until the lease or the lock is lost. Raises PeerError, LeaseLost."""
        async with asyncio.TaskGroup() as group:
            try:
                changed_at = None
                while lease.alive:
                    present = self._present()
                    self._hold_lifelines(group)
                    epoch_key = self._mirror.values.get(self._keys.collective_epoch)
                    epoch = self._read_epoch(epoch_key)
                    again_s = self._leave_out(group, lease, token, epoch)
                    wanted, wait_s, seen = (
                        self._wanted(epoch, epoch_key, present),
                        None,
                        self._mirror.revision,
                    )
                    if wanted is None:
                        changed_at = None
                    else:
                        changed_at = clock.monotonic() if changed_at is None else changed_at
                        wait_s = self._wait_s(epoch, wanted, changed_at)
                        if wait_s <= 0:
                            await self._publish(token, epoch_key, wanted)
                            changed_at = None
                            continue
                    with suppress(TimeoutError):
                        limit_s = min(each for each in (RECHECK_S, wait_s, again_s) if each is not None)
                        await self._mirror.until(partial(self._is_newer, seen), limit_s)
            finally:
                for task in self._lifelines.values():
                    task.cancel()
                self._lifelines.clear()

    def _is_newer(self, seen: int) -> bool | None:
        return self._mirror.revision != seen or None

    def _read_epoch(self, found: KeyValue | None) -> Epoch | None:
        return read_record(Epoch, found.key, found.value) if found is not None else None

    def _members(self) -> dict[EpochMember, tuple[CommunicatorMember, int]]:
        found = {}
        for kv in self._mirror.below(self._keys.collective_members):
            member = read_record(CommunicatorMember, kv.key, kv.value)
            if member is not None and not member.leaving:
                named = EpochMember(member=member.member, incarnation=member.incarnation)
                found[named] = member, kv.create_revision
        return found

    def _present(self) -> dict[EpochMember, int]:
        return {named: created for named, (_, created) in self._members().items()}

    def _wanted(
        self, epoch: Epoch | None, epoch_key: KeyValue | None, present: Mapping[EpochMember, int]
    ) -> tuple[EpochMember, ...] | None:
        wanted = next_members(epoch, present, self._minimum)
        if wanted is not None or epoch is None or epoch_key is None:
            self._troubled = 0 if wanted is not None else self._troubled
            return wanted
        told = [
            trouble
            for kv in self._mirror.below(self._keys.collective_troubles)
            if (trouble := read_record(Trouble, kv.key, kv.value)) and trouble.epoch == epoch_key.mod_revision
        ]
        return epoch.members if told and len(epoch.members) >= self._minimum else None

    def _wait_s(self, epoch: Epoch | None, wanted: tuple[EpochMember, ...], since: float) -> float:
        """0: now. Whoever is gone is left out at once; new members may have company, and those that etcd
        forgot may come back."""
        now = clock.monotonic()
        if epoch is not None and wanted == epoch.members:
            return since + min(TROUBLE_S * 2.0 ** min(self._troubled, 10), TROUBLE_LIMIT_S) - now
        if epoch is not None and set(epoch.members) - set(wanted):
            silent_s: float = may_return_s(
                max(self._etcd.silent_at, self._in_doubt_at), self._own().lease.ttl_s
            )
            return min(silent_s, since + RECHECK_S - now) if silent_s > 0 else 0.0
        return min(since + SETTLE_LIMIT_S, max(since, self._last_came) + SETTLE_S) - now

    def _hold_lifelines(self, group: asyncio.TaskGroup) -> None:
        """A connection to each other member."""
        members = {
            member.incarnation: member
            for member, _ in self._members().values()
            if member.incarnation != self._own().record.incarnation
        }
        for incarnation in self._lifelines.keys() - members.keys():
            self._lifelines.pop(incarnation).cancel()
        for incarnation in members.keys() - self._lifelines.keys():
            self._last_came = clock.monotonic()
            self._lifelines[incarnation] = group.create_task(self._revoke_dead(members[incarnation]))

    async def _revoke_dead(self, member: CommunicatorMember) -> None:
        await self._proved_dead(member)
        log.info("member_dead", member=member.member, pid=member.pid, host=member.host)
        while True:
            try:
                await self._etcd.revoke(self._current_lease(member))
                return
            except PeerError as error:
                log.warning("lease_not_revoked", member=member.member, cause=str(error))
                await asyncio.sleep(ids.jitter(LOST_S))

    def _current_lease(self, member: CommunicatorMember) -> int:
        """It may have been replaced since."""
        found = self._mirror.values.get(self._keys.collective_member(member.member))
        now = read_record(CommunicatorMember, found.key, found.value) if found is not None else None
        return now.lease if now is not None and now.incarnation == member.incarnation else member.lease

    def _leave_out(
        self, group: asyncio.TaskGroup, lease: Lease, token: int, epoch: Epoch | None
    ) -> float | None:
        """Members of the epoch that do not reach each other cannot be in one group. Not if too few would be
        left. Answers in how many seconds to look again, since others may still say whom they do not reach."""
        found = self._members()
        present = [member for member in epoch.members if member in found] if epoch is not None else []
        told = [
            unreached
            for kv in self._mirror.below(self._keys.collective_unreached)
            if (unreached := read_record(Unreached, kv.key, kv.value)) is not None
        ]
        out = cut_off(present, told)
        if not out or len(present) - len(out) < max(1, self._minimum):
            self._told_at = None
            return None
        now = clock.monotonic()
        self._told_at = now if self._told_at is None else self._told_at
        if (left_s := self._told_at + words_s(len(present)) - now) > 0:
            return left_s
        for named, members in out.items():
            member, _ = found[named]
            current = self._current_lease(member)
            if current not in self._left_out:
                self._left_out.add(current)
                names = tuple(other.member for other in members)
                log.warning("member_left_out", member=named.member, host=member.host, unreached=names)
                notice = LeftOut(incarnation=named.incarnation, members=names)
                group.create_task(self._revoke_told(member.member, current, notice, lease, token))
        return None

    async def _revoke_told(
        self, member: str, revoked: int, notice: LeftOut, lease: Lease, token: int
    ) -> None:
        key, fence = (
            self._keys.collective_left_out(member),
            [Compare.create(self._keys.collective_lock, "==", token)],
        )
        while True:
            try:
                if (await self._etcd.txn(fence, [Put(key, notice.to_bytes(), lease.id)])).succeeded:
                    await self._etcd.revoke(revoked)
                return
            except PeerError as error:
                log.warning("lease_not_revoked", member=member, cause=str(error))
                await asyncio.sleep(ids.jitter(LOST_S))

    async def _publish(self, token: int, before: KeyValue | None, members: tuple[EpochMember, ...]) -> None:
        """Returns when the mirror shows the write. Raises PeerError, LeaseLost: the lock is lost, or it is
        not known."""
        keys = self._keys
        epoch = Epoch(members=members)
        fence = [
            Compare.create(keys.collective_lock, "==", token),
            Compare.mod(keys.collective_epoch, "==", before.mod_revision if before is not None else 0),
        ]
        writes: list[Put | Delete] = [Put(keys.collective_epoch, epoch.to_bytes())]
        if before is not None:
            writes.append(Delete(keys.collective_of(before.mod_revision), prefix=True))
        result = await self._etcd.txn(fence, writes)
        if not result.succeeded:
            raise LeaseLost("another member decides by now, or has")
        same = before is not None and members == getattr(self._read_epoch(before), "members", ())
        soon = clock.monotonic() < self._published_at + STEADY_S
        self._troubled = self._troubled + 1 if same and soon else 0
        self._published_at = clock.monotonic()
        log.info("epoch", epoch=result.revision, members=[member.member for member in members])
        with suppress(TimeoutError):
            await self._mirror.until(lambda: self._mirror.revision >= result.revision or None, RECHECK_S)
