"""Parts of checkpoints: each pserver writes its own; the first to see all parts commits them (shared/checkpoints/commit.py).

version due -> snapshot -> begun, started -> file -> finished part     each write fenced by the own ps/<index>

Of embedding tables a part has all rows, or those that changed since the own part of the latest checkpoint (chains.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from pserver_service.checkpoints.chains import Chains, versions_of
from pserver_service.checkpoints.ledger_text import ledger_metadata
from pserver_service.context import PserverContext
from shared.blocks.snapshot import Snapshot
from shared.checkpoints import stored, writer
from shared.checkpoints.async_cut import GivenUp, read_cut
from shared.checkpoints.background import Offload
from shared.checkpoints.commit import Committer
from shared.checkpoints.deltas import narrow
from shared.checkpoints.pending import PendingCheckpoint
from shared.checkpoints.storage_problem import StorageProblem, advice_for
from shared.errors import InvalidArgument, NotReady, PeerError
from shared.etcd import Delete, LeaseLost, Operation, Put
from shared.records import SlotMap
from shared.records.checkpoints import CheckpointPart, CheckpointStarted, PartLink
from shared.runtime import clock, ids, telemetry
from shared.serving.core.saved_ledger import AsyncSnapshot
from shared.serving.core.store import Store
from shared.storage import files

OUTAGE_S = 600.0  # how long etcd may be away before a snapshot is given up
PAUSE_S = 0.5

T = TypeVar("T")
log = telemetry.logger("pserver.checkpoints")


async def write_part(
    context: PserverContext,
    offload: Offload,
    pending: PendingCheckpoint,
    snapshot: Snapshot,
    chain: Sequence[PartLink] = (),
) -> CheckpointPart:
    """Write the file of this pserver's part, which builds on `chain`. Raises OSError, InvalidArgument."""
    index, version = context.pserver.index, snapshot.version
    metadata = writer.part_metadata(
        context.keys.job, pending.uuid, version, pending.timeline, index, pending.layout.digest
    )
    url = files.join(stored.folder(context.spec.storage, pending.uuid), pending.file)
    finite = writer.parameters_of(pending.layout) if context.spec.on_nonfinite != "ignore" else ()
    rows_version = snapshot.rows_version if isinstance(snapshot, AsyncSnapshot) else None
    content = url, lambda: metadata | ledger_metadata(snapshot), snapshot, finite, context.spec.checkpoint_checksum
    summary = await offload(writer.write_part, *content)
    return CheckpointPart(
        step=version,
        timeline=pending.timeline,
        pserver=index,
        incarnation=context.pserver.incarnation,
        file=pending.file,
        checksum=summary.checksum,
        bytes=summary.bytes,
        timestamp=clock.timestamp(),
        rows_version=rows_version,
        chain=tuple(chain),
    )


class Checkpointer:
    """Writes this pserver's parts, one at a time, and commits checkpoints."""

    def __init__(self, context: PserverContext) -> None:
        self._context = context
        self._etcd, self._keys, self._directory = context.etcd, context.keys, context.directory
        self._pserver, self._own_index, self.offload = context.pserver, context.own_index, context.offload
        self._token = ids.new_id()
        self._writing = False
        self._chains = Chains()
        self._problem = StorageProblem(self._pserver, lambda message: self._own_index.set(trouble=message))
        self.committer = Committer(
            self._etcd, self._directory, self._pserver, self._own_index, self.offload, self._problem
        )

    def __repr__(self) -> str:
        return f"<Checkpointer {self._pserver.index}: {self.committer!r}>"

    @property
    def busy(self) -> bool:
        """Whether a part waits to be written, is being written, or may still become part of the latest checkpoint."""
        waits = self._pserver.store is not None and self._pserver.store.snapshot_waits
        return self._writing or waits or self.committer.busy

    async def run(self) -> None:
        """Until cancelled. No failure here ends training."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._write_parts())
            group.create_task(self.committer.run())

    async def _write_parts(self) -> None:
        while True:
            store = self._pserver.store
            snapshot = store.take_snapshot() if store is not None else None
            if store is None or snapshot is None:
                self._pserver.snapshot_ready.clear()
                await self._pserver.snapshot_ready.wait()
                continue
            self._writing = True
            try:
                await self._write(snapshot)
            except GivenUp as lost:
                log.info("part_given_up", index=self._pserver.index, step=snapshot.version, cause=str(lost))
            except Exception as error:
                self._problem.begin("part", self._message(snapshot.version, error))
                log.exception("part_failed", index=self._pserver.index, step=snapshot.version)
            finally:
                self._writing = False
                snapshot.release()

    async def _write(self, snapshot: Snapshot) -> None:
        """Raises GivenUp, PeerError."""
        store, timeline, restored = self._pserver.store, self._pserver.timeline, self._pserver.checkpoint
        assert store is not None
        await self._directory.wait_for(lambda seen: seen.slots is not None, OUTAGE_S, "the slot map")
        slots = snapshot.slots or self._directory.slots
        assert slots is not None
        uuid = stored.checkpoint_uuid(self._keys.job, timeline, slots.version, snapshot.version)
        cut = (
            await self._while_away(timeline, lambda: read_cut(self._etcd, self._keys, uuid))
            if isinstance(snapshot, AsyncSnapshot)
            else None
        )
        pending = PendingCheckpoint(
            uuid=uuid,
            timeline=timeline,
            slots=slots,
            layout=store.layout,
            mode=store.mode,
            lanes=store.lanes,
            record=snapshot.record,
            restored=restored,
            cut=cut,
            file=f"pserver-{self._pserver.index}.{self._token}.safetensors",
        )
        index, incarnation = self._pserver.index, self._pserver.incarnation
        started = CheckpointStarted(step=snapshot.version, timeline=timeline, pserver=index, incarnation=incarnation)
        begun = Put(self._keys.checkpoint_begun(pending.uuid), started.to_bytes())
        await self._fenced(timeline, lambda: [begun, self._started(pending.uuid, started)])
        begin = clock.monotonic()
        try:
            chain, versions = await self._chain(store, slots, snapshot), versions_of(snapshot)
            part = await write_part(self._context, self.offload, pending, snapshot, chain)
        except (OSError, InvalidArgument) as error:
            self._check(timeline)
            message = self._message(snapshot.version, error)
            self._problem.begin("part", message)
            failed = started.model_copy(update={"error": message})
            await self._fenced(timeline, lambda: [self._started(pending.uuid, failed)])
            return
        snapshot.release()
        self._problem.end("part")
        seconds = round(clock.monotonic() - begin, 3)
        facts = {"bytes": part.bytes, "deltas": len(part.chain), "seconds": seconds, "skipped": store.skipped}
        log.info("part_written", step=snapshot.version, **facts)
        self._chains.add(pending.uuid, part, store, slots, versions)
        self.committer.add(pending)
        await self._fenced(
            timeline,
            lambda: [
                Put(self._keys.checkpoint_part(pending.uuid, part.pserver), part.to_bytes()),
                Delete(self._keys.checkpoint_started(pending.uuid, part.pserver)),
            ],
        )

    async def _chain(self, store: Store, slots: SlotMap, snapshot: Snapshot) -> tuple[PartLink, ...]:
        """What this part builds on; then its tables have the changes alone."""
        state, latest, most = self._directory.state, self.committer.seen.latest, self._context.spec.deltas_per_base
        base = self._chains.base(latest, state.damaged if state is not None else (), store, slots, most)
        return base.chain if base is not None and await self.offload(narrow, snapshot, base) else ()

    def _started(self, uuid: str, started: CheckpointStarted) -> Put:
        key = self._keys.checkpoint_started(uuid, started.pserver)
        return Put(key, started.to_bytes(), self._own_index.lease.id)

    async def _fenced(self, timeline: int, operations: Callable[[], Sequence[Operation]]) -> None:
        """Write if the index is still held; again while etcd is away. Raises GivenUp, PeerError."""

        async def write() -> bool:
            await self._own_index.certain()
            held = self._own_index.held
            written = (await self._etcd.txn([held], operations())).succeeded
            if not written and (self._own_index.in_doubt or self._own_index.held != held):
                raise NotReady("the lease ran out meanwhile; the key is created again")
            return written

        # the same values again, so a write of unknown outcome may be repeated
        if not await self._while_away(timeline, write):
            raise GivenUp(f"pserver-{self._pserver.index} is another process now")

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
                log.warning("etcd_away", index=self._pserver.index, cause=str(error))
                await asyncio.sleep(ids.jitter(PAUSE_S))

    def _check(self, timeline: int) -> None:
        if self._pserver.timeline != timeline or self._pserver.store is None:
            raise GivenUp(f"the job left timeline {timeline}")

    def _message(self, step: int, error: Exception) -> str:
        place = files.join(self._context.spec.storage, "checkpoints")
        what = f"its part of the checkpoint of step {step}"
        return f"pserver-{self._pserver.index} cannot write {what} below {place}: {error}; {advice_for(error)}"
