"""A checkpoint becomes the latest one: the first process that sees all parts commits it.

    all parts there -> finish_lock -> manifest file -> latest -> older ones deleted -> unlock

`latest` is written in one transaction that proves: the lock is held, every part is there, the job is still in
the timeline of these parts and not rolling back, and `latest` has not changed since this checkpoint was found
to be newer. A process that wakes up late fails in this. File names are unique per writer or content, so it
overwrites nothing that `latest` names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from trireme_shared.checkpoints import stored, writer
from trireme_shared.checkpoints.saving_context import (
    GivenUp,
    PendingCheckpoint,
    SavingContext,
    StorageProblem,
    advice_for,
)
from trireme_shared.checkpoints.schedule import is_final, is_kept, is_newer, kept_after, way_back
from trireme_shared.platform.etcd import Compare, Delete, Get, KeyValue, LeaseLost, OutcomeUnknown, Put
from trireme_shared.platform.etcd.fenced import try_acquire
from trireme_shared.platform.etcd.operations import MAX_OPERATIONS
from trireme_shared.platform.etcd.reading import must_read, read_record
from trireme_shared.platform.runtime import clock, telemetry
from trireme_shared.platform.runtime.clock import event_within
from trireme_shared.platform.runtime.containment import LongLivedGroup
from trireme_shared.platform.storage import files
from trireme_shared.protocol.errors import InvalidArgument, PeerError
from trireme_shared.protocol.evaluations import EvaluationStatus
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import JobSpec, JobState, Phase
from trireme_shared.protocol.records.checkpoints import (
    CheckpointCut,
    CheckpointLatest,
    CheckpointPart,
    CheckpointPlace,
    CheckpointRef,
    CheckpointStarted,
    built_on,
)
from trireme_shared.protocol.records.members import pserver_names

SOON_S = 30.0  # for one that has all parts, or whose owners this process does not know


class EvaluatedFirst:
    """Holds a checkpoint back while an older one that is evaluated may still become whole: behind a newer one
    that could not be committed any more. The wait for a part of it ends after `recovery_timeout_s`.

    Owners write their parts in order. So this concerns owners of the older version alone that own nothing of
    the newer one: collective jobs take lanes from a slow trainer, which goes on writing; parameter servers
    are removed.
    """

    def __init__(self, context: SavingContext) -> None:
        self._context = context
        # by uuid of an evaluated one and the limit of the wait
        self._since: dict[tuple[str, float], float] = {}

    def holds(
        self, newer: PendingCheckpoint, pending: Mapping[str, PendingCheckpoint], seen: CheckpointView
    ) -> bool:
        """Whether `newer`, which is complete, has to wait. `pending`: the checkpoints that this process has a
        part of."""
        self._since = {wait: since for wait, since in self._since.items() if wait[0] in seen.begun}
        return any(
            self._waits_for(uuid, begun, newer, pending.get(uuid), seen) for uuid, begun in seen.begun.items()
        )

    def _waits_for(
        self,
        uuid: str,
        begun: CheckpointStarted,
        newer: PendingCheckpoint,
        own: PendingCheckpoint | None,
        seen: CheckpointView,
    ) -> bool:
        older = begun.timeline == newer.timeline and begun.step < newer.record.version
        saved = seen.latest is not None and seen.latest.covers(begun.timeline, begun.step)
        if not begun.evaluation or not older or saved or uuid in seen.failed:
            return False
        limit_s = SOON_S
        slots = own.slots if own is not None else self._context.slots_of(begun.slots)
        if slots is not None:
            missing = {*stored.writers(newer.layout, slots)} - seen.parts.get(uuid, set())
            living, later = self._context.living(slots), self._context.living(newer.slots)
            if not missing <= living.keys() or not {living[index] for index in missing}.isdisjoint(
                later.values()
            ):
                return False
            if missing:
                limit_s = self._context.spec.recovery_timeout_s
        if (uuid, limit_s) not in self._since:
            log.info("commit_held", step=newer.record.version, evaluated=begun.step, limit_s=limit_s)
        return clock.monotonic() - self._since.setdefault((uuid, limit_s), clock.monotonic()) < limit_s


@dataclass(slots=True)
class CheckpointView:
    """What one process knows of `checkpoints/` in etcd. By uuid: `begun`, what its files are of, as long as
    there may be some; `parts`, the pservers whose part is finished; `copied`, paused checkpoints that all
    pservers have copied; `failed`, the pservers whose part could not be written. `holder` of the finish lock,
    "" if there is none."""

    keys: Keys
    begun: dict[str, CheckpointStarted] = field(default_factory=dict)
    parts: dict[str, set[int]] = field(default_factory=dict)
    copied: set[str] = field(default_factory=set)
    failed: dict[str, set[int]] = field(default_factory=dict)
    holder: str = ""
    latest: CheckpointLatest | None = None

    def take(self, key: str, value: bytes | None) -> None:
        """In place. None: the key was deleted."""
        if key == self.keys.finish_lock:
            self.holder = (value or b"").decode(errors="replace")
        elif key == self.keys.latest:
            self.latest = read_record(CheckpointLatest, key, value)
        elif key.endswith("/cut"):
            self._take_cut(key, value)
        elif key.endswith("/begun"):
            uuid = key.removeprefix(self.keys.checkpoints).removesuffix("/begun")
            started = read_record(CheckpointStarted, key, value)
            if started is not None:
                self.begun[uuid] = started
            else:
                self.begun.pop(uuid, None)
        elif part := self.keys.part_in(key):
            uuid, index = part
            parts = self.parts.setdefault(uuid, set())
            if value is None:
                parts.discard(index)
                if not parts:
                    del self.parts[uuid]
            else:
                parts.add(index)
        elif begun := self.keys.started_in(key):
            self._take_started(*begun, read_record(CheckpointStarted, key, value))

    def _take_started(self, uuid: str, index: int, started: CheckpointStarted | None) -> None:
        """A pserver whose part is finished deletes its own key: that says nothing about the parts of
        others."""
        failed = self.failed.setdefault(uuid, set())
        if started is not None and started.error:
            failed.add(index)
        else:
            failed.discard(index)
        if not failed:
            del self.failed[uuid]

    def _take_cut(self, key: str, value: bytes | None) -> None:
        """A paused checkpoint counts once the master has confirmed that all pservers copied before anybody
        trained again."""
        uuid = key.removeprefix(self.keys.checkpoints).removesuffix("/cut")
        cut = read_record(CheckpointCut, key, value)
        if cut is None:
            self.copied.discard(uuid)
        elif cut.copied:
            self.copied.add(uuid)


RETRY_S = 2.0
UNLOCK_S = 2.0
ATTEMPTS = 5
FILES_AT_ONCE = 50
NO_CHECKPOINTS = ("latest", "pservers")  # what lies below `checkpoints/` beside the uuids

log = telemetry.logger("checkpoints.commit")


@dataclass(frozen=True, slots=True)
class _View:
    """What etcd says about one checkpoint, all at one revision."""

    state: JobState
    state_revision: int
    latest: CheckpointLatest | None
    latest_revision: int
    parts: dict[int, KeyValue]
    term: int
    files: frozenset[str] = frozenset()


class Committer:
    """Commits checkpoints that were given to `add`."""

    def __init__(self, context: SavingContext, problem: StorageProblem) -> None:
        self._context, self._etcd, self._keys = context, context.etcd, context.keys
        self._owner, self._own_key, self.offload = context.owner, context.own_key, context.offload
        self._problem = problem
        self._pending: dict[str, PendingCheckpoint] = {}
        self.seen = CheckpointView(self._keys)
        self._evaluated_first = EvaluatedFirst(context)
        self._unreleased: Compare | None = None  # a lock that could not be released yet
        self._committing = False
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        latest = f"step {self.seen.latest.step}" if self.seen.latest else "none"
        return f"<Committer {self._context.name}: latest {latest}, {len(self._pending)} wait for other parts>"

    @property
    def busy(self) -> bool:
        """Whether a checkpoint with this process's part is being committed, or may be because the owners of
        all missing parts live."""
        self._forget_old()
        return self._committing or any(self._may_become_whole(pending) for pending in self._pending.values())

    def lost_step(self, timeline: int, goes_on: Callable[[str, int], bool]) -> int | None:
        """The newest step of a checkpoint that was begun in this timeline, is newer than the latest one, and
        will never be whole. `goes_on(uuid, step)`: whether one that this process has no part of may still be.
        None: there is none, or a newer one is on its way."""
        self._forget_old()
        latest = self.seen.latest
        since = latest.step if latest is not None and latest.timeline == timeline else -1
        newest: tuple[int, str] | None = None
        for uuid, begun in self.seen.begun.items():
            if begun.timeline == timeline and begun.step > since:
                own = self._pending.get(uuid)
                if self._may_become_whole(own) if own is not None else goes_on(uuid, begun.step):
                    return None
                newest = max(newest or (-1, ""), (begun.step, uuid))
        return newest[0] if newest is not None else None

    def add(self, pending: PendingCheckpoint) -> None:
        self._pending[pending.uuid] = pending
        self._changed.set()

    async def run(self) -> None:
        """Until cancelled. No failure here ends training."""
        async with LongLivedGroup() as group:
            group.create_task(self._watch())
            group.create_task(self._commit_complete())

    async def _watch(self) -> None:
        async with aclosing(self._etcd.watch(self._keys.checkpoints, prefix=True)) as batches:
            async for batch in batches:
                if batch.reset:
                    self.seen = CheckpointView(self._keys)
                    for kv in batch.kvs:
                        self.seen.take(kv.key, kv.value)
                for event in batch.events:
                    self.seen.take(event.kv.key, event.kv.value if event.type == "put" else None)
                self._changed.set()

    async def _commit_complete(self) -> None:
        """Commit the newest checkpoint that has all parts, again and again."""
        while True:
            await event_within(self._changed, RETRY_S if self._pending or self._unreleased else None)
            self._changed.clear()
            self._forget_old()
            await self._withdraw_failed()
            complete = [pending for pending in self._pending.values() if self.is_complete(pending)]
            if self._unreleased is not None:
                await self._unlock(self._unreleased)
            if not complete or self.seen.holder not in {"", self._owner.incarnation}:
                continue
            newest = self._next_of(complete)
            if self._evaluated_first.holds(newest, self._pending, self.seen):
                continue
            self._committing = True
            try:
                await self._finish(newest)
            except GivenUp as lost:
                self._pending.pop(newest.uuid, None)
                log.info("commit_given_up", step=newest.record.version, cause=str(lost))
            except (PeerError, LeaseLost) as error:
                log.warning("commit_delayed", step=newest.record.version, cause=str(error))
            except Exception as error:
                if not isinstance(error, OSError):  # else it is tried again, until a newer one is the latest
                    self._pending.pop(newest.uuid, None)
                self._problem.begin("commit", self._message(newest, error))
                if not isinstance(error, OSError | InvalidArgument):
                    log.exception("commit_failed", step=newest.record.version)
            else:
                self._problem.end("commit")
            finally:
                self._committing = False

    def _next_of(self, complete: Sequence[PendingCheckpoint]) -> PendingCheckpoint:
        """The newest one, after those that are evaluated: they all count, and none can be committed behind a
        newer one."""
        due = [each for each in complete if each.evaluation(self._spec)]
        return (
            min(due, key=lambda pending: pending.order)
            if due
            else max(complete, key=lambda pending: pending.order)
        )

    def _message(self, pending: PendingCheckpoint, error: Exception) -> str:
        step = pending.record.version
        return (
            f"the checkpoint of step {step} is written and cannot be committed: {error}; {advice_for(error)}"
        )

    def _forget_old(self) -> None:
        latest = self.seen.latest
        for uuid, pending in list(self._pending.items()):
            superseded = latest is not None and latest.covers(*pending.order)
            if superseded or pending.timeline != self._owner.timeline:
                del self._pending[uuid]

    async def _withdraw_failed(self) -> None:
        """Delete the own part of checkpoints of which another part failed: they never get complete, and the
        space is needed."""
        # a part whose key is still on its way is left alone: the key would come after its file is gone
        finished = [uuid for uuid, own in self._pending.items() if own.index in self.seen.parts.get(uuid, ())]
        for uuid in self.seen.failed.keys() & finished:
            pending = self._pending.pop(uuid)
            url = files.join(stored.folder(self._spec.storage, uuid), pending.file)
            part = self._keys.checkpoint_part(uuid, pending.index)
            try:
                if (await self._etcd.txn([self._own_key.held], [Delete(part)])).succeeded:
                    await self.offload(files.remove_file, url)  # never a file that a key still names
            except (OSError, PeerError, LeaseLost) as error:  # the next commit deletes it
                log.warning("part_not_withdrawn", step=pending.record.version, cause=str(error))

    def is_complete(self, pending: PendingCheckpoint) -> bool:
        if pending.cut is not None and pending.uuid not in self.seen.copied:
            return False
        return not self._missing(pending)

    def _may_become_whole(self, pending: PendingCheckpoint) -> bool:
        return self._missing(pending) <= self._context.living(pending.slots).keys()

    def _missing(self, pending: PendingCheckpoint) -> set[int]:
        return set(stored.writers(pending.layout, pending.slots)) - self.seen.parts.get(pending.uuid, set())

    async def _finish(self, pending: PendingCheckpoint) -> None:
        """Take the lock, commit, clean up, unlock. Raises GivenUp, PeerError, LeaseLost, OSError."""
        held = await try_acquire(
            self._etcd, self._keys.finish_lock, self._owner.incarnation.encode(), self._own_key.lease
        )
        if not isinstance(held, int):
            return
        lock = Compare.create(self._keys.finish_lock, "==", held)
        try:
            for _ in range(ATTEMPTS):
                latest = await self._commit(pending, lock)
                if latest is not None:
                    await self._clean_up(latest)
                    return
                if not (await self._etcd.txn([lock], [])).succeeded:
                    log.info("finish_lock_lost", step=pending.record.version)
                    return
        finally:
            await self._unlock(lock)

    async def _commit(self, pending: PendingCheckpoint, lock: Compare) -> CheckpointLatest | None:
        """The latest checkpoint: this one, or a newer one. None: a key has changed, look again. Raises
        GivenUp."""
        view = await self._look(pending.uuid)
        ref = CheckpointRef(
            uuid=pending.uuid,
            step=pending.record.version,
            timeline=pending.timeline,
            manifest="",
            origin=pending.restored,
            asked=bool(pending.operation),
            evaluation=pending.evaluation(self._spec),
            evaluated_before=pending.evaluated_before(self._spec),
            minibatches=pending.cut.minibatches if pending.cut is not None else 0,
        )
        if view.latest is not None and not is_newer(ref, view.latest):
            return view.latest
        if obstacle := self.obstacle(pending, view):
            raise GivenUp(obstacle)
        found = [view.parts[index] for index in stored.writers(pending.layout, pending.slots)]
        parts = [must_read(CheckpointPart, kv.key, kv.value) for kv in found]
        ref = ref.with_fields(on=built_on(parts))
        if unkept := [uuid for uuid in ref.on if not is_kept(uuid, view.latest, view.state.damaged)]:
            raise GivenUp(f"checkpoint {pending.uuid} builds on {unkept}, which are not kept any more")
        manifest = pending.manifest(
            self._keys.job,
            self._spec,
            parts,
            term=view.term,
            generation=view.state.generation,
            timestamp=clock.timestamp(),
        )
        name = await self.offload(writer.write_manifest, self._spec.storage, manifest)
        ref = ref.with_fields(manifest=name)
        # also of parts that were begun while the manifest was written
        needed = await self._needed(pending, ref, view)
        new = CheckpointLatest(
            uuid=pending.uuid,
            step=ref.step,
            timeline=ref.timeline,
            term=manifest.term,
            timestamp=manifest.timestamp,
            manifest=name,
            slots=pending.slots,
            kept=kept_after(view.latest, ref, view.state.damaged, self._spec.keep_checkpoints, needed),
            operation=pending.operation,
            final=is_final(pending.record, self._spec.epochs),
        )
        try:
            writes = [Put(self._keys.latest, new.to_bytes()), *self._positions(pending, view)]
            committed = await self._etcd.txn(self.proofs(view, lock), writes)
        except OutcomeUnknown:
            return None
        if not committed.succeeded:
            return None
        log.info("checkpoint_committed", step=new.step, timeline=new.timeline, checkpoint=new.uuid)
        return new

    async def _look(self, uuid: str) -> _View:
        parts = self._keys.checkpoint_parts(uuid)
        keys = self._keys
        reads = [Get(keys.state), Get(keys.latest), Get(parts, prefix=True), Get(keys.master_lock)]
        reads.append(Get(keys.latest_files, prefix=True, keys_only=True))
        found = await self._etcd.txn([], reads)
        state, latest, master = found.range(0).first, found.range(1).first, found.range(3).first
        return _View(
            state=must_read(JobState, keys.state, state.value) if state else JobState(),
            state_revision=state.mod_revision if state else 0,
            latest=read_record(CheckpointLatest, keys.latest, latest.value if latest else None),
            latest_revision=latest.mod_revision if latest else 0,
            parts={part[1]: kv for kv in found.range(2).kvs if (part := keys.part_in(kv.key))},
            term=master.create_revision if master else self._owner.term,
            files=frozenset(kv.key for kv in found.range(4).kvs),
        )

    async def _needed(self, pending: PendingCheckpoint, new: CheckpointRef, view: _View) -> frozenset[str]:
        """uuids: of the best evaluation, of the one that runs, of what newer parts build on, and the one from
        which the first evaluation that is not over can be made again."""
        key = self._keys.evaluation_status
        found = await self._etcd.txn([], [Get(key), Get(self._keys.checkpoints, prefix=True)])
        followed = found.range(0).first
        status = read_record(EvaluationStatus, key, followed.value if followed else None)
        bases = frozenset(self._bases(found.range(1).kvs, pending))
        status = status or EvaluationStatus()
        kept = (new, *(view.latest.kept if view.latest is not None else ()))
        back = way_back(self._spec, status.settled + 1, kept, new, view.state.damaged)
        return bases | status.checkpoints | ({back.uuid} if back is not None else set())

    def _bases(self, kvs: Sequence[KeyValue], pending: PendingCheckpoint) -> Iterator[str]:
        """The checkpoints that parts of newer ones than `pending` build on, or may."""
        for kv in kvs:
            part = read_record(CheckpointPart, kv.key, kv.value) if self._keys.part_in(kv.key) else None
            begun = (
                read_record(CheckpointStarted, kv.key, kv.value) if self._keys.started_in(kv.key) else None
            )
            if part is not None and (part.timeline, part.step) > pending.order:
                yield from (link.uuid for link in part.chain)
            if begun is not None and begun.on and (begun.timeline, begun.step) > pending.order:
                yield begun.on

    @staticmethod
    def obstacle(pending: PendingCheckpoint, view: _View) -> str:
        """Why this must not become the latest checkpoint, or ""."""
        if view.state.timeline != pending.timeline or view.state.phase is Phase.ROLLING_BACK:
            return f"the job left timeline {pending.timeline}"
        missing = [
            index for index in stored.writers(pending.layout, pending.slots) if index not in view.parts
        ]
        return f"checkpoint {pending.uuid} lacks the parts of {pserver_names(missing)}" if missing else ""

    def proofs(self, view: _View, lock: Compare) -> list[Compare]:
        """Compares that hold as long as nothing has changed since `view`."""
        # etcd limits the compares. No part is deleted before a newer checkpoint is latest, so comparing
        # latest covers the rest
        parts = list(view.parts.values())[: MAX_OPERATIONS - 3]
        return [
            lock,
            Compare.mod(self._keys.state, "==", view.state_revision),
            Compare.mod(self._keys.latest, "==", view.latest_revision),
            *(Compare.create(kv.key, "==", kv.create_revision) for kv in parts),
        ]

    def _positions(self, pending: PendingCheckpoint, view: _View) -> list[Put | Delete]:
        """Writes of `latest/files/<trainer>`, for people; the manifest has all positions."""
        readers = pending.cut.readers if pending.cut is not None else {}
        named = sorted(readers.items())[:FILES_AT_ONCE]
        puts = {self._keys.latest_file(trainer): paused for trainer, paused in named}
        stale = sorted(view.files - puts.keys())[:FILES_AT_ONCE]
        return [
            *(Put(key, paused.to_bytes()) for key, paused in puts.items()),
            *(Delete(key) for key in stale),
        ]

    async def _clean_up(self, latest: CheckpointLatest) -> None:
        """Delete checkpoints that are older than `latest` and not kept. Files go first, so the keys say what
        is left to delete."""
        kept = {uuid for ref in latest.kept for uuid in (ref.uuid, *ref.on)}
        found = await self._etcd.range(self._keys.checkpoints, prefix=True)
        stale: dict[str, None] = {}
        for kv in found.kvs:
            uuid, *rest = kv.key.removeprefix(self._keys.checkpoints).split("/")
            if not rest or uuid in (*kept, *NO_CHECKPOINTS):
                continue
            place = read_record(CheckpointPlace, kv.key, kv.value)  # all records there have these fields
            if place is not None and (place.timeline, place.step) < (latest.timeline, latest.step):
                stale[uuid] = None
        if not stale:
            return
        try:
            await self.offload(writer.remove, self._spec.storage, list(stale))
        except OSError as error:
            log.warning("checkpoints_not_deleted", checkpoints=list(stale), cause=str(error))
            return
        for uuid in stale:
            await self._etcd.delete(self._keys.checkpoint(uuid), prefix=True)
        log.info("checkpoints_deleted", checkpoints=list(stale), kept=[ref.step for ref in latest.kept])

    async def _unlock(self, lock: Compare) -> None:
        """Tried again later if etcd is away; at worst the lock ends with the lease."""
        self._unreleased = lock
        try:
            await self._etcd.txn([lock], [Delete(self._keys.finish_lock)], timeout_s=UNLOCK_S)
            self._unreleased = None
        except PeerError as error:
            log.warning("finish_lock_left", cause=str(error))

    @property
    def _spec(self) -> JobSpec:
        return self._context.spec
