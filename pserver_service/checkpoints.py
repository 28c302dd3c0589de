"""Checkpoints without a pause: each pserver writes its part by itself, whoever sees all parts commits them (commit.py).

version due -> snapshot -> begun, started -> file -> finished part     each write fenced by the own ps/<index>
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from pserver_service import disk
from pserver_service.commit import Committer, GivenUp, Written
from pserver_service.core.snapshot import Snapshot
from pserver_service.disk import Offload
from pserver_service.registration import Registration
from pserver_service.service import Pserver
from shared import checkpoints, clock, ids, storage, telemetry
from shared.directory import Directory
from shared.errors import PeerError
from shared.etcd import Delete, Etcd, LeaseLost, Operation, Put
from shared.keys import Keys
from shared.manifest import CheckpointPart, CheckpointStarted
from shared.records import JobSpec

PATIENCE_S = 600.0  # how long etcd may be away before a snapshot is given up
PAUSE_S = 0.5

log = telemetry.logger("pserver.checkpoints")


class Checkpointer:
    """`offload` runs what blocks; it is asked for one thing at a time."""

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
        self._token = ids.new_id()
        self.committer = Committer(etcd, keys, directory, pserver, registration, offload)

    def __repr__(self) -> str:
        return f"<Checkpointer {self._pserver.index}: {self.committer!r}>"

    async def run(self) -> None:
        """Until cancelled; nothing that goes wrong here ends training."""
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
            try:
                await self._write(snapshot)
            except GivenUp as lost:
                log.info("part_given_up", index=self._pserver.index, step=snapshot.version, cause=str(lost))
            except Exception as error:
                self._trouble(snapshot.version, error)
                log.exception("part_failed", index=self._pserver.index, step=snapshot.version)
            finally:
                snapshot.release()

    async def _write(self, snapshot: Snapshot) -> None:
        """Raises GivenUp, PeerError."""
        store, timeline, restored = self._pserver.store, self._pserver.timeline, self._pserver.checkpoint
        assert store is not None
        await self._directory.wait_for(lambda seen: seen.slots is not None, PATIENCE_S, "the slot map")
        slots = self._directory.slots
        assert slots is not None
        written = Written(
            uuid=checkpoints.checkpoint_uuid(self._keys.job, timeline, slots.version, snapshot.version),
            timeline=timeline,
            slots=slots,
            layout=store.layout,
            mode=store.mode,
            lanes=store.lanes,
            record=snapshot.record,
            restored=restored,
        )
        started = CheckpointStarted(step=snapshot.version, timeline=timeline, **self._me)
        begun = Put(self._keys.checkpoint_begun(written.uuid), started.to_bytes())
        await self._fenced(timeline, lambda: [begun, self._started(written.uuid, started)])
        file = f"pserver-{self._pserver.index}.{self._token}.safetensors"
        begin = clock.monotonic()
        try:
            summary = await self._offload(
                disk.write_part, self._url(written.uuid, file), self._metadata(written), snapshot
            )
        except OSError as error:
            self._check(timeline)
            self._trouble(snapshot.version, error)
            failed = started.model_copy(update={"error": self._pserver.checkpoint_error})
            await self._fenced(timeline, lambda: [self._started(written.uuid, failed)])
            return
        snapshot.release()
        self._pserver.checkpoint_error = ""
        seconds = round(clock.monotonic() - begin, 3)
        log.info("part_written", step=snapshot.version, bytes=summary.bytes, seconds=seconds, skipped=store.skipped)
        part = CheckpointPart(
            step=snapshot.version,
            timeline=timeline,
            file=file,
            md5=summary.md5,
            bytes=summary.bytes,
            timestamp=clock.timestamp(),
            **self._me,
        )
        self.committer.add(written)
        await self._fenced(
            timeline,
            lambda: [
                Put(self._keys.checkpoint_part(written.uuid, part.pserver), part.to_bytes()),
                Delete(self._keys.checkpoint_started(written.uuid, part.pserver)),
            ],
        )

    @property
    def _me(self) -> dict[str, Any]:
        return {"pserver": self._pserver.index, "incarnation": self._pserver.incarnation}

    def _url(self, uuid: str, file: str) -> str:
        return storage.join(checkpoints.folder(self._spec.storage, uuid), file)

    def _metadata(self, written: Written) -> dict[str, str]:
        return {
            "format": "pt",
            "job": self._keys.job,
            "uuid": written.uuid,
            "step": str(written.record.version),
            "timeline": str(written.timeline),
            "pserver": str(self._pserver.index),
            "digest": written.layout.digest,
        }

    def _started(self, uuid: str, started: CheckpointStarted) -> Put:
        key = self._keys.checkpoint_started(uuid, started.pserver)
        return Put(key, started.to_bytes(), self._registration.lease.id)

    async def _fenced(self, timeline: int, operations: Callable[[], Sequence[Operation]]) -> None:
        """Do it once the index is proven held; repeated while etcd is away. Raises GivenUp, PeerError."""
        deadline = clock.monotonic() + PATIENCE_S
        while True:
            self._check(timeline)
            try:
                if (await self._etcd.txn([self._registration.held], operations())).succeeded:
                    return
            except (PeerError, LeaseLost) as error:  # the same values again: what is unknown may be repeated
                if clock.monotonic() > deadline:
                    raise
                log.warning("etcd_away", index=self._pserver.index, cause=str(error))
                await asyncio.sleep(ids.jitter(PAUSE_S))
            else:
                raise GivenUp(f"pserver {self._pserver.index} is another process now")

    def _check(self, timeline: int) -> None:
        if self._pserver.timeline != timeline or self._pserver.store is None:
            raise GivenUp(f"the job left timeline {timeline}")

    def _trouble(self, step: int, error: Exception) -> None:
        place = storage.join(self._spec.storage, "checkpoints")
        self._pserver.checkpoint_error = (
            f"pserver {self._pserver.index} cannot write its part of the checkpoint of step {step} below {place}: {error}; "
            "training goes on and the checkpoints before it stay; make room or give the job a storage that can be written"
        )
        log.error("checkpoint_failed", message=self._pserver.checkpoint_error)

    @property
    def _spec(self) -> JobSpec:
        assert self._directory.spec is not None, "the index is claimed only with the spec known"
        return self._directory.spec
