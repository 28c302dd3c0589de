"""Checkpoints of a collective job at one trainer: its share is saved, and all of one is loaded when the job
goes back to it.

ShareCopies     the blocks that it owns in the present generation, with their optimizers' state
    version due, in generation g ─► own share copied
        ─► part <place> of the checkpoint (version, g), written beside training
    generation over: parts go on being written
        a trainer died before its part was there: the checkpoint is lost
            ─► the owner of lane 0 has one made of a version soon after (`again`)
    reached late: own shares of the generations since this trainer had the version's mean gradients are copied
    orer        ROLLING_BACK seen ─► forget ─► load ─► `holds` in trainers/<id>
                                        |─► cannot: `holds.error` says why; the master chooses another one
                                        `─► the storage is not reached: again, until the others go on without
                                            this trainer

All owners decide by the version's record, and share the blocks by the generation's list: so parts of one
(version, g) make a whole. It is one cut in any case: a version has the same bits in every generation of a
timeline.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from trainer_agent.collective.groups import shared_out
from trainer_agent.collective.replica import Replica, rows_of
from trainer_agent.model.compute import Compute
from trireme_shared.blocks.buffers import BufferPool, tensor_over
from trireme_shared.blocks.snapshot import Snapshot
from trireme_shared.checkpoints import stored
from trireme_shared.checkpoints.parts import Checkpointer, Copied, Copies
from trireme_shared.checkpoints.saving_context import SavingContext
from trireme_shared.checkpoints.schedule import EVALUATED_RANK, Schedule, is_final
from trireme_shared.checkpoints.stored import BlockReader, check_model
from trireme_shared.checkpoints.writer import Offload
from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.etcd.reading import read_record
from trireme_shared.platform.membership.directory import Directory, OwnKey
from trireme_shared.platform.runtime import ids, telemetry
from trireme_shared.protocol.errors import CheckpointUnusable, PeerError
from trireme_shared.protocol.records import (
    Holding,
    JobSpec,
    JobState,
    Mode,
    Phase,
    SlotMap,
    TrainerList,
    TrainerMember,
)
from trireme_shared.protocol.records.assignments import blocks_in, slot_of
from trireme_shared.protocol.records.checkpoints import CheckpointLatest, CheckpointRef, Manifest
from trireme_shared.protocol.records.layout import ROWS, Block, Layout
from trireme_shared.protocol.records.operations import CheckpointRequest
from trireme_shared.protocol.records.step import StepRecord
from trireme_shared.serving.table_loader import TableLoader
from trireme_shared.tables.hashing import owned_slots

COPY_BYTES = 4 << 20  # at once: a few milliseconds
KEPT_LISTS = 64  # generations whose trainers are remembered
MOST_COPIES = 4  # of one version at once
log = telemetry.logger("collective.saving")
ROLLBACK_LOOK_S = 5.0
RESTORE_PAUSE_S = 0.5
TRIES = 4


@dataclass(frozen=True, slots=True)
class CheckpointContext:
    """What one trainer's checkpoints are made of and loaded into, and by whom they are told."""

    spec: JobSpec
    etcd: Etcd
    directory: Directory
    #: the trainer's own key, which says what it holds
    own_key: OwnKey[TrainerMember]
    #: where files are written and read
    offload: Offload
    compute: Compute
    replica: Replica


class ShareCopies(Copies):
    """With the `checkpointer` that writes them. `saved(record)`: with the results of steps before it that may
    not be stored yet. `at_version` is awaited whenever the version in use or the generation is another one,
    before the version in use changes again."""

    def __init__(
        self,
        context: CheckpointContext,
        saved: Callable[[StepRecord], StepRecord] = lambda record: record,
    ) -> None:
        super().__init__()
        self._spec, self._directory = context.spec, context.directory
        self._compute, self._replica, self._saved = context.compute, context.replica, saved
        self._layout = context.compute.layout
        self._blocks = tuple(self._layout.blocks())
        self._schedule, self._pool = Schedule.of(context.spec), BufferPool()
        own_key = context.own_key
        self._me = own_key.record.trainer
        self._lists: dict[int, TrainerList] = {}
        self._considered = (-1, -1, -1)
        self._waiting: list[tuple[int, Copied]] = []  # by rank; two: neither may be left out
        self._skipped = 0
        owner = ReplicaOwner(own_key.record, context.replica, context.directory)
        place = context.etcd, context.directory, owner, own_key, context.offload
        self.checkpointer = Checkpointer(SavingContext(*place, self._living, self._slots_of), self)

    def __repr__(self) -> str:
        return f"<ShareCopies of {self._me}: {len(self._waiting)} wait to be written>"

    # ------------------------------------------------------------ copies

    async def at_version(self, trainers: TrainerList, since: int | None = None) -> None:
        """The replica has just reached its version, or these are the trainers of a new generation. Copies the
        own share if a checkpoint is due. `since`: the generation in which this trainer had all mean gradients
        of the version. If it is late, others compute its lanes: they may have copied the version in that
        generation, or in one after it, and have a later version now. So it copies its share of each of
        them."""
        self.remember(trainers)
        record, timeline, now = self._replica.record, self._replica.timeline, trainers.generation
        rank = self._schedule.rank(record) if record is not None else None
        if record is None or rank is None or self._is_saved(record):
            return
        first = now if since is None else min(since, now)
        if self._considered[:2] == (timeline, record.version):
            first = max(first, self._considered[2] + 1)
        lists = [each for each in self._lists_from(first, now) if self._me in each.owners]
        if not lists:
            return
        room = self._has_room(rank, record.version)
        if room or not is_final(record, self._spec.epochs):  # the last one is copied once there is room
            self._considered = timeline, record.version, now
        if room:
            for each in lists:
                await self._copy_share(each, record, rank)

    def _lists_from(self, first: int, last: int) -> list[TrainerList]:
        """Of those generations, the last one and the oldest of the others."""
        found = [self._lists[each] for each in sorted(self._lists) if first <= each <= last]
        return [*found[:-1][: MOST_COPIES - 1], *found[-1:]]

    async def _copy_share(self, trainers: TrainerList, record: StepRecord, rank: int) -> None:
        """What this trainer owns in the generation of that list."""
        place = trainers.places[self._me]
        slots = shared_out(trainers, self._layout.slot_count)
        slots_of_place = [slot for slot, owner in enumerate(slots.owners) if owner == place]
        own = blocks_in(slots_of_place, len(self._blocks), self._layout.slot_count)
        rows = self._replica.rows
        if not own and rows is None:
            return
        snapshot = Snapshot(self._saved(record), rank, (*own, *[ROWS] * (rows is not None)), slots)
        try:
            if rows is not None:
                assert rows.version == record.version, (rows, record.version)
                snapshot.add_tables(rows.copies(owned_slots(slots.owners, place)))
            await self._copy(snapshot)
        except BaseException:
            snapshot.release()
            raise
        copied = Copied(
            snapshot=snapshot,
            index=place,
            timeline=self._replica.timeline,
            restored=self._replica.checkpoint,
            slots=slots,
            layout=self._layout,
            mode=Mode.SYNC,
            lanes=self._spec.lanes,
            skipped=self._skipped,
        )
        self._waiting.append((rank, copied))
        self.ready.set()

    async def _copy(self, snapshot: Snapshot) -> None:
        """The values in use, which nobody changes meanwhile, and the optimizers' state."""
        done = 0
        for number in snapshot.blocks:
            if number == ROWS:
                continue
            block = self._blocks[number]
            values = self._pool.take(block.dtype, block.elements)
            payload = memoryview(self._compute.current(number)).cast("B").toreadonly()
            values.tensor.copy_(tensor_over(payload, block.dtype))
            snapshot.add(number, values, self._replica.state(number), self._pool)
            values.release()
            done += block.bytes
            if done >= COPY_BYTES:
                done = 0
                await asyncio.sleep(0)

    def _has_room(self, rank: int, version: int) -> bool:
        """Whether a copy of that rank is made although one waits to be written: as parameter servers decide
        (shared/trireme_shared/serving/core/store.py). If two wait, it takes the place of one of the same
        version, which an earlier generation shared in another way."""
        if not self._waiting:
            return True
        same = [at for at, (_, waiting) in enumerate(self._waiting) if waiting.version == version]
        if same and len(self._waiting) > 1:
            self._waiting.pop(same[0])[1].snapshot.release()
            return True
        lowest = min(waiting for waiting, _ in self._waiting)
        if len(self._waiting) == 1 and min(rank, lowest) >= EVALUATED_RANK:
            return True
        self._skipped += 1
        if rank < lowest:
            return False
        at = next(number for number, (waiting, _) in enumerate(self._waiting) if waiting == lowest)
        self._waiting.pop(at)[1].snapshot.release()
        return True

    def _is_saved(self, record: StepRecord) -> bool:
        latest = self.checkpointer.committer.seen.latest
        return latest is not None and latest.covers(self._replica.timeline, record.version)

    # ------------------------------------------------------------ what the checkpointer asks

    @property
    def waits(self) -> bool:
        return bool(self._waiting)

    def take(self) -> Copied | None:
        return self._waiting.pop(0)[1] if self._waiting else None

    def renew(self, copied: Copied) -> bool:
        """With tables: as long as the version is in use."""
        rows, snapshot = self._replica.rows, copied.snapshot
        if not snapshot.tables:
            return True
        if (
            rows is None
            or copied.slots is None
            or not self._replica.at_rest
            or rows.version != snapshot.version
        ):
            return False
        snapshot.renew_tables(rows.copies(owned_slots(copied.slots.owners, copied.index)))
        return True

    def is_of(self, timeline: int) -> bool:
        return self._replica.record is not None and self._replica.timeline == timeline

    def _living(self, slots: SlotMap) -> Mapping[int, str]:
        then = self._lists.get(slots.version)
        owners = then.owners if then is not None else ()
        return {place: name for place, name in enumerate(owners) if name in self._directory.trainers}

    def _slots_of(self, generation: int) -> SlotMap | None:
        then = self._lists.get(generation)
        return shared_out(then, self._layout.slot_count) if then is not None else None

    def remember(self, trainers: TrainerList) -> None:
        """Of each generation, as it becomes known."""
        self._lists[trainers.generation] = trainers
        while len(self._lists) > KEPT_LISTS:
            del self._lists[min(self._lists)]

    # ------------------------------------------------------------ a checkpoint that was lost

    def again(self, trainers: TrainerList) -> CheckpointRequest | None:
        """What the owner of lane 0 asks for beside what people do: a checkpoint in place of one that was
        begun in an earlier generation, and never gets whole. None: there is no such one."""
        lost = self.checkpointer.committer.lost_step(
            self._replica.timeline, lambda uuid, step: self._goes_on(trainers, uuid, step)
        )
        return None if lost is None else CheckpointRequest(operation="", attempt=lost)

    def _goes_on(self, trainers: TrainerList, uuid: str, step: int) -> bool:
        """Whether a checkpoint that this process has no part of may still get whole: it is of the present
        generation."""
        return uuid == stored.checkpoint_uuid(
            self._spec.job, self._replica.timeline, trainers.generation, step
        )

    @property
    def is_evaluated(self) -> bool:
        """Whether the version in use is to be evaluated: then its checkpoint cannot be replaced by a later
        one."""
        record = self._replica.record
        return record is not None and self._schedule.rank(record) == EVALUATED_RANK

    @property
    def ends_unsaved(self) -> bool:
        """Whether the version in use is the last one and is not saved: then each generation copies it
        anew."""
        record = self._replica.record
        return record is not None and is_final(record, self._spec.epochs) and not self._is_saved(record)


@dataclass
class ReplicaOwner:
    """A PartOwner."""

    member: TrainerMember
    replica: Replica
    directory: Directory
    checkpoint_error: str = field(default="", init=False)

    @property
    def name(self) -> str:
        return self.member.trainer

    @property
    def incarnation(self) -> str:
        return self.member.incarnation

    @property
    def timeline(self) -> int:
        return self.replica.timeline

    @property
    def term(self) -> int:
        return self.directory.master.term if self.directory.master is not None else 0


class _Superseded(CheckpointUnusable):
    """The checkpoint is not kept any more."""


class Restorer:
    """Answers each roll-back once: it was loaded, or why it could not be. `idle`: held by whoever uses the
    parameters; `swapping`: while a minibatch is evaluated. `drop` is called before the replica forgets its
    version, `began` when it has another one."""

    def __init__(
        self,
        context: CheckpointContext,
        idle: asyncio.Lock,
        swapping: asyncio.Lock,
        drop: Callable[[], None] = lambda: None,
        began: Callable[[], None] = lambda: None,
    ) -> None:
        self._spec, self._etcd, self._directory = context.spec, context.etcd, context.directory
        self._own_key, self._offload = context.own_key, context.offload
        self._compute, self._replica, self._idle, self._swapping = (
            context.compute,
            context.replica,
            idle,
            swapping,
        )
        self._drop, self._began = drop, began

    def __repr__(self) -> str:
        return f"<Restorer of {self._own_key.record.trainer}: {self._replica!r}>"

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            revision, state = self._directory.revision, self._directory.state
            if state is not None and self.is_due(state):
                await self._answer(state)
            else:
                await self._directory.changed(revision, ROLLBACK_LOOK_S)

    def is_due(self, state: JobState) -> bool:
        holds = self._own_key.record.holds
        done = holds is not None and (holds.timeline, holds.checkpoint) == (state.timeline, state.checkpoint)
        return state.phase is Phase.ROLLING_BACK and bool(state.checkpoint) and not done

    async def _answer(self, state: JobState) -> None:
        log.info("rolling_back", timeline=state.timeline, checkpoint=state.checkpoint)
        holds = Holding(timeline=state.timeline, checkpoint=state.checkpoint)
        async with self._idle:
            self._drop()
            self._replica.forget()  # also if nothing is loaded: what it has is of another timeline
            while self._is_current(state):
                try:
                    ref = await self._kept(state.checkpoint)
                    await self._load(ref, state)
                except CheckpointUnusable as error:
                    unusable = holds.with_fields(
                        error=error.message, superseded=isinstance(error, _Superseded)
                    )
                    self._own_key.set(holds=unusable, waits="")
                    return
                except PeerError as error:
                    log.warning("restore_delayed", cause=str(error))
                    if self._others_went_on(state):
                        self._replica.forget()
                        self._own_key.set(waits="")
                        return
                    await asyncio.sleep(ids.jitter(RESTORE_PAUSE_S))
                    continue
                if not self._is_current(state):
                    self._replica.forget()
                    return
                version = self._replica.version
                log.info("restored", timeline=state.timeline, checkpoint=state.checkpoint, version=version)
                self._began()
                self._own_key.set(holds=holds.with_fields(version=ref.step), waits="")
                return

    async def _load(self, ref: CheckpointRef, state: JobState) -> None:
        """Raises CheckpointUnusable; PeerError: again later."""
        cause = ""
        place = self._spec.storage, self._spec.job
        for attempt in range(TRIES):
            try:
                async with self._swapping:
                    await self._offload(
                        load_replica,
                        *place,
                        ref,
                        self._spec.lanes,
                        self._compute,
                        self._replica,
                        state.timeline,
                    )
            except (CheckpointUnusable, PeerError):
                raise
            except ConnectionError as away:
                msg = f"the storage is not reached: {away}"
                if not self._own_key.record.waits:  # written once, for people to read
                    who = self._own_key.record.trainer
                    self._own_key.set(
                        waits=f"{who} waits to load checkpoint {ref.uuid} (step {ref.step}): {msg}"
                    )
                raise PeerError(msg) from away
            except Exception as error:
                cause = (
                    f"checkpoint {ref.uuid} (step {ref.step}) could not be read, {attempt + 1} times: "
                    f"{error!r}"
                )
                log.exception("checkpoint_unread", cause=cause)
                await asyncio.sleep(ids.jitter(RESTORE_PAUSE_S * 2**attempt))
            else:
                return
        raise CheckpointUnusable(cause)

    async def _kept(self, uuid: str) -> CheckpointRef:
        """Raises CheckpointUnusable, PeerError."""
        key = self._directory.keys.latest
        found = await self._etcd.get(key)
        record = read_record(CheckpointLatest, key, found.value if found else None)
        refs = {ref.uuid: ref for ref in (record.kept if record is not None else ())}
        if uuid not in refs:
            raise _Superseded(f"checkpoint {uuid!r} is not among those kept: {', '.join(refs) or 'none'}")
        return refs[uuid]

    def _others_went_on(self, state: JobState) -> bool:
        """From the checkpoint, without this trainer: it gets everything from them (following.py), and must
        not hold the parameters until the storage is there."""
        now = self._directory.state
        return now is not None and now.phase is not Phase.ROLLING_BACK and self._is_current(state)

    def _is_current(self, state: JobState) -> bool:
        now = self._directory.state
        return now is not None and (now.timeline, now.checkpoint) == (state.timeline, state.checkpoint)


def load_replica(
    storage_url: str,
    job: str,
    ref: CheckpointRef,
    lanes: int,
    compute: Compute,
    replica: Replica,
    timeline: int,
) -> Manifest:
    """Parameters, the optimizer's state and the record of the version; the replica is at that version of
    `timeline` then. Each part is read whole and checked. `lanes`: of the job.

    Raises CheckpointUnusable, OSError: the replica has no version then.
    """
    manifest = stored.read_manifest(storage_url, job, ref)
    layout = compute.layout
    check_model(manifest, ref, layout.digest)
    if manifest.mode is not Mode.SYNC or manifest.layout.tables != layout.tables or manifest.lanes != lanes:
        what = f"mode {manifest.mode}, {manifest.lanes} lanes, {_named(manifest.layout)}"
        wanted = f"mode {Mode.SYNC}, {lanes} lanes, {_named(layout)}"
        msg = (
            f"checkpoint {ref.uuid} (step {ref.step}) is of a job with {what}; a collective job that "
            f"loads it has {wanted}"
        )
        raise CheckpointUnusable(msg)
    replica.forget()
    parts = {part.pserver: part for part in manifest.parts}
    rows, everywhere = rows_of(layout, manifest.step), SlotMap(version=0, owners=(0,) * layout.slot_count)
    tables, wanted_blocks = TableLoader.of(rows, 0, everywhere, ref), _by_owner(manifest, layout)
    if tables is not None:
        wanted_blocks |= {owner: wanted_blocks.get(owner, {}) for owner in set(manifest.slots.owners)}

    def take(block: Block) -> tuple[memoryview, memoryview]:
        values = memoryview(compute.staging(block.number)).cast("B")
        return values, values

    for owner, blocks in sorted(wanted_blocks.items()):
        if owner not in parts:
            stored.unusable(ref, f"it lacks the part of owner {owner}")
        reader: BlockReader[memoryview] = BlockReader(ref, blocks, take)
        if tables is None:
            stored.read_part(storage_url, ref, parts[owner], reader.sink)
        else:
            tables.load(storage_url, parts[owner], reader.sink)
        for number, values, state in reader.loaded(parts[owner].file):
            replica.load(number, values, state)
    replica.loaded(manifest.record, timeline, ref.uuid, rows)
    return manifest


def _named(layout: Layout) -> str:
    names = ", ".join(f"{spec.name} ({spec.dim} numbers)" for spec in layout.tables)
    return f"embedding tables {names:.200}" if names else "no embedding tables"


def _by_owner(manifest: Manifest, layout: Layout) -> dict[int, dict[int, Block]]:
    """Who wrote the part -> its blocks."""
    found: dict[int, dict[int, Block]] = defaultdict(dict)
    for block in layout.blocks():
        found[manifest.slots.owners[slot_of(block.number, manifest.layout.slot_count)]][block.number] = block
    return found
