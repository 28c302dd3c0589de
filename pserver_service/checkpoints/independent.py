"""Independent checkpoints: this pserver saves itself from time to time, without the others and without a
pause.

queue read -> all blocks copied as they are at one instant -> file, manifest -> checkpoints/pservers/<index>
    -> older files deleted
                                                   `-> an error: the files of this one deleted

The queue is read first: a task that is done in it is wholly in the copy, so the losses of a return to it can
be counted. Such checkpoints of two pservers are of different moments, so a pserver only loads its own.
"""

from __future__ import annotations

import asyncio

from pserver_service.checkpoints.copies import begin, copy_blocks, saving_of
from pserver_service.checkpoints.ledger_text import ledger_metadata
from pserver_service.context import PserverContext
from trireme_shared.checkpoints import writer
from trireme_shared.checkpoints.parts import write_part
from trireme_shared.checkpoints.saving_context import Cut, GivenUp, PendingCheckpoint, advice_for, cut_at
from trireme_shared.platform.etcd import Compare, LeaseLost, Put
from trireme_shared.platform.etcd.reading import read_record
from trireme_shared.platform.runtime import clock, ids, telemetry
from trireme_shared.platform.storage import files
from trireme_shared.protocol.errors import InvalidArgument, PeerError
from trireme_shared.protocol.records import JobSpec, Mode
from trireme_shared.protocol.records.checkpoints import CheckpointPart, CheckpointRef, OwnCheckpoints
from trireme_shared.protocol.records.step import StepRecord
from trireme_shared.serving.core.ledger import AsyncSnapshot
from trireme_shared.serving.core.stores import AsyncStore

LOOK_S = 0.5
RETRY_S = 2.0
COPY_BYTES = 1 << 20  # of values in one turn, with their optimizer's state: pushes go on meanwhile

log = telemetry.logger("pserver.independent")


class Independent:
    """Saves as often as the job's spec says; asynchronous jobs with independent checkpoints only."""

    def __init__(self, context: PserverContext) -> None:
        self._context = context
        self._etcd, self._keys, self._directory = context.etcd, context.keys, context.directory
        self._pserver, self._own_index, self.offload = context.pserver, context.own_index, context.offload
        self._number = 0
        self._unnamed: set[str] = set()  # checkpoints that were begun here, and that the key does not name

    async def run(self) -> None:
        """Until cancelled. No failure here ends training."""
        spec = self._context.spec
        if spec.mode is not Mode.ASYNC or spec.checkpoint_kind != "independent":
            return
        last: float | None = None
        while True:
            every_s = spec.checkpoint_every_seconds
            due = last is None or (every_s is not None and clock.monotonic() - last >= every_s)
            if self._pserver.store is None or not due or not self._may_save():
                await asyncio.sleep(LOOK_S if last is None or every_s is None else min(LOOK_S, every_s / 4))
                continue
            began = clock.monotonic()
            try:
                await self._save(spec)
                last = began
            except GivenUp as lost:
                log.info("checkpoint_given_up", index=self._pserver.index, cause=str(lost))
                await asyncio.sleep(RETRY_S)
            except (PeerError, LeaseLost) as error:
                log.warning("etcd_away", index=self._pserver.index, cause=str(error))
                await asyncio.sleep(ids.jitter(RETRY_S))
            except Exception as error:
                self._failed(spec, error)
                if not isinstance(error, OSError | InvalidArgument):
                    log.exception("checkpoint_failed", index=self._pserver.index)
                last = began

    def _may_save(self) -> bool:
        """Whether a new checkpoint may be made. After this pserver came back from one, the master has to
        count the losses first: until then the old checkpoint is needed, and the queue that a new one would
        hold lacks the losses."""
        restored, state = self._own_index.record.restored, self._directory.state
        if restored is None or not restored.rejoined:
            return True
        return state is not None and state.mends.get(str(self._pserver.index)) == self._pserver.incarnation

    async def _save(self, spec: JobSpec) -> None:
        """Raises GivenUp, PeerError, LeaseLost, OSError."""
        store, slots, timeline = self._pserver.store, self._directory.slots, self._pserver.timeline
        if store is None or slots is None or not store.numbers:
            raise GivenUp("there is nothing to save")
        assert isinstance(store, AsyncStore)
        began = clock.monotonic()
        before, revision = await self._before()
        cut = await cut_at(self._etcd, self._keys, 0)
        if self._pserver.store is not store:
            raise GivenUp("the parameters were dropped")
        number = max(self._number, before.kept[0].step if before and before.kept else 0) + 1
        snapshot = await self.copied(store, number)
        self._number = number
        pending = PendingCheckpoint(
            uuid=ids.named_uuid("independent", self._keys.job, self._pserver.incarnation, number),
            index=self._pserver.index,
            timeline=timeline,
            slots=slots,
            layout=store.layout,
            mode=store.mode,
            lanes=store.lanes,
            record=snapshot.record,
            restored="",
            cut=Cut(cut.queue),
            file=f"pserver-{self._pserver.index}.{ids.new_id()}.safetensors",
        )
        self._unnamed.add(pending.uuid)
        try:
            part, kept = await self._commit(spec, pending, snapshot, before, revision)
        except (PeerError, LeaseLost):  # the key may name it all the same
            raise
        except (OSError, InvalidArgument, GivenUp):
            await self._remove(spec, {pending.uuid})
            raise
        self._pserver.checkpoint_error = ""
        seconds = round(clock.monotonic() - began, 3)
        log.info(
            "checkpoint_saved", index=self._pserver.index, number=number, bytes=part.bytes, seconds=seconds
        )
        named = {ref.uuid for ref in kept}
        stale = {ref.uuid for ref in (before.kept if before else ())} | self._unnamed
        self._unnamed -= named
        await self._remove(spec, stale - named)

    async def _commit(
        self,
        spec: JobSpec,
        pending: PendingCheckpoint,
        snapshot: AsyncSnapshot,
        before: OwnCheckpoints | None,
        revision: int,
    ) -> tuple[CheckpointPart, tuple[CheckpointRef, ...]]:
        """Its part, and what the key names then. Raises GivenUp, PeerError, LeaseLost, OSError,
        InvalidArgument."""
        try:
            ledger = lambda: ledger_metadata(snapshot)  # noqa: E731
            part = await write_part(saving_of(self._context), self.offload, pending, snapshot, ledger)
        except InvalidArgument as error:
            if self._pserver.store is None:
                raise GivenUp("the parameters were dropped") from error
            raise
        finally:
            snapshot.release()
        if self._pserver.store is None:
            raise GivenUp("the parameters were dropped")
        term, generation = self._pserver.term, self._pserver.generation
        manifest = pending.manifest(
            self._keys.job, spec, [part], term=term, generation=generation, timestamp=part.timestamp
        )
        name: str = await self.offload(writer.write_manifest, spec.storage, manifest)
        ref = CheckpointRef(uuid=pending.uuid, step=part.step, timeline=pending.timeline, manifest=name)
        kept = (ref, *self._older(before))[: spec.keep_checkpoints]
        own = OwnCheckpoints(
            pserver=self._pserver.index,
            incarnation=self._pserver.incarnation,
            timestamp=clock.timestamp(),
            checksum=part.checksum,
            kept=kept,
        )
        key = self._keys.own_checkpoints(self._pserver.index)
        proofs = [self._own_index.held, Compare.mod(key, "==", revision)]
        if not (await self._etcd.txn(proofs, [Put(key, own.to_bytes())])).succeeded:
            raise GivenUp(f"pserver-{self._pserver.index} is another process now, or its key has moved")
        return part, kept

    async def _remove(self, spec: JobSpec, uuids: set[str]) -> None:
        """Files of checkpoints that the key does not name, and never will."""
        if not uuids:
            return
        self._unnamed |= uuids
        try:
            await self.offload(writer.remove, spec.storage, sorted(uuids))
        except OSError as error:  # the next checkpoint removes them
            log.warning("checkpoints_not_deleted", checkpoints=sorted(uuids), cause=str(error))
        else:
            self._unnamed -= uuids

    async def copied(self, store: AsyncStore, number: int) -> AsyncSnapshot:
        """All of it as it is at one instant; pushes go on meanwhile. Raises GivenUp."""
        record = StepRecord(version=number, positions=())

        def begun() -> AsyncSnapshot:
            copying = store.begin_copy(record)
            store.copy_before_changes(copying)
            return copying

        copying = await begin(self._pserver, store, begun)
        if copying is None:
            raise GivenUp("the parameters were dropped")
        whole = False
        try:
            whole = await copy_blocks(self._pserver, store, copying, lambda _: True, COPY_BYTES)
        finally:
            store.copy_before_changes(None)
            if not whole:
                copying.release()
        if not whole:
            raise GivenUp("the parameters were dropped, or blocks moved, while they were copied")
        return copying

    async def _before(self) -> tuple[OwnCheckpoints | None, int]:
        """The key's record, and its revision (0: there is none)."""
        found = await self._etcd.get(self._keys.own_checkpoints(self._pserver.index))
        if found is None:
            return None, 0
        return read_record(OwnCheckpoints, found.key, found.value), found.mod_revision

    def _older(self, before: OwnCheckpoints | None) -> tuple[CheckpointRef, ...]:
        """The checkpoints to keep. If an older one was loaded, those before it were found damaged and go."""
        if before is None:
            return ()
        uuids = [ref.uuid for ref in before.kept]
        loaded = self._pserver.checkpoint
        if before.incarnation != self._pserver.incarnation and loaded in uuids:
            return before.kept[uuids.index(loaded) :]
        return before.kept

    def _failed(self, spec: JobSpec, error: Exception) -> None:
        place = files.join(spec.storage, "checkpoints")
        index = self._pserver.index
        what = f"pserver-{index} cannot write its checkpoint below {place}: {error}"
        self._pserver.checkpoint_error = f"{what}; {advice_for(error)}"
        log.error("checkpoint_failed", message=self._pserver.checkpoint_error)
