"""What the changes of a job are in etcd: the keys and values that they write, the job that keys restore, and
how many writes fit together.

etcd refuses a transaction with more operations or bytes, and then no master could go on:
decisions' writes --takes?--> add --one transaction--> etcd
too large alone --> TooLarge, for its caller only

MembersWatch watches trainers, parameter servers with the initialisation, and checkpoints, and shows all of
them as one `Members` value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import lru_cache
from typing import TypeVar

from master_service.core.changes import (
    Change,
    DesirePservers,
    DropAnswer,
    DropCut,
    DropDiscarded,
    DropEvaluation,
    DropEvaluationsAfter,
    DropEvents,
    DropMigration,
    DropOperation,
    DropPause,
    DropPending,
    DropRequeued,
    ForgetParameters,
    JobRecord,
    NextEpoch,
    PutCursor,
    PutCut,
    PutDiscarded,
    PutEvents,
    PutPause,
    PutPending,
    PutRequeued,
    RequireLatest,
    RestartQueue,
)
from master_service.core.state.job import LEFT_KEPT, Job, Members
from master_service.core.state.kept import EventLog
from trireme_shared.platform.etcd import Compare, Delete, Etcd, KeyValue, Put, WatchBatch, WatchEvent
from trireme_shared.platform.etcd.reading import must_read, read_below, read_number, read_record, understood
from trireme_shared.platform.runtime.containment import LongLivedGroup
from trireme_shared.protocol.errors import Conflict, TooLarge
from trireme_shared.protocol.evaluations import Evaluation, EvaluationStatus
from trireme_shared.protocol.events import EventChunk
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import (
    DiscardedTask,
    EvaluationSums,
    JobSpec,
    JobState,
    PendingTask,
    PserverMember,
    RequeuedTask,
    SlotMap,
    TaskMeta,
    TrainerList,
    TrainerMember,
    ValidationSums,
)
from trireme_shared.protocol.records.assignments import GivenNumbers, Migration
from trireme_shared.protocol.records.checkpoints import CheckpointLatest, OwnCheckpoints
from trireme_shared.protocol.records.job import Losses
from trireme_shared.protocol.records.layout import Layout
from trireme_shared.protocol.records.operations import CheckpointRequest, KeptAnswer, Operation, OperationKind
from trireme_shared.protocol.records.queue import FailureCounts

MAX_OPERATIONS = 100  # etcd takes 128
MAX_BYTES = 512 * 1024  # of keys and values; etcd takes 1.5 MiB

Write = Put | Delete
K = TypeVar("K")
V = TypeVar("V")


def operations(keys: Keys, job: Job | None, changes: Iterable[Change]) -> list[Put | Delete]:
    """The fewest operations that have the effect of `changes` in order. No key is written twice. Only
    NextEpoch needs the job."""
    by_key: dict[str, Put | Delete] = {}
    for change in changes:
        merge(by_key, _operations(keys, job, change))
    return list(by_key.values())


def compares(keys: Keys, changes: Iterable[Change]) -> list[Compare]:
    """What the transaction of `changes` depends on, beside its chain."""
    return [
        Compare.mod(keys.latest, "==", change.revision)
        for change in changes
        if isinstance(change, RequireLatest)
    ]


def _operations(keys: Keys, job: Job | None, change: Change) -> tuple[Put | Delete, ...]:
    match change:
        case PutCursor(stream, position):
            return (Put(keys.cursor(stream), str(position).encode()),)
        case PutPending(task_id, task):
            return (Put(keys.pending(task_id), task.to_bytes()),)
        case DropPending(task_id):
            return (Delete(keys.pending(task_id)),)
        case PutPause(pause, lease):
            return (Put(keys.pause, pause.to_bytes(), lease),)
        case DropPause():
            return (Delete(keys.pause),)
        case PutCut(uuid, cut):
            return (Put(keys.checkpoint_cut(uuid), cut.to_bytes()),)
        case DropCut(uuid):
            return (Delete(keys.checkpoint_cut(uuid)),)
        case DesirePservers(count):
            return (Put(keys.pservers_desired, str(count).encode()),)
        case DropMigration():
            return (Delete(keys.migration),)
        case RequireLatest():
            return ()
        case PutRequeued(task_id, back):
            return (Put(keys.requeued(task_id), back.to_bytes()),)
        case DropRequeued(task_id):
            return (Delete(keys.requeued(task_id)),)
        case PutDiscarded(task_id, lost, _):
            return (Put(keys.discarded(f"{task_id}@{lost.epoch}"), lost.to_bytes()),)
        case DropDiscarded(task_id, epoch):
            return (Delete(keys.discarded(f"{task_id}@{epoch}")),)
        case TrainerList():
            before = job.trainers if job is not None else TrainerList()
            difference = Put(keys.trainers_change, before.change_to(change).to_bytes())
            return (Put(keys.trainer_list, change.to_bytes()), difference)
        case Operation():
            return (Put(keys.operation(change.operation_id), change.to_bytes()), *_request(keys, change))
        case DropOperation(operation_id):
            return (Delete(keys.operation(operation_id)),)
        case Evaluation():
            return (Put(keys.evaluation_result(change.number), change.to_bytes()),)
        case DropEvaluation(number):
            return (Delete(keys.evaluation_result(number)),)
        case DropEvaluationsAfter(number):
            # "0" follows "/"
            return (Delete(keys.evaluation_result(number + 1), keys.evaluations[:-1] + "0"),)
        case KeptAnswer():
            return (Put(keys.answer(change.key), change.to_bytes()),)
        case DropAnswer(key):
            return (Delete(keys.answer(key)),)
        case PutEvents(first, _, value):
            return (Put(keys.event_chunk(first), value),)
        case DropEvents(before):
            return (Delete(keys.events, keys.event_chunk(before)),)
        case ForgetParameters():
            return (Delete(keys.layout), Delete(keys.init_done))
        case RestartQueue(kind):
            name = kind.lower()  # "." follows "-"
            ranges = [
                Delete(of(f"{name}-"), of(f"{name}.")) for of in (keys.pending, keys.requeued, keys.discarded)
            ]
            return (Delete(keys.cursor(name)), *ranges)
        case NextEpoch(epoch):
            assert job is not None
            meta = job.meta.with_fields(epoch=epoch)
            entries = (keys.cursor, keys.pending, keys.requeued)
            return (*(Delete(of("0"), of(":")) for of in entries), Put(keys.task_meta, meta.to_bytes()))
        case _:
            return (Put(_places(keys)[type(change)], change.to_bytes()),)


@lru_cache(maxsize=8)
def _places(keys: Keys) -> dict[type[JobRecord], str]:
    """Of the records that the job has once."""
    return {
        JobSpec: keys.spec,
        JobState: keys.state,
        Migration: keys.migration,
        GivenNumbers: keys.given,
        TrainerList: keys.trainer_list,
        SlotMap: keys.slots,
        FailureCounts: keys.failures,
        EvaluationSums: keys.evaluation,
        ValidationSums: keys.validation,
        EvaluationStatus: keys.evaluation_status,
        Losses: keys.losses,
    }


def _request(keys: Keys, operation: Operation) -> tuple[Put | Delete, ...]:
    """The key that tells the members that a checkpoint is wanted: it is there while a CREATE_CHECKPOINT is
    running. At most one operation writes it at a time."""
    if operation.kind is not OperationKind.CREATE_CHECKPOINT or operation.after or operation.joined:
        return ()
    if not operation.running:
        return (Delete(keys.checkpoint_request),)
    request = CheckpointRequest(operation=operation.operation_id, attempt=operation.attempt)
    return (Put(keys.checkpoint_request, request.to_bytes()),)


def restore(job: Job, keys: Keys, found: dict[str, KeyValue], now: float) -> None:
    """In place: a new job takes what etcd holds. Pending tasks get a new full deadline. Raises Conflict,
    StateUnreadable."""
    kv = found.get(keys.task_meta)
    if kv is not None:
        meta = must_read(TaskMeta, kv.key, kv.value)
        _check_same_dataset(job.meta, meta)
        job.meta = meta
        job.training.epoch = meta.epoch
    for key in sorted(found):
        with understood(key, found[key].value):
            change = _change(keys, job, key, found[key].value)
            if change is not None:
                job.apply(change, now)
    job.budget.started |= job.training.epoch > 0 or job.training.counts[2] > 0


def restore_events(job: Job, keys: Keys, found: dict[str, KeyValue]) -> None:
    """In place: as `restore`, the events alone."""
    for key in sorted(found):
        if key.startswith(keys.events) and (change := _change(keys, job, key, found[key].value)) is not None:
            job.apply(change, 0.0)


def apply_event(job: Job, keys: Keys, event: WatchEvent, now: float) -> None:
    """In place: a job that holds all earlier writes takes this one of another process. Raises
    StateUnreadable."""
    with understood(event.kv.key, event.kv.value):
        change = _change_of(keys, job, event)
        if change is not None:
            job.apply(change, now)


def _change_of(keys: Keys, job: Job, event: WatchEvent) -> Change | None:
    """None if the write does not concern the job's state."""
    key = event.kv.key
    if event.type == "put":
        if key == keys.task_meta:
            return NextEpoch(TaskMeta.from_bytes(event.kv.value).epoch)
        return _change(keys, job, key, event.kv.value)
    if key.startswith(keys.operations):
        return DropOperation(keys.name_of(key))
    if key.startswith(keys.answers):
        return DropAnswer(keys.name_of(key))
    if key == keys.migration:
        return DropMigration()
    if key.startswith(keys.evaluations):
        number = read_number(key, keys.name_of(key).encode())
        return DropEvaluation(number) if number is not None else None
    if key.startswith(keys.events):  # of those that are dropped together, the last one is told last
        first = read_number(key, keys.name_of(key).encode())
        return DropEvents(first + 1) if first is not None else None
    if not key.startswith(keys.tasks):
        return None
    kind, _, name = key.removeprefix(keys.tasks).partition("/")
    match kind:
        case "cursor":
            return PutCursor(name, 0)
        case "pending":
            return DropPending(name) if name in job.queue_of(name).pending else None
        case "requeued":
            return DropRequeued(name) if name in job.queue_of(name).requeued else None
        case "discarded":
            task_id, _, epoch = name.partition("@")
            known = (int(epoch), task_id) in job.queue_of(task_id).discarded
            return DropDiscarded(task_id, int(epoch)) if known else None
        case _:
            return None


def _change(keys: Keys, job: Job, key: str, value: bytes) -> Change | None:
    """The change that a key stands for; None for keys that do not concern the job's state."""
    for record, place in _places(keys).items():
        if key == place:
            return record.from_bytes(value)
    if key.startswith(keys.operations):
        return read_record(Operation, key, value)
    if key.startswith(keys.answers):
        return read_record(KeptAnswer, key, value)
    if key.startswith(keys.evaluations):
        return read_record(Evaluation, key, value)
    if key.startswith(keys.events):
        return chunk_of(key, value)
    if not key.startswith(keys.tasks):
        return None
    kind, _, name = key.removeprefix(keys.tasks).partition("/")
    match kind:
        case "cursor":
            return PutCursor(name, int(value))
        case "pending":
            return PutPending(name, PendingTask.from_bytes(value))
        case "requeued":
            return PutRequeued(name, RequeuedTask.from_bytes(value))
        case "discarded":
            task_id = name.partition("@")[0]
            lost = DiscardedTask.from_bytes(value)
            return PutDiscarded(task_id, lost, job.queue_of(task_id).streams.records_of(task_id))
        case _:
            return None


def _check_same_dataset(counted: TaskMeta, stored: TaskMeta) -> None:
    """The queues are computed from the file table: with another table the same numbers would mean other
    records."""
    if (counted.digest, counted.evaluation_digest) != (stored.digest, stored.evaluation_digest):
        msg = (
            f"the dataset has changed since the job began: file table {counted.digest[:12]} of "
            f"{counted.tasks} tasks now, "
            f"{stored.digest[:12]} of {stored.tasks} tasks then; restore the files or start a new job"
        )
        raise Conflict(msg)


async def read_events(etcd: Etcd, prefix: str) -> EventLog:
    """`prefix`: of the chunks. Raises PeerError."""
    found, _ = await read_below(etcd, prefix)
    kept = EventLog()
    for key in sorted(found):
        if (change := chunk_of(key, found[key].value)) is not None:
            kept.apply(change)
    return kept


def chunk_of(key: str, value: bytes) -> PutEvents | None:
    """None: it holds no events (this is logged)."""
    told = read_record(EventChunk, key, value)
    return (
        PutEvents(told.events[0].event_id, told.events[-1].event_id, value) if told and told.events else None
    )


class Batch:
    """No key is written twice. `writes` in order."""

    def __init__(self) -> None:
        self._by_key: dict[str, Write] = {}
        self._bytes = 0

    @property
    def writes(self) -> list[Write]:
        return list(self._by_key.values())

    def takes(self, writes: Sequence[Write]) -> bool:
        """Whether there is room for these too. An empty batch takes whatever `check_fits` takes."""
        added = sum(write.key not in self._by_key for write in writes)
        return len(self._by_key) + added <= MAX_OPERATIONS and self._bytes + _size(writes) <= MAX_BYTES

    def add(self, writes: Sequence[Write]) -> None:
        """In place. The sizes of writes that these replace are still counted."""
        merge(self._by_key, writes)
        self._bytes += _size(writes)


def merge(by_key: dict[str, Write], writes: Iterable[Write]) -> None:
    """In place: the last write of a key wins, and a deleted range takes the writes before it along."""
    for write in writes:
        if isinstance(write, Delete) and write.end is not None:
            for key in [key for key in by_key if write.key <= key < write.end]:
                del by_key[key]
        by_key.pop(write.key, None)
        by_key[write.key] = write


def check_fits(writes: Sequence[Write]) -> None:
    """Raises TooLarge if no transaction takes them."""
    if len(writes) > MAX_OPERATIONS:
        msg = f"the request changes {len(writes)} keys of the job's state, at most {MAX_OPERATIONS} are taken"
        raise TooLarge(msg, hint="send less at once")
    if (size := _size(writes)) > MAX_BYTES:
        msg = f"the request changes the job's state by {size} bytes, at most {MAX_BYTES} are taken"
        raise TooLarge(msg, hint="send shorter texts, or fewer values")


def _size(writes: Sequence[Write]) -> int:
    """Bytes of keys and values; a key's characters count as bytes."""
    return sum(len(write.key) + (len(write.value) if isinstance(write, Put) else 0) for write in writes)


class MembersWatch:
    """`on_change(members)` is called after each change, never with an older value than before."""

    def __init__(self, etcd: Etcd, keys: Keys, on_change: Callable[[Members], None]) -> None:
        self._etcd, self._keys, self._on_change = etcd, keys, on_change
        self._kvs: dict[str, KeyValue] = {}
        self._members = Members()
        self._ranges = (
            (keys.trainers, keys.trainers[:-1] + "0"),
            keys.directory(),
            (keys.latest, keys.latest + "\0"),
            (keys.own_prefix, keys.own_prefix[:-1] + "0"),
        )

    def start(self, found: Iterable[KeyValue]) -> Members:
        """Start from a first reading."""
        self._read_again({kv.key: kv for kv in found if self._is_watched(kv.key)})
        return self._members

    async def run(self, start_revision: int) -> None:
        """Watch all ranges from `start_revision` on, until cancelled."""
        async with LongLivedGroup() as group:
            for first, end in self._ranges:
                group.create_task(self._watch(first, end, start_revision))

    def members(self) -> Members:
        return self._members

    async def _watch(self, first: str, end: str, start_revision: int) -> None:
        async with aclosing(self._etcd.watch(first, end, start_revision=start_revision)) as batches:
            async for batch in batches:
                if self.take(batch, first, end):
                    self._on_change(self._members)

    def take(self, batch: WatchBatch, first: str, end: str) -> bool:
        """Take a batch of the watch of [first, end). Answers whether a watched key changed."""
        before = self._kvs
        if batch.reset:
            others = {key: kv for key, kv in before.items() if not first <= key < end}
            self._read_again(others | {kv.key: kv for kv in batch.kvs if self._is_watched(kv.key)})
            return self._kvs != before
        changed = False
        for event in batch.events:
            kv = event.kv if event.type == "put" else None
            if self._is_watched(event.kv.key) and before.get(event.kv.key) != kv:
                self._set(event.kv.key, kv)
                changed = True
        return changed

    def _read_again(self, kvs: dict[str, KeyValue]) -> None:
        self._kvs, self._members = {}, Members(left=self._members.left)
        for key, kv in sorted(kvs.items(), key=lambda item: item[1].create_revision):
            self._set(key, kv)

    def _set(self, key: str, kv: KeyValue | None) -> None:
        """In place: one key has this value now, None: it is gone. Only its own value is read, however many
        members there are."""
        keys, before, value = self._keys, self._members, kv.value if kv else None
        if kv is None:
            self._kvs.pop(key, None)
        else:
            self._kvs[key] = kv
        update: dict[str, object]
        if key.startswith(keys.pservers):
            pserver, index = (
                read_record(PserverMember, key, value),
                read_number(key, keys.name_of(key).encode()),
            )
            revision = kv.create_revision if kv and pserver else None
            update = {
                "pservers": _with(before.pservers, index, pserver),
                "pserver_revisions": _with(before.pserver_revisions, index, revision),
            }
            if kv is None and index is not None:
                update["left"] = _left(before.left, f"pserver-{index}", before.pservers.get(index))
        elif key.startswith(keys.own_prefix):
            own = read_record(OwnCheckpoints, key, value)
            update = {"own": _with(before.own, read_number(key, keys.name_of(key).encode()), own)}
        elif key == keys.latest:
            update = {"latest": read_record(CheckpointLatest, key, value)}
            update["latest_revision"] = kv.mod_revision if kv else 0
        elif key == keys.layout:
            update = {
                "layout_revision": kv.create_revision if kv else 0,
                "layout": read_record(Layout, key, value),
            }
        elif key == keys.init_done:
            update = {
                "init_done": kv is not None,
                "initialiser": kv.value.decode(errors="replace") if kv else "",
            }
        else:
            trainer = read_record(TrainerMember, key, value)
            name = keys.name_of(key)
            update = {"trainers": _with(before.trainers, name, trainer)}
            if kv is None:
                update["left"] = _left(before.left, name, before.trainers.get(name))
        self._members = replace(before, **update)  # type: ignore[arg-type]

    def _is_watched(self, key: str) -> bool:
        keys = self._keys
        others = key in (keys.layout, keys.init_done, keys.latest)
        return keys.is_trainer(key) or others or key.startswith((keys.pservers, keys.own_prefix))


def _left(before: tuple[str, ...], name: str, last: TrainerMember | PserverMember | None) -> tuple[str, ...]:
    """Who left as asked, after the key of `name` has vanished. `last`: what it said last."""
    others = tuple(each for each in before if each != name) if name in before else before
    return (*others, name)[-LEFT_KEPT:] if last is not None and last.leaving else others


def _with(before: Mapping[K, V], key: K | None, value: V | None) -> dict[K, V]:
    """A copy; what is new comes last. A `value` of None is left out; a `key` that cannot be read is
    ignored."""
    found = dict(before)
    if key is not None and value is None:
        found.pop(key, None)
    elif key is not None and value is not None:
        found[key] = value
    return found
