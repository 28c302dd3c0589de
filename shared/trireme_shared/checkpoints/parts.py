"""Parts of checkpoints: each owner of blocks writes its own; the first to see all parts commits them
(commit.py).

version due -> copy -> begun, started -> file -> finished part     each write fenced by the owner's own key
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from trireme_shared.blocks.snapshot import Snapshot
from trireme_shared.checkpoints import stored, writer
from trireme_shared.checkpoints.commit import Committer
from trireme_shared.checkpoints.saving_context import (
    Cut,
    GivenUp,
    PendingCheckpoint,
    SavingContext,
    StorageProblem,
    advice_for,
)
from trireme_shared.checkpoints.schedule import is_final
from trireme_shared.checkpoints.writer import Offload
from trireme_shared.platform.etcd import Delete, LeaseLost, Operation, Put
from trireme_shared.platform.runtime import clock, ids, telemetry
from trireme_shared.platform.runtime.containment import LongLivedGroup, backoff_s
from trireme_shared.platform.storage import files
from trireme_shared.protocol.errors import InvalidArgument, NotReady, PeerError
from trireme_shared.protocol.records import Mode, SlotMap
from trireme_shared.protocol.records.checkpoints import (
    CheckpointLatest,
    CheckpointPart,
    CheckpointStarted,
    PartLink,
)
from trireme_shared.protocol.records.layout import Layout


@dataclass(frozen=True, slots=True)
class Copied:
    """A whole copy; whoever takes it releases the snapshot. `index`: names its part. `slots`: the map that
    gave these blocks to their owner (None: not known). `restored`: the checkpoint that `timeline` began with.
    `skipped`: how many copies before it were left out."""

    snapshot: Snapshot
    index: int
    timeline: int
    restored: str
    slots: SlotMap | None
    layout: Layout
    mode: Mode
    lanes: int
    skipped: int = 0

    @property
    def version(self) -> int:
        return self.snapshot.version


class Copies:
    """Where copies come from. `ready` is set when there may be one to take."""

    def __init__(self, ready: asyncio.Event | None = None) -> None:
        self.ready = ready or asyncio.Event()

    @property
    def waits(self) -> bool:
        """Whether there is one to take."""
        raise NotImplementedError

    def take(self) -> Copied | None:
        raise NotImplementedError

    def renew(self, copied: Copied) -> bool:
        """Whether the part of a copy that was taken can be written once more. Rows of tables are read from
        their copy only once: they would have to be copied again."""
        return not copied.snapshot.tables

    def is_of(self, timeline: int) -> bool:
        """Whether this process has parameters of that timeline: else parts of it are given up."""
        raise NotImplementedError

    # -------------------------------------------------------- beside the blocks of a synchronous job: nothing

    async def cut(self, uuid: str, copied: Copied) -> Cut | None:
        """Of a paused checkpoint. Raises GivenUp; PeerError: ask again."""
        del uuid, copied
        return None

    def may_build_on(self, latest: CheckpointLatest | None) -> str:
        """The checkpoint that the next part may build on; "": it will be whole."""
        del latest
        return ""

    async def chain(
        self, copied: Copied, slots: SlotMap, latest: CheckpointLatest | None, damaged: Collection[str]
    ) -> tuple[PartLink, ...]:
        """What its part builds on; none: the part is whole."""
        del copied, slots, latest, damaged
        return ()

    def metadata(self, snapshot: Snapshot) -> Mapping[str, str]:
        """What its part says beside the usual."""
        del snapshot
        return {}

    def written(self, uuid: str, part: CheckpointPart) -> None:
        """The part of the copy that was taken last is written."""


OUTAGE_S = 600.0  # how long etcd may be away before a copy is given up
PAUSE_S = 0.5
MOST_PAUSE_S = 10.0
TRIES = 4  # at least, of a part that no later one can replace

T = TypeVar("T")
log = telemetry.logger("checkpoints.parts")


async def write_part(
    context: SavingContext,
    offload: Offload,
    pending: PendingCheckpoint,
    snapshot: Snapshot,
    more: Callable[[], Mapping[str, str]],
    chain: Sequence[PartLink] = (),
) -> CheckpointPart:
    """Write the file of this owner's part, which builds on `chain`; `more`: of its metadata, may be slow.
    Raises OSError, InvalidArgument."""
    index, version = pending.index, snapshot.version
    metadata = writer.part_metadata(
        context.keys.job, pending.uuid, version, pending.timeline, index, pending.layout.digest
    )
    url = files.join(stored.folder(context.spec.storage, pending.uuid), pending.file)
    finite = writer.parameters_of(pending.layout) if context.spec.on_nonfinite != "ignore" else ()
    content = url, lambda: {**metadata, **more()}, snapshot, finite, context.spec.checkpoint_checksum
    rows_version = snapshot.rows_version
    summary = await offload(writer.write_part, *content)
    return CheckpointPart(
        step=version,
        timeline=pending.timeline,
        pserver=index,
        incarnation=context.owner.incarnation,
        file=pending.file,
        checksum=summary.checksum,
        bytes=summary.bytes,
        timestamp=clock.timestamp(),
        rows_version=rows_version,
        chain=tuple(chain),
    )


class Checkpointer:
    """Writes this process's parts, one at a time, and commits checkpoints."""

    def __init__(self, context: SavingContext, copies: Copies) -> None:
        self._context, self._copies = context, copies
        self._etcd, self._keys, self._directory = context.etcd, context.keys, context.directory
        self._own_key, self.offload = context.own_key, context.offload
        self._token = ids.new_id()
        self._writing = False
        self._problem = StorageProblem(context.owner, lambda message: self._own_key.set(trouble=message))
        self.committer = Committer(context, self._problem)

    def __repr__(self) -> str:
        return f"<Checkpointer {self._context.name}: {self.committer!r}>"

    @property
    def busy(self) -> bool:
        """Whether a part waits to be written, is being written, or may still become part of the latest
        checkpoint."""
        return self._writing or self._copies.waits or self.committer.busy

    async def run(self) -> None:
        """Until cancelled. No failure here ends training."""
        async with LongLivedGroup() as group:
            group.create_task(self._write_parts())
            group.create_task(self.committer.run())

    async def _write_parts(self) -> None:
        while True:
            copied = self._copies.take()
            if copied is None:
                self._copies.ready.clear()
                await self._copies.ready.wait()
                continue
            self._writing = True
            try:
                await self._write(copied)
            except GivenUp as lost:
                log.info("part_given_up", owner=self._context.name, step=copied.version, cause=str(lost))
            except Exception as error:
                self._problem.begin("part", self._message(copied.version, error))
                log.exception("part_failed", owner=self._context.name, step=copied.version)
            finally:
                self._writing = False
                copied.snapshot.release()

    async def _write(self, copied: Copied) -> None:
        """Raises GivenUp, PeerError."""
        snapshot, timeline, index = copied.snapshot, copied.timeline, copied.index
        slots = copied.slots or await self._slots()
        uuid = stored.checkpoint_uuid(self._keys.job, timeline, slots.version, snapshot.version)
        pending = PendingCheckpoint(
            uuid=uuid,
            index=index,
            timeline=timeline,
            slots=slots,
            layout=copied.layout,
            mode=copied.mode,
            lanes=copied.lanes,
            record=snapshot.record,
            restored=copied.restored,
            cut=await self._while_away(timeline, lambda: self._copies.cut(uuid, copied)),
            file=f"pserver-{index}.{self._token}.safetensors",
        )
        incarnation = self._context.owner.incarnation
        started = CheckpointStarted(
            step=snapshot.version,
            timeline=timeline,
            pserver=index,
            incarnation=incarnation,
            slots=slots.version,
            evaluation=pending.evaluation(self._context.spec),
        )
        latest = await self._begin(pending.uuid, started)
        begin = clock.monotonic()
        try:
            state = self._directory.state
            damaged = state.damaged if state is not None else ()
            chain = await self._copies.chain(copied, slots, latest, damaged)
            part = await self._written(pending, copied, chain)
        except (OSError, InvalidArgument) as error:
            self._check(timeline)
            message = self._message(snapshot.version, error)
            self._problem.begin("part", message)
            failed = started.with_fields(error=message)
            await self._fenced(timeline, lambda: [self._started(pending.uuid, failed)])
            return
        snapshot.release()
        self._problem.end("part")
        seconds = round(clock.monotonic() - begin, 3)
        facts = {
            "bytes": part.bytes,
            "deltas": len(part.chain),
            "seconds": seconds,
            "skipped": copied.skipped,
        }
        log.info("part_written", step=snapshot.version, **facts)
        self._copies.written(pending.uuid, part)
        self.committer.add(pending)
        await self._fenced(
            timeline,
            lambda: [
                Put(self._keys.checkpoint_part(pending.uuid, part.pserver), part.to_bytes()),
                Delete(self._keys.checkpoint_started(pending.uuid, part.pserver)),
            ],
        )

    async def _written(
        self, pending: PendingCheckpoint, copied: Copied, chain: Sequence[PartLink]
    ) -> CheckpointPart:
        """The part, once its file is there. Raises GivenUp, OSError, InvalidArgument."""
        snapshot = copied.snapshot
        more = lambda: self._copies.metadata(snapshot)  # noqa: E731
        tries = 0
        while True:
            try:
                return await write_part(self._context, self.offload, pending, snapshot, more, chain)
            except OSError as error:
                tries += 1
                if not self._tries_again(pending, tries):
                    raise
                self._problem.begin("part", self._message(snapshot.version, error))
                await asyncio.sleep(ids.jitter(backoff_s(tries + 1, PAUSE_S, MOST_PAUSE_S)))
                self._check(pending.timeline)
                if not self._copies.renew(copied):
                    raise

    def _tries_again(self, pending: PendingCheckpoint, tries: int) -> bool:
        """Whether a part that could not be written is written once more. No later version takes the place of
        one that is evaluated, or of the last one: training may wait for it. So it is tried again as long as
        no later checkpoint is begun or waits to be written here."""
        counts = pending.evaluation(self._context.spec) or is_final(pending.record, self._context.spec.epochs)
        latest, state = self.committer.seen.latest, self._directory.state
        superseded = latest is not None and latest.covers(*pending.order)
        if not counts or superseded or (state is not None and state.phase.final):
            return False
        begun = self.committer.seen.begun.values()
        later = any((each.timeline, each.step) > pending.order for each in begun)
        return tries < TRIES or not (later or self._copies.waits)

    async def _begin(self, uuid: str, started: CheckpointStarted) -> CheckpointLatest | None:
        """The latest checkpoint, which is kept from now on if this part may build on it. Raises GivenUp,
        PeerError."""
        while True:
            latest = self.committer.seen.latest
            on = self._copies.may_build_on(latest)
            record = started.with_fields(on=on)
            begun = Put(self._keys.checkpoint_begun(uuid), record.to_bytes())
            await self._fenced(started.timeline, partial(self._beginning, begun, uuid, record))
            if not on or self.committer.seen.latest == latest:
                return latest

    def _beginning(self, begun: Put, uuid: str, record: CheckpointStarted) -> Sequence[Operation]:
        """Each time anew: the lease may be another one since the last attempt."""
        return begun, self._started(uuid, record)

    async def _slots(self) -> SlotMap:
        await self._directory.wait_for(lambda seen: seen.slots is not None, OUTAGE_S, "the slot map")
        assert self._directory.slots is not None
        return self._directory.slots

    def _started(self, uuid: str, started: CheckpointStarted) -> Put:
        key = self._keys.checkpoint_started(uuid, started.pserver)
        return Put(key, started.to_bytes(), self._own_key.lease.id)

    async def _fenced(self, timeline: int, operations: Callable[[], Sequence[Operation]]) -> None:
        """Write if the own key is still held; again while etcd is away. Raises GivenUp, PeerError."""

        async def write() -> bool:
            await self._own_key.certain()
            held = self._own_key.held
            written = (await self._etcd.txn([held], operations())).succeeded
            if not written and (self._own_key.in_doubt or self._own_key.held != held):
                raise NotReady("the lease ran out meanwhile; the key is created again")
            return written

        # the same values again, so a write of unknown outcome may be repeated
        if not await self._while_away(timeline, write):
            raise GivenUp(f"{self._context.name} is another process now")

    async def _while_away(self, timeline: int, call: Callable[[], Awaitable[T]]) -> T:
        """`await call()`, again while etcd is away. Raises GivenUp, PeerError."""
        deadline = clock.monotonic() + OUTAGE_S
        while True:
            self._check(timeline)
            try:
                return await call()
            except (PeerError, LeaseLost) as error:
                if clock.monotonic() > deadline:
                    raise
                log.warning("etcd_away", owner=self._context.name, cause=str(error))
                await asyncio.sleep(ids.jitter(PAUSE_S))

    def _check(self, timeline: int) -> None:
        if not self._copies.is_of(timeline):
            raise GivenUp(f"the job left timeline {timeline}")

    def _message(self, step: int, error: Exception) -> str:
        place = files.join(self._context.spec.storage, "checkpoints")
        what = f"its part of the checkpoint of step {step}"
        return f"{self._context.name} cannot write {what} below {place}: {error}; {advice_for(error)}"
