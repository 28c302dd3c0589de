"""A member's view of its job: spec, state, trainers, slots, layout, pservers, master, kept current by one etcd watch.

    run(): snapshot -> events -> ... for ever; an outage of etcd only makes the view stale
    wait_for(predicate): wait here until the job is in a certain state

Reading never waits. A stale view is safe: generation and term fence what members do.
The list of trainers is long in a large job, and changes often while it starts. So it is read once, and then only changes of it
are followed; if one is missing (two in one transaction, history that was compacted), the list is read again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing

from trireme_shared.platform.etcd import Compacted, Etcd, KeyValue, WatchBatch, WatchEvent
from trireme_shared.platform.etcd.reading import read_number, read_record
from trireme_shared.platform.runtime import clock, ids, telemetry
from trireme_shared.platform.runtime.clock import event_within
from trireme_shared.protocol.errors import DeadlineExceeded, PeerError
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
    TrainersChange,
)
from trireme_shared.protocol.records.assignments import Migration
from trireme_shared.protocol.records.layout import Layout
from trireme_shared.protocol.records.operations import CheckpointRequest

PAUSE_S = 0.5

log = telemetry.logger("directory")


class Directory:
    """Each attribute is None if its key does not exist, or cannot be parsed (which is logged). `observers` are called after each
    change, before anybody who waits for it goes on."""

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
            f"<Directory {self.keys.job} at {self.revision}: {phase}, {len(self.pservers)} pservers, master {master}>"
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
        """Wait until `predicate(self)` holds. Raises DeadlineExceeded, which names `what`, after `timeout_s`."""
        deadline = clock.monotonic() + timeout_s
        while not predicate(self):
            if not await self.changed(self.revision, deadline - clock.monotonic()):
                if predicate(self):
                    return
                msg = f"waited {timeout_s:g} s for {what}; the job is {self!r}"
                raise DeadlineExceeded(msg, hint="is the master alive, and etcd reachable?")

    # ------------------------------------------------------------ the list of trainers

    async def _trainers_at(self, batch: WatchBatch) -> TrainerList:
        """The list at the batch's revision; read from etcd only if what is known and what changed do not tell. Raises Compacted."""
        key = self.keys.trainers_change
        kvs = batch.kvs if batch.reset else [event.kv for event in batch.events if event.type == "put"]
        changes = [change for kv in kvs if kv.key == key and (change := read_record(TrainersChange, key, kv.value))]
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
