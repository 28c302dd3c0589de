"""A roll-back from the master's side: who has to leave, what the checkpoint says, the queue rewound, RUNNING again.

ROLLING_BACK: manifest read -> every pserver says that it has restored -> queue rewound, in parts -> RUNNING

Everything is decided from etcd and the manifest, so a master that takes over in the middle does it again from the start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from master_service.core import rollback
from master_service.core.books import Books
from master_service.core.changes import Change, Decision
from master_service.core.metrics import Metrics
from master_service.manifests import Manifests
from master_service.transact import Transactor
from shared import clock, ids, telemetry
from shared.errors import CheckpointUnusable
from shared.etcd import Etcd
from shared.keys import Keys
from shared.manifest import Manifest
from shared.messages import LanePosition
from shared.records import JobState, Phase

STORAGE_TRIES = 4
PAUSE_S = 0.5
AT_ONCE = 80  # changes in one transaction

log = telemetry.logger("recovery")


class Recovery:
    """Of one reign. `advance` after each change of the members or the state: it does what can be done now."""

    def __init__(self, etcd: Etcd, keys: Keys, writer: Transactor, manifests: Manifests, metrics: Metrics) -> None:
        self._etcd, self._keys, self._writer, self._manifests, self._metrics = etcd, keys, writer, manifests, metrics
        self._manifest: Manifest | None = None
        self._since: float | None = None

    @property
    def _books(self) -> Books:
        return self._writer.books

    async def advance(self) -> bool:
        """Whether something was decided that asks for another look."""
        await self._clear_the_field()
        state = self._books.state
        if state.phase is not Phase.ROLLING_BACK:
            self._since = None
            return False
        if self._since is None:
            self._since = clock.monotonic()
        manifest = await self._read(state)
        if manifest is None:
            return True
        books = self._books
        if not rollback.is_restored(books.spec, books.state, books.slots, books.members):
            return False
        return await self._rewind(state, manifest.step, manifest.record.positions)

    async def _clear_the_field(self) -> None:
        """Without any checkpoint, pservers that still hold parameters leave: their leases are revoked."""
        books = self._books
        leaving = rollback.survivors(books.spec, books.state, books.members)
        if not leaving or await self._etcd.get(self._keys.latest) is not None:
            return
        for member in leaving:
            log.warning("pserver_put_out", pserver=member.index, cause="parameters are lost, no checkpoint exists yet")
            await self._etcd.revoke(member.lease)

    async def _read(self, state: JobState) -> Manifest | None:
        """The manifest of the checkpoint; None if it cannot be used, which is decided about."""
        if self._manifest is not None and self._manifest.uuid == state.checkpoint:
            return self._manifest
        ref = rollback.ref_of(self._books.members.latest, state.checkpoint)
        error = f"checkpoint {state.checkpoint} is not among those kept"
        for attempt in range(STORAGE_TRIES if ref else 0):
            assert ref is not None
            try:
                manifest = await self._manifests.read(ref)
            except CheckpointUnusable as unusable:
                error = unusable.message
                break
            except OSError as trouble:
                error = f"checkpoint {ref.uuid} (step {ref.step}) could not be read {attempt + 1} times: {trouble!r}"
                log.warning("manifest_unread", cause=error)
                await asyncio.sleep(ids.jitter(PAUSE_S * 2**attempt))
                continue
            if len(manifest.record.positions) == self._books.spec.lanes:
                self._manifest = manifest
                return manifest
            error = (
                f"checkpoint {ref.uuid} (step {ref.step}) has {len(manifest.record.positions)} lanes, the job has "
                f"{self._books.spec.lanes}"
            )
            break

        def fall_back(books: Books, _now: float) -> Decision[None]:
            if books.state != state:
                return Decision(None)
            return rollback.fall_back(books.spec, books.state, books.slots, books.members.latest, error)

        await self._writer.decide(fall_back)
        return None

    async def _rewind(self, state: JobState, step: int, positions: Sequence[LanePosition]) -> bool:
        """The queue as it was at the checkpoint, then RUNNING in one transaction. Nobody is given a task meanwhile."""
        records = max(self._metrics.records_from(step), rollback.done_since(self._books, positions))
        await self._write(state, rollback.clear(positions).changes)
        changes = rollback.rewinding(self._books, positions)
        for first in range(0, len(changes), AT_ONCE):
            await self._write(state, changes[first : first + AT_ONCE])
        seconds = clock.monotonic() - (self._since or clock.monotonic())

        def resume(books: Books, _now: float) -> Decision[bool]:
            if books.state != state:
                return Decision(False)
            return rollback.resume(books, positions, step, records=records, seconds=seconds)

        if await self._writer.decide(resume):
            self._metrics.rewind(step)
        return True

    async def _write(self, state: JobState, changes: Sequence[Change]) -> None:
        await self._writer.decide(lambda books, _: Decision(None, tuple(changes) if books.state == state else ()))
