"""A checkpoint becomes the latest one: done by whichever pserver first sees that all parts are there.

    all parts there -> finish_lock -> manifest file -> latest -> older ones deleted -> unlock

`latest` is written in one transaction that proves: the lock is held, every part is there, the job is still in the timeline
of these parts and not rolling back, and `latest` is what it was when this was found newer. Whoever wakes up late proves
none of it, and file names are unique per writer or content, so it overwrites nothing that `latest` names.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass, field

from pydantic import ValidationError

from pserver_service import disk
from pserver_service.core.snapshot import is_newer, kept_after
from pserver_service.disk import Offload
from pserver_service.registration import Registration
from pserver_service.service import Pserver
from shared import checkpoints, clock, telemetry
from shared.directory import Directory
from shared.errors import PeerError
from shared.etcd import Compare, Delete, Etcd, Get, KeyValue, LeaseLost, OutcomeUnknown, Put
from shared.etcd.lock import try_acquire
from shared.etcd.operations import MAX_OPERATIONS
from shared.keys import Keys
from shared.manifest import CheckpointLatest, CheckpointPart, CheckpointRef, CheckpointStarted, Manifest
from shared.messages import StepRecord
from shared.records import JobSpec, JobState, Mode, Phase, SlotMap
from shared.slots import Layout

RETRY_S = 2.0
UNLOCK_S = 2.0
ATTEMPTS = 5

log = telemetry.logger("pserver.commit")


class GivenUp(Exception):
    """The index, a part or the timeline of what was begun is no more."""


@dataclass(frozen=True, slots=True)
class Written:
    """A checkpoint that this pserver's part is in; what the manifest says beside the parts."""

    uuid: str
    timeline: int
    slots: SlotMap
    layout: Layout
    mode: Mode
    lanes: int
    record: StepRecord
    restored: str

    @property
    def order(self) -> tuple[int, int]:
        return self.timeline, self.record.version


@dataclass(slots=True)
class _Seen:
    """What the watch of `checkpoints/` knows."""

    parts: dict[str, set[int]] = field(default_factory=dict)
    holder: str = ""
    latest: CheckpointLatest | None = None


@dataclass(frozen=True, slots=True)
class _View:
    """What etcd says about one checkpoint, all at one revision."""

    state: JobState
    state_revision: int
    latest: CheckpointLatest | None
    latest_revision: int
    parts: dict[int, KeyValue]
    term: int


class Committer:
    """`add` what has this pserver's part; `offload` runs what blocks."""

    def __init__(
        self,
        etcd: Etcd,
        keys: Keys,
        directory: Directory,
        pserver: Pserver,
        registration: Registration,
        offload: Offload,
    ) -> None:
        self._etcd = etcd
        self._keys = keys
        self._directory = directory
        self._pserver = pserver
        self._registration = registration
        self._offload = offload
        self._written: dict[str, Written] = {}
        self._seen = _Seen()
        self._left: Compare | None = None  # a lock that could not be given back yet
        self._news = asyncio.Event()

    def __repr__(self) -> str:
        latest = f"step {self._seen.latest.step}" if self._seen.latest else "none"
        return f"<Committer {self._pserver.index}: latest {latest}, {len(self._written)} wait for other parts>"

    def add(self, written: Written) -> None:
        self._written[written.uuid] = written
        self._news.set()

    async def run(self) -> None:
        """Until cancelled; nothing that goes wrong here ends training."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch())
            group.create_task(self._finish_whole())

    async def _watch(self) -> None:
        async with aclosing(self._etcd.watch(self._keys.checkpoints, prefix=True)) as batches:
            async for batch in batches:
                if batch.reset:
                    self._seen = _Seen()
                    for kv in batch.kvs:
                        self._see(kv.key, kv.value)
                for event in batch.events:
                    self._see(event.kv.key, event.kv.value if event.type == "put" else None)
                self._news.set()

    def _see(self, key: str, value: bytes | None) -> None:
        if key == self._keys.finish_lock:
            self._seen.holder = (value or b"").decode(errors="replace")
        elif key == self._keys.latest:
            self._seen.latest = read_latest(value)
        elif "/finished/" in key:
            uuid, _, index = key.removeprefix(self._keys.checkpoints).split("/")
            parts = self._seen.parts.setdefault(uuid, set())
            if value is None:
                parts.discard(int(index))
                if not parts:
                    del self._seen.parts[uuid]
            else:
                parts.add(int(index))

    async def _finish_whole(self) -> None:
        """Commit the newest checkpoint that has all its parts, as often as there is a new one."""
        while True:
            try:
                async with asyncio.timeout(RETRY_S if self._written or self._left else None):
                    await self._news.wait()
            except TimeoutError:
                pass
            self._news.clear()
            self._forget_old()
            whole = [written for written in self._written.values() if self._is_whole(written)]
            if self._left is not None:
                await self._unlock(self._left)
            if not whole or self._seen.holder not in {"", self._pserver.incarnation}:
                continue
            newest = max(whole, key=lambda written: written.order)
            try:
                await self._finish(newest)
            except GivenUp as lost:
                self._written.pop(newest.uuid, None)
                log.info("commit_given_up", step=newest.record.version, cause=str(lost))
            except (PeerError, LeaseLost) as error:
                log.warning("commit_delayed", step=newest.record.version, cause=str(error))
            except Exception as error:
                self._written.pop(newest.uuid, None)
                self._pserver.checkpoint_error = (
                    f"the checkpoint of step {newest.record.version} was not committed: {error}"
                )
                log.exception("commit_failed", step=newest.record.version)

    def _forget_old(self) -> None:
        latest = self._seen.latest
        for uuid, written in list(self._written.items()):
            superseded = latest is not None and written.order <= (latest.timeline, latest.step)
            if superseded or written.timeline != self._pserver.timeline:
                del self._written[uuid]

    def _is_whole(self, written: Written) -> bool:
        return self._seen.parts.get(written.uuid, set()).issuperset(checkpoints.writers(written.layout, written.slots))

    async def _finish(self, written: Written) -> None:
        """Take the lock, commit, clean up, unlock. Raises GivenUp, PeerError, LeaseLost, OSError."""
        held = await try_acquire(
            self._etcd, self._keys.finish_lock, self._pserver.incarnation.encode(), self._registration.lease
        )
        if not isinstance(held, int):
            return
        lock = Compare.create(self._keys.finish_lock, "==", held)
        try:
            for _ in range(ATTEMPTS):
                latest = await self._commit(written, lock)
                if latest is not None:
                    await self._clean_up(latest)
                    return
                if not (await self._etcd.txn([lock], [])).succeeded:
                    log.info("finish_lock_lost", step=written.record.version)
                    return
        finally:
            await self._unlock(lock)

    async def _commit(self, written: Written, lock: Compare) -> CheckpointLatest | None:
        """What is latest now: this, or a newer one; None: something moved, look again. Raises GivenUp."""
        view = await self._look(written.uuid)
        ref = CheckpointRef(uuid=written.uuid, step=written.record.version, timeline=written.timeline, manifest="")
        if view.latest is not None and not is_newer(ref, view.latest):
            return view.latest
        if obstacle := self._obstacle(written, view):
            raise GivenUp(obstacle)
        manifest = self._manifest(written, view)
        name = await self._offload(disk.write_manifest, self._spec.storage, manifest)
        ref = ref.model_copy(update={"manifest": name})
        new = CheckpointLatest(
            uuid=written.uuid,
            step=ref.step,
            timeline=ref.timeline,
            term=manifest.term,
            timestamp=manifest.timestamp,
            manifest=name,
            slots=written.slots,
            kept=kept_after(view.latest, ref, written.restored, self._spec.keep_checkpoints),
        )
        try:
            committed = await self._etcd.txn(self._proofs(view, lock), [Put(self._keys.latest, new.to_bytes())])
        except OutcomeUnknown:
            return None
        if not committed.succeeded:
            return None
        log.info("checkpoint_committed", step=new.step, timeline=new.timeline, checkpoint=new.uuid)
        return new

    async def _look(self, uuid: str) -> _View:
        parts = self._keys.checkpoint_parts(uuid)
        read = await self._etcd.txn(
            [], [Get(self._keys.state), Get(self._keys.latest), Get(parts, prefix=True), Get(self._keys.master_lock)]
        )
        state, latest, master = read.range(0).first, read.range(1).first, read.range(3).first
        return _View(
            state=JobState.model_validate_json(state.value) if state else JobState(),
            state_revision=state.mod_revision if state else 0,
            latest=read_latest(latest.value if latest else None),
            latest_revision=latest.mod_revision if latest else 0,
            parts={int(self._keys.name_of(kv.key)): kv for kv in read.range(2).kvs},
            term=master.create_revision if master else self._pserver.term,
        )

    @staticmethod
    def _obstacle(written: Written, view: _View) -> str:
        """Why this must not become the latest checkpoint, or ""."""
        if view.state.timeline != written.timeline or view.state.phase is Phase.ROLLING_BACK:
            return f"the job left timeline {written.timeline}"
        missing = [index for index in checkpoints.writers(written.layout, written.slots) if index not in view.parts]
        return f"checkpoint {written.uuid} lacks the parts of pservers {missing}" if missing else ""

    def _proofs(self, view: _View, lock: Compare) -> list[Compare]:
        """That nothing has moved since `view`."""
        # etcd takes so many compares; no part is deleted before a newer one is latest, so the one of latest covers the rest
        parts = list(view.parts.values())[: MAX_OPERATIONS - 3]
        return [
            lock,
            Compare.mod(self._keys.state, "==", view.state_revision),
            Compare.mod(self._keys.latest, "==", view.latest_revision),
            *(Compare.create(kv.key, "==", kv.create_revision) for kv in parts),
        ]

    def _manifest(self, written: Written, view: _View) -> Manifest:
        parts = [view.parts[index] for index in checkpoints.writers(written.layout, written.slots)]
        return Manifest(
            job=self._keys.job,
            uuid=written.uuid,
            step=written.record.version,
            timeline=written.timeline,
            term=view.term,
            generation=view.state.generation,
            mode=written.mode,
            lanes=written.lanes,
            seed=self._spec.seed,
            spec_digest=checkpoints.spec_digest(self._spec),
            timestamp=clock.timestamp(),
            slots=written.slots,
            layout=written.layout,
            record=written.record,
            parts=tuple(CheckpointPart.model_validate_json(kv.value) for kv in parts),
        )

    async def _clean_up(self, latest: CheckpointLatest) -> None:
        """Delete what is older than `latest` and not kept: the files first, so that keys tell of what is left to do."""
        kept = {ref.uuid for ref in latest.kept}
        found = await self._etcd.range(self._keys.checkpoints, prefix=True)
        stale: dict[str, None] = {}
        for kv in found.kvs:
            uuid, *rest = kv.key.removeprefix(self._keys.checkpoints).split("/")
            if rest and uuid not in kept and _order(kv) < (latest.timeline, latest.step):
                stale[uuid] = None
        if not stale:
            return
        try:
            await self._offload(disk.remove, self._spec.storage, list(stale))
        except OSError as error:
            log.warning("checkpoints_not_deleted", checkpoints=list(stale), cause=str(error))
            return
        for uuid in stale:
            await self._etcd.delete(self._keys.checkpoint(uuid), prefix=True)
        log.info("checkpoints_deleted", checkpoints=list(stale), kept=[ref.step for ref in latest.kept])

    async def _unlock(self, lock: Compare) -> None:
        """Tried again later if etcd is away; at worst the lock goes with the lease."""
        self._left = lock
        try:
            await self._etcd.txn([lock], [Delete(self._keys.finish_lock)], timeout_s=UNLOCK_S)
            self._left = None
        except PeerError as error:
            log.warning("finish_lock_left", cause=str(error))

    @property
    def _spec(self) -> JobSpec:
        assert self._directory.spec is not None, "the index is claimed only with the spec known"
        return self._directory.spec


def read_latest(value: bytes | None) -> CheckpointLatest | None:
    """None: there is none, or it cannot be read (which is logged)."""
    if value is None:
        return None
    try:
        return CheckpointLatest.model_validate_json(value)
    except ValidationError as error:
        log.warning("value_unreadable", key="checkpoints/latest", cause=str(error))
        return None


def _order(kv: KeyValue) -> tuple[int, int]:
    """(timeline, step) of anything below `checkpoints/<uuid>/`; all these records say it."""
    started = CheckpointStarted.model_validate_json(kv.value)
    return started.timeline, started.step
