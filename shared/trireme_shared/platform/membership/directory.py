"""A member and etcd: what it sees of its job, and the one key that it writes.

Directory is the view: spec, state, trainers, slots, layout, pservers, master, kept current by one watch.

    run(): snapshot -> events -> ... for ever; an outage of etcd only makes the view stale
    wait_for(predicate): wait here until the job is in a certain state

Reading never waits. A stale view is safe: generation and term fence what members do. The list of trainers is
long in a large job, and changes often while it starts. So it is read once, and then only changes of it are
followed; if one is missing (two in one transaction, history that was compacted), the list is read again.

OwnKey is one leased key that only this process writes, kept equal to a wanted record:

    claim (create = 0) ─► hold: renew the lease, write what was `set` ─► revoked, deleted, or another's: lost
                           └─ lease over by the local clock ─► in doubt: ask etcd, until it answers
                                mine ─► new lease
                                gone, nobody has the place ─► created again
                                another's ─► lost

Who is in doubt does nothing that only a holder may do, and keeps what it has. Where etcd refuses connections
it is down: then nobody can take the key, and its holder goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Any, Generic, TypeVar

from trireme_shared.platform.etcd import (
    Compacted,
    Compare,
    Etcd,
    KeyValue,
    Lease,
    LeaseLost,
    OutcomeUnknown,
    Put,
    Refused,
    WatchBatch,
    WatchEvent,
)
from trireme_shared.platform.etcd.reading import read_number, read_record
from trireme_shared.platform.runtime import clock, ids, telemetry
from trireme_shared.platform.runtime.clock import event_within
from trireme_shared.platform.runtime.containment import LongLivedGroup
from trireme_shared.protocol.errors import DeadlineExceeded, PeerError, TriremeError
from trireme_shared.protocol.evaluations import EvaluationStatus
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import (
    EpochPlan,
    JobSpec,
    JobState,
    MasterAddress,
    PserverMember,
    SlotMap,
    TrainerList,
    TrainerMember,
    TrainersChange,
)
from trireme_shared.protocol.records.assignments import Migration
from trireme_shared.protocol.records.layout import Layout
from trireme_shared.protocol.records.members import CommunicatorMember
from trireme_shared.protocol.records.operations import CheckpointRequest

PAUSE_S = 0.5

log = telemetry.logger("directory")
OUTAGE_S = 24 * 3600.0  # how long etcd may be away before the key counts as lost
LOOK_ATTEMPT_S = 1.0  # of one look after the lease is over
LOOK_AGAIN_S = 0.05
RELEASE_S = 2.0
RETURN_S = (
    # after a silence of etcd whoever lost its lease needs so long at least to come back, however short leases
    # are
    5.0
)
R = TypeVar("R", PserverMember, TrainerMember, CommunicatorMember)


class Directory:
    """Each attribute is None if its key does not exist, or cannot be parsed (which is logged). `observers`
    are called after each change, before anybody who waits for it goes on."""

    def __init__(self, etcd: Etcd, keys: Keys) -> None:
        self.keys = keys
        self.spec: JobSpec | None = None
        self.state: JobState | None = None
        self.trainers = TrainerList()
        self.slots: SlotMap | None = None
        self.layout: Layout | None = None
        self.master: MasterAddress | None = None
        self.pservers: dict[int, PserverMember] = {}
        self.pservers_desired: int | None = None
        self.checkpoint_request: CheckpointRequest | None = None
        self.migration: Migration | None = None
        self.evaluation: EvaluationStatus | None = None
        self.plan: EpochPlan | None = None
        self.init_done = False
        self.observers: list[Callable[[], None]] = []
        self.revision = 0
        self._etcd = etcd
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        phase = f"{self.state.phase} generation {self.state.generation}" if self.state else "no job"
        master = self.master.url if self.master else "none"
        return (
            f"<Directory {self.keys.job} at {self.revision}: {phase}, {len(self.pservers)} pservers, "
            f"master {master}>"
        )

    @property
    def known_state(self) -> JobState:
        """The job's; as at its very beginning, as long as it has none."""
        return self.state or JobState()

    @property
    def term(self) -> int:
        """The newest master's; 0: there was none."""
        return self.master.term if self.master is not None else 0

    @property
    def task_records(self) -> int:
        """Records of a full task; 0: not counted yet."""
        return self.plan.task_records if self.plan is not None else 0

    async def run(self) -> None:
        """Follow etcd until cancelled."""
        first, end = self.keys.directory()
        while True:
            try:
                async with aclosing(self._etcd.watch(first, end)) as batches:
                    async for batch in batches:
                        await self._take(batch)
            except Compacted as error:
                log.warning("list_compacted", cause=error.message)
                await asyncio.sleep(ids.jitter(PAUSE_S))

    async def _take(self, batch: WatchBatch) -> None:
        """All that is written together becomes visible together. Raises Compacted."""
        trainers = await self._trainers_at(batch)
        if batch.reset:
            self._replace(batch.kvs)
        else:
            for event in batch.events:
                self._apply(event)
        self.trainers, self.revision = trainers, batch.revision
        for observer in self.observers:
            observer()
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self, after_revision: int, timeout_s: float) -> bool:
        """Wait until the view is newer than `after_revision`; False if it is not after `timeout_s`."""
        deadline = clock.monotonic() + timeout_s
        while self.revision <= after_revision:
            left = deadline - clock.monotonic()
            if left <= 0:
                return False
            await event_within(self._changed, left)
        return True

    async def wait_for(self, predicate: Callable[[Directory], bool], timeout_s: float, what: str) -> None:
        """Wait until `predicate(self)` holds. Raises DeadlineExceeded, which names `what`, after
        `timeout_s`."""
        deadline = clock.monotonic() + timeout_s
        while not predicate(self):
            if not await self.changed(self.revision, deadline - clock.monotonic()):
                if predicate(self):
                    return
                msg = f"waited {timeout_s:g} s for {what}; the job is {self!r}"
                raise DeadlineExceeded(msg, hint="is the master alive, and etcd reachable?")

    # ------------------------------------------------------------ the list of trainers

    async def _trainers_at(self, batch: WatchBatch) -> TrainerList:
        """The list at the batch's revision; read from etcd only if what is known and what changed do not
        tell. Raises Compacted."""
        key = self.keys.trainers_change
        kvs = batch.kvs if batch.reset else [event.kv for event in batch.events if event.type == "put"]
        changes = [
            change for kv in kvs if kv.key == key and (change := read_record(TrainersChange, key, kv.value))
        ]
        if batch.reset and not changes:
            return TrainerList()
        found: TrainerList | None = self.trainers
        for change in changes:
            found = found.changed(change) if found else None
        return found or await self._read_list(batch.revision)

    async def _read_list(self, revision: int) -> TrainerList:
        """Raises Compacted if that revision is too old."""
        key = self.keys.trainer_list
        while True:
            try:
                found = (await self._etcd.range(key, revision=revision)).first
                return (read_record(TrainerList, key, found.value) if found else None) or TrainerList()
            except Compacted:
                raise
            except PeerError as error:
                log.warning("list_unread", cause=error.message)
                await asyncio.sleep(ids.jitter(PAUSE_S))

    # ------------------------------------------------------------ keys

    def _replace(self, kvs: Sequence[KeyValue]) -> None:
        self.spec = self.state = self.slots = self.layout = self.master = self.pservers_desired = None
        self.checkpoint_request = self.migration = self.evaluation = self.plan = None
        self.pservers = {}
        self.init_done = False
        for kv in kvs:
            self._set(kv.key, kv.value)

    def _apply(self, event: WatchEvent) -> None:
        self._set(event.kv.key, event.kv.value if event.type == "put" else None)

    def _set(self, key: str, value: bytes | None) -> None:
        keys = self.keys
        match key:
            case keys.spec:
                self.spec = read_record(JobSpec, key, value)
            case keys.state:
                self.state = read_record(JobState, key, value)
            case keys.slots:
                self.slots = read_record(SlotMap, key, value)
            case keys.layout:
                self.layout = read_record(Layout, key, value)
            case keys.master_address:
                self.master = read_record(MasterAddress, key, value)
            case keys.checkpoint_request:
                self.checkpoint_request = read_record(CheckpointRequest, key, value)
            case keys.migration:
                self.migration = read_record(Migration, key, value)
            case keys.evaluation_status:
                self.evaluation = read_record(EvaluationStatus, key, value)
            case keys.plan:
                self.plan = read_record(EpochPlan, key, value)
            case keys.pservers_desired:
                self.pservers_desired = read_number(key, value)
            case keys.init_done:
                self.init_done = value is not None
            case _ if key.startswith(keys.pservers):
                self._set_pserver(key, value)

    def _set_pserver(self, key: str, value: bytes | None) -> None:
        index = read_number(key, self.keys.name_of(key).encode())
        if index is None:
            return
        member = read_record(PserverMember, key, value)
        pservers = {**self.pservers}
        pservers.pop(index, None)
        if member is not None:
            pservers[index] = member
        self.pservers = dict(sorted(pservers.items()))


def may_return_s(silent_at: float, ttl_s: float) -> float:
    """For how long members whose lease of `ttl_s` ran out may still come back, because etcd was silent at
    `silent_at` (seconds since boot; see Etcd). 0 or less: who is gone is gone."""
    return silent_at + max(ttl_s, RETURN_S) - clock.since_boot()


class OwnKey(Generic[R]):
    """`record`: the wanted value; its lease is filled in."""

    def __init__(self, etcd: Etcd, record: R) -> None:
        self.key = ""
        self.record: R = record
        self._etcd = etcd
        self._granted: Lease | None = None  # for a claim that has not ended
        self._lease: Lease | None = None
        self._created = self._claimed = 0  # revisions at which etcd created the key: now, and by `claim`
        self._etcd_down = False
        self._told_away = False
        self._released = self._lost = self._gives_up = False
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.key or 'unclaimed'} of {self.record.incarnation}: {self._lease!r}>"
        )

    @property
    def lease(self) -> Lease:
        """Raises LeaseLost before the claim."""
        if self._lease is None:
            raise LeaseLost("no key is claimed, so there is no lease")
        return self._lease

    @property
    def in_doubt(self) -> bool:
        """The lease is over by the local clock, and etcd has not said yet whether the key is still this
        process's. Not while etcd is down: nobody else can have it then."""
        return self._lease is not None and not self._lease.alive and not self._etcd_down

    async def certain(self) -> bool:
        """Wait until the key is not in doubt; answers whether it was. Raises DeadlineExceeded after
        OUTAGE_S."""
        waited = self.in_doubt
        deadline = clock.monotonic() + OUTAGE_S
        while self.in_doubt:
            if clock.monotonic() > deadline:
                msg = f"etcd has not said for {OUTAGE_S:g} s whether {self.key} is still this process's"
                raise DeadlineExceeded(msg, hint="is etcd reachable from here?")
            await asyncio.sleep(LOOK_AGAIN_S)
        return waited

    @property
    def held(self) -> Compare:
        """True while the key is this process's: compare it in every write that only the holder may do."""
        return Compare.create(self.key, "==", self._created)

    async def claim(self, key: str, ttl_s: float, **fields: Any) -> bool:
        """Create the key with these fields of the record; False if it exists. Raises PeerError: claim
        again."""
        lease = self._granted = await self._etcd.grant(ttl_s)
        fields["lease"] = lease.id
        value = self.record.model_copy(update=fields).to_bytes()
        try:
            result = await self._etcd.txn([Compare.create(key, "==", 0)], [Put(key, value, lease.id)])
            taken, revision = result.succeeded, result.revision
        except OutcomeUnknown:
            found = await self._etcd.get(key)
            taken = found is not None and found.lease == lease.id
            revision = found.create_revision if found is not None else 0
        if not taken:
            await lease.revoke()
            self._granted = None
            return False
        self.record = self.record.model_copy(update=fields)
        self.key, self._lease, self._created, self._claimed = key, lease, revision, revision
        self._granted = None
        return True

    async def hold(self) -> None:
        """Keep the key and its value; returns when it is lost or released. Run it in a TaskGroup."""
        async with LongLivedGroup() as group:
            writing = group.create_task(self._keep_value())
            while not self._lost:
                over = self.lease
                await over.keep_alive()
                self._lost = self._lost or self._released or not await self._renew_lease(over)
                self._told_away = False
            if not self._gives_up:  # else it ends by itself
                writing.cancel()
        if not self._released:
            log.error("key_lost", key=self.key, incarnation=self.record.incarnation)

    def set(self, **fields: Any) -> None:
        """Change the wanted record; `hold` writes it, again while etcd is away."""
        self.record = self.record.model_copy(update=fields)
        self._changed.set()

    def created_again(self) -> None:
        """Before the key, which was gone with its lease, is created again: `record` may say so."""

    def look(self) -> None:
        """By what is known of the job the key is gone or another's: `hold` asks etcd. Whoever deleted it may
        not have revoked the lease: it died in between, or its answer was lost and another process had the
        place before it asked again."""
        if self._lease is not None and self._lease.alive:  # else etcd is asked anyway
            self._changed.set()

    async def write(self, **fields: Any) -> bool:
        """Change the record and write it now; False: the key is lost. Raises PeerError, LeaseLost (also while
        the lease is being replaced): the fields are what they were before, and whether etcd took them is
        unknown; write again."""
        before = self.record
        self.record = before.model_copy(update=fields)
        try:
            while (written := await self._write_record()) is None:
                self.lease.check()
            return written
        except (PeerError, LeaseLost):
            self.record = self.record.model_copy(update={name: getattr(before, name) for name in fields})
            raise

    async def release(self, *, asked: bool = False) -> None:
        """Give the key up at once; if etcd is away, its lease runs out by itself. `asked`: this process was
        told to leave. The key says so first, so that nobody takes it for dead."""
        self._released = True
        lease = self._lease or self._granted  # a claim that was cancelled may have written the key
        if lease is None:
            return
        try:
            async with asyncio.timeout(RELEASE_S):
                if asked and self._lease is not None:
                    await self._say_leaving(self._lease)
                await lease.revoke()
        except (TriremeError, TimeoutError) as error:
            log.warning("key_not_released", key=self.key, cause=str(error))

    # ------------------------------------------------------------ parts

    async def _say_leaving(self, lease: Lease) -> None:
        """Best effort: it is only for people."""
        self.record = self.record.with_fields(leaving=True)
        with contextlib.suppress(PeerError):
            await self._put(lease, [self.held])

    async def _keep_value(self) -> None:
        """Write each change; returns when the key is lost."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                written = await self._write_record()
                if written is False:
                    return
                if written is None:
                    await asyncio.sleep(ids.jitter(LOOK_AGAIN_S))
                    self._changed.set()
            except (PeerError, LeaseLost) as error:
                log.warning("etcd_away", key=self.key, cause=str(error))
                await asyncio.sleep(ids.jitter(PAUSE_S))
                self._changed.set()

    async def _write_record(self) -> bool | None:
        """False: the key is lost. None: not now, its lease is being replaced or its value was written
        meanwhile."""
        if self._lost:
            return False
        lease = self.lease
        found = await self._etcd.get(self.key)
        if lease is not self._lease or not lease.alive:
            # `found` may be older than a key created again, and a write could take the key back to the lease
            # that is over
            return None
        if found is None or not self._is_mine(found):
            await self._give_up(lease)
            return False
        return await self._put(lease, self._unchanged(found)) > 0 or None

    async def _give_up(self, lease: Lease) -> None:
        """The key is gone or another's although the lease is alive: it was deleted. `hold` ends, so that the
        process starts anew."""
        self._lost = self._gives_up = True
        with contextlib.suppress(PeerError, TimeoutError):
            async with asyncio.timeout(RELEASE_S):
                await lease.revoke()

    async def _renew_lease(self, over: Lease) -> bool:
        """A new lease under the key if it is still this process's, or nobody's because the old one ran out.
        False: it is lost."""
        deadline = clock.monotonic() + OUTAGE_S
        while clock.monotonic() < deadline and not self._released:
            try:
                found = await self._etcd.get(self.key, timeout_s=LOOK_ATTEMPT_S)
                self._etcd_down = False
                proofs = await self._proofs(found, over)
                if proofs is None:
                    return False
                lease = await self._etcd.grant(over.ttl_s)
                if found is None:
                    self.created_again()
                if (revision := await self._put(lease, proofs)) > 0:
                    self._created = found.create_revision if found is not None else revision
                    self.record, self._lease = self.record.with_fields(lease=lease.id), lease
                    log.info(
                        "lease_replaced", key=self.key, lease=f"{lease.id:x}", created_again=found is None
                    )
                    return True
                await asyncio.sleep(ids.jitter(LOOK_AGAIN_S))
            except (PeerError, LeaseLost) as error:
                self._etcd_down = isinstance(error, Refused)
                (log.debug if self._told_away else log.warning)("etcd_away", key=self.key, cause=str(error))
                self._told_away = True
                await asyncio.sleep(ids.jitter(PAUSE_S))
        return False

    async def _proofs(self, found: KeyValue | None, over: Lease) -> Sequence[Compare] | None:
        """What has to hold when this process writes its key with a new lease. None: it may not."""
        if found is not None:
            return self._unchanged(found) if self._is_mine(found) else None
        return None if over.revoked else await self._place_is_kept()

    async def _place_is_kept(self) -> Sequence[Compare] | None:
        """The lease ran out and nobody has the key: what has to hold for this process to create it again.
        None: it may not."""
        return [self._is_free()]

    def _is_free(self) -> Compare:
        return Compare.create(self.key, "==", 0)

    def _unchanged(self, found: KeyValue) -> Sequence[Compare]:
        # mod, not create: an attempt without an answer that arrives late would put an old value and an old
        # lease back
        return [Compare.mod(self.key, "==", found.mod_revision)]

    async def _put(self, lease: Lease, proofs: Sequence[Compare]) -> int:
        """The revision at which the record was written with that lease; 0: a proof failed."""
        value = self.record.with_fields(lease=lease.id).to_bytes()
        done = await self._etcd.txn(proofs, [Put(self.key, value, lease.id)])
        return done.revision if done.succeeded else 0

    def _is_mine(self, found: KeyValue) -> bool:
        """Nobody else writes this incarnation."""
        record = read_record(type(self.record), found.key, found.value)
        return record is not None and record.incarnation == self.record.incarnation
