"""A masterless job at every trainer: its state (WatchedJob), and how each writes it by itself (SharedWriter).

One watch of all the job's keys keeps the state current:

    snapshot (file tables loaded) ─► job ◄─ apply ── batches: what other processes wrote, in the order of etcd
                                      └─ hold() ─► draft: decided on, written; landed ─► the draft is the job

While a transaction is under way the batches wait, so that the job is exactly at the commit that the
transaction compares. Each commit has its transaction's name: `successor` tells which one came after a given
commit, and so whether a write without an answer has landed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import fields, replace
from typing import Any, TypeVar

from master_service.core.changes import Event
from master_service.core.queue.file_table import FileTable
from master_service.core.queue.open_tasks import Repeats
from master_service.core.queue.task_queue import TaskQueue
from master_service.core.state.job import BESIDE, Job, Operations
from master_service.storage.job_storage import JobStorage
from master_service.store import schema
from master_service.store.schema import MembersWatch
from master_service.store.writer import ATTEMPT_S, PAUSE_S, Group, GroupCommit, HeldLock, LockLost
from trireme_shared.platform.etcd import Compare, Etcd, Get, KeyValue, Put, TxnResult, WatchBatch, WatchEvent
from trireme_shared.platform.etcd.fenced import FencedWrite
from trireme_shared.platform.etcd.reading import must_read, read_record
from trireme_shared.platform.runtime import clock, ids, telemetry
from trireme_shared.platform.runtime.clock import event_within
from trireme_shared.platform.runtime.containment import backoff_s
from trireme_shared.protocol.errors import DatasetError, NotFound, NotReady, PeerError, StorageUnreachable
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import JobSpec, TaskMeta
from trireme_shared.protocol.records.tasks import TrainerProgress

OPEN_AGAIN_S = 1.0
REMEMBERED_COMMITS = 256
LATE_S = 5.0

Part = TypeVar("Part", TaskQueue, Operations)
log = telemetry.logger("watched_job")


class WatchedJob:
    """`on_members` is called after each change of `job.members`. Run `run()` in a TaskGroup."""

    def __init__(
        self, etcd: Etcd, keys: Keys, storage: Callable[[JobSpec], JobStorage], on_members: Callable[[], None]
    ) -> None:
        self.spec: JobSpec | None = None
        self.progress: dict[str, TrainerProgress] = {}
        self.commit_revision = 0
        self._etcd, self._keys, self._storage, self._on_members = etcd, keys, storage, on_members
        self._members = MembersWatch(etcd, keys, lambda _: None)
        self._range = keys.prefix, keys.prefix[:-1] + "0"  # "0" follows "/"
        self._job: Job | None = None
        self._counted: tuple[FileTable, FileTable | None] | None = None
        self._obstacle = "the holder of the sweep lock has not opened the job yet"
        self._batches: deque[WatchBatch] = deque()
        self.held = False
        self._through = 0
        self._seen_commit = 0
        self._successors: dict[int, tuple[int, bytes]] = {}
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<WatchedJob at commit {self.commit_revision}: {self._job or self._obstacle}>"

    @property
    def job(self) -> Job:
        """To read. Raises NotReady."""
        if self._job is None:
            raise NotReady(f"job {self._keys.job} is not open here: {self._obstacle}; ask again")
        return self._job

    @property
    def is_open(self) -> bool:
        return self._job is not None

    async def until(self, condition: Callable[[WatchedJob], bool], what: str) -> None:
        """Wait for as long as it takes; every LATE_S the log says for what."""
        while not condition(self):
            if not await event_within(self._changed, LATE_S):
                log.warning("still_waiting", what=what, job=repr(self))

    async def run(self) -> None:
        """Follow etcd until cancelled. Raises Conflict if the counted dataset is not the job's,
        StateUnreadable."""
        while True:
            async with aclosing(self._etcd.watch(*self._range)) as batches:
                async for batch in batches:
                    if batch.reset:
                        await self._prepare({kv.key: kv for kv in batch.kvs})
                    self._receive(batch)
                    if self._job is None and any(
                        event.kv.key == self._keys.task_meta for event in batch.events
                    ):
                        break  # opened by the holder of the sweep lock: a snapshot to start from

    # ---------------------------------------------------------------- for the writer

    def hold(self) -> Job:
        """A draft. Until `landed` or `release` the job stays at `commit_revision`. Raises NotReady."""
        draft = draft_of(self.job)
        self.held = True
        return draft

    def landed(self, draft: Job, revision: int) -> None:
        """Since `revision` etcd holds what the draft holds."""
        self._job, self._through, self.commit_revision = draft, revision, revision
        self.release()

    def release(self) -> None:
        self.held = False
        self._apply_batches()

    async def reached(self, commit: int) -> None:
        """Wait until the watch has delivered the commit of that revision."""
        await self.until(lambda _: self._seen_commit >= commit, f"the watch to reach revision {commit}")

    def successor(self, commit: int) -> tuple[int, bytes] | None:
        """(revision, name) of the commit right after `commit`; None if it is not known (yet, or any more)."""
        return self._successors.get(commit)

    # ---------------------------------------------------------------- what other processes wrote

    def _receive(self, batch: WatchBatch) -> None:
        for kv in batch.kvs if batch.reset else [event.kv for event in batch.events]:
            if kv.key == self._keys.commit:
                if batch.reset:
                    self._successors.clear()
                else:
                    self._successors[self._seen_commit] = kv.mod_revision, kv.value
                self._seen_commit = kv.mod_revision
        while len(self._successors) > REMEMBERED_COMMITS:
            del self._successors[next(iter(self._successors))]
        self._batches.append(batch)
        if not self.held:
            self._apply_batches()
        self._changed.set()
        self._changed = asyncio.Event()

    def _apply_batches(self) -> None:
        while self._batches:
            batch = self._batches.popleft()
            moved = self._members.take(batch, *self._range)
            if batch.reset:
                self._reopen({kv.key: kv for kv in batch.kvs})
                for kv in batch.kvs:
                    if kv.key.startswith(self._keys.progresses):
                        self._take_progress(kv.key, kv.value)
            for event in batch.events:
                self._take(event)
            if self._job is not None and (moved or batch.reset):
                self._job.members = self._members.members()
                self._on_members()

    def _take(self, event: WatchEvent) -> None:
        """One write. Those of this process are in the job already if they landed with a draft."""
        key, revision = event.kv.key, event.kv.mod_revision
        if key.startswith(self._keys.progresses):
            self._take_progress(key, event.kv.value if event.type == "put" else None)
        elif key == self._keys.spec and event.type == "put":
            self._take_spec(event.kv)
        elif self._job is not None and revision > self._through:
            schema.apply_event(self._job, self._keys, event, clock.monotonic())
            if key == self._keys.commit:
                self.commit_revision = revision

    def _take_spec(self, kv: KeyValue) -> None:
        """Only the numbers of members can differ."""
        self.spec = must_read(JobSpec, kv.key, kv.value)
        if self._job is not None:
            self._job.spec = self.spec

    def _take_progress(self, key: str, value: bytes | None) -> None:
        """`value` None: the key is gone."""
        trainer = self._keys.name_of(key)
        report = read_record(TrainerProgress, key, value)
        if value is None:
            self.progress.pop(trainer, None)
        if report is None:
            return
        self.progress[trainer] = report
        if self._job is None:
            return
        self._job.budget.started |= report.step is not None
        self._job.speeds.note(trainer, report.lane_s, report.least_lane_s, clock.monotonic())
        for task in report.tasks:
            try:
                queue = self._job.queue_of(task.task_id)
            except NotFound:
                continue
            held = queue.pending.get(task.task_id)
            if held and held.record.find(task.attempt, trainer) and held.record.epoch == task.epoch:
                now = clock.monotonic()
                alive = queue.sign_of_life(task.task_id, task.minibatches, now, task.work, task.waits_for)
                if alive and queue.kind in BESIDE:
                    self._job.training.grant_again(now)  # training may wait for the evaluation

    # ---------------------------------------------------------------- opening

    async def _prepare(self, found: dict[str, KeyValue]) -> None:
        """Load the file tables of a job that is open, once. They are in the job's storage, which every
        trainer can read."""
        meta = found.get(self._keys.task_meta)
        if meta is None or self._counted is not None:
            return
        spec = must_read(JobSpec, self._keys.spec, found[self._keys.spec].value)
        known = must_read(TaskMeta, meta.key, meta.value)
        storage = self._storage(spec)
        while self._counted is None:
            try:
                table = await storage.load_table(known.digest)
                evaluation = (
                    await storage.load_table(known.evaluation_digest) if known.evaluation_digest else None
                )
                self._counted = table, evaluation
            except (DatasetError, NotFound, StorageUnreachable) as error:
                self._obstacle = error.message
                log.warning("file_table_unreadable", cause=error.message)
                await asyncio.sleep(ids.jitter(OPEN_AGAIN_S))

    def _reopen(self, found: dict[str, KeyValue]) -> None:
        """From a snapshot: at the start, or when etcd's history no longer reaches back to the last batch.
        Raises Conflict."""
        keys = self._keys
        if (kv := found.get(keys.spec)) is not None:
            self.spec = must_read(JobSpec, kv.key, kv.value)
        self.progress.clear()
        commit = found.get(keys.commit)
        self.commit_revision = self._through = commit.mod_revision if commit else 0
        if self._counted is None or self.spec is None or keys.task_meta not in found:
            return
        meta = must_read(TaskMeta, keys.task_meta, found[keys.task_meta].value)
        job = Job.open(self.spec, *self._counted, meta)
        schema.restore(job, keys, found, clock.monotonic())
        job.events.begin(self.commit_revision)
        self._job = job
        log.info("job_opened", job=repr(job))


def draft_of(job: Job) -> Job:
    """A job that changes apart from the original. Signs of life and deadlines stay common."""
    queues = {kind: _forked(queue) for kind, queue in job.queues.items()}
    return replace(
        job,
        queues=queues,
        operations=_forked(job.operations),
        evaluations=dict(job.evaluations),
        budget=replace(job.budget),
        events=job.events.copy(),
    )


def _forked(part: Part) -> Part:
    values = {field.name: getattr(part, field.name) for field in fields(part)}
    owned: dict[str, Any] = {
        name: value.copy() for name, value in values.items() if isinstance(value, dict | Repeats)
    }
    return replace(part, **owned)


FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.05


class SharedWriter(GroupCommit):
    """The writer of this process: every trainer of a masterless job decides and writes by itself.

        waiting decisions --taken together on a draft--> one txn --landed--> the draft is the job
            |                                               |                  `-> answers, events
            |                                               |- another writer was first: wait for its
            |                                               |  commit, decide again
            |                                               `- no answer: the watch shows which commit
            |                                                  came next
            `- an error instead of a write: answered only if `tasks/commit` is still where the draft began,
               else decided again

    Each txn compares the mod_revision of `tasks/commit` with the commit that its draft began from, and writes
    that key. So commits form one chain, and a decision counts only for the state it was taken on. Decisions
    of the sweeper also compare the create_revision of the sweep lock: a trainer that lost the lock cannot
    write them any more.

    `losses`: how often another writer was first.
    """

    def __init__(
        self, etcd: Etcd, keys: Keys, view: WatchedJob, on_events: Callable[[Sequence[Event]], None]
    ) -> None:
        super().__init__(keys, on_events)
        self.losses = 0
        self._etcd, self._view = etcd, view
        self._lost_in_a_row = 0

    @property
    def job(self) -> Job:
        """Raises NotReady."""
        return self._view.job

    def fence(self, lock: HeldLock | None) -> list[Compare]:
        """What a write depends on."""
        chain = Compare.mod(self._keys.commit, "==", self._view.commit_revision)
        return [chain, lock.compare()] if lock else [chain]

    async def _turn(self) -> None:
        lock = self._waiting[0].lock
        try:
            draft = self._view.hold()
            group = self._decide_waiting(draft)
            done = await (self._commit(draft, group, lock) if group.writes else self._confirm(group))
        except PeerError as error:
            self._refuse(error, lock)
            return
        finally:
            self._view.release()
        if done:
            self._answer(group)
            return
        self._waiting.extendleft(reversed(self._taken))
        self._taken.clear()
        pause_s = backoff_s(self._lost_in_a_row + 1, FIRST_PAUSE_S, LONGEST_PAUSE_S)
        await asyncio.sleep(ids.jitter(pause_s))

    async def _confirm(self, group: Group) -> bool:
        """Errors are answered only if the draft began from the newest commit. False: it did not. Raises
        PeerError."""
        if all(error is None for _, _, error in group.outcomes):
            return True
        marker = await self._etcd.get(self._keys.commit, timeout_s=ATTEMPT_S)
        at = marker.mod_revision if marker else 0
        if at == self._view.commit_revision:
            return True
        await self._view.reached(at)
        return False

    def _refuse(self, error: PeerError, lock: HeldLock | None) -> None:
        """All that were taken, and all that wait under the same lock, get `error`."""
        while self._waiting and self._waiting[0].lock is lock:
            self._taken.append(self._waiting.popleft())
        for entry in self._taken:
            if not entry.future.done():
                entry.future.set_exception(error)
        self._taken.clear()

    async def _commit(self, draft: Job, group: Group, lock: HeldLock | None) -> bool:
        """Whether it landed; then the draft is the job. False: another writer committed first. Raises
        LockLost."""
        name, known = ids.new_id("commit").encode(), self._view.commit_revision

        def check() -> None:
            if lock is not None and not lock.lease.alive:
                raise LockLost("the sweeper's lease ran out before a write; another trainer sweeps now")

        async def landed(found: TxnResult) -> int:
            """An earlier attempt had landed if the commit after `known` has its name."""
            marker = found.range(0).first
            at = marker.mod_revision if marker else 0
            if at == known:
                raise LockLost(
                    "the sweep lock is lost, or a checkpoint became the newest meanwhile; the next "
                    "sweeper decides"
                )
            await self._view.reached(at)
            revision, successor = self._view.successor(known) or (0, b"")
            return revision if successor == name else 0

        writes, reads = [*group.writes, Put(self._keys.commit, name)], [Get(self._keys.commit)]
        write = FencedWrite(self._etcd, [*self.fence(lock), *group.fence], writes, reads, landed, ATTEMPT_S)
        outcome = await write.until_answered(check, PAUSE_S)
        if isinstance(outcome, int):
            self._view.landed(draft, outcome)
            self.commits += 1
            self._lost_in_a_row = 0
            return True
        self.losses += 1
        self._lost_in_a_row += 1
        return False
