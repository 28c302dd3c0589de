"""A checkpoint is read for this pserver's index and slots. If the slot map changes meanwhile, what was read is not used.

read -> a store       unexpected errors -> again, a few times -> CheckpointUnusable: another checkpoint may be readable
   `-> storage not reached -> `waits` in ps/<index> -> PeerError: again; other checkpoints would not be reached either

The master limits how long a job waits for its parameters (`recovery_timeout_s`).
"""

from __future__ import annotations

import asyncio

from pserver_service.context import PserverContext
from pserver_service.recovery import store_loader
from shared.errors import CheckpointUnusable, PeerError
from shared.etcd.reading import read_record
from shared.records.checkpoints import CheckpointLatest, CheckpointRef, OwnCheckpoints
from shared.runtime import ids, telemetry
from shared.serving.core.store import Store

PAUSE_S = 0.5
TRIES = 4

log = telemetry.logger("pserver.loading")


async def kept_checkpoints(
    context: PserverContext, kind: type[CheckpointLatest | OwnCheckpoints]
) -> tuple[CheckpointRef, ...]:
    """Those of the job, or this pserver's own, that may be loaded, newest first. Raises PeerError."""
    key = context.keys.latest if kind is CheckpointLatest else context.keys.own_checkpoints(context.pserver.index)
    found = await context.etcd.get(key)
    record = read_record(kind, key, found.value if found else None)
    return record.kept if record is not None else ()


async def load_checkpoint(context: PserverContext, ref: CheckpointRef) -> tuple[Store, dict[str, int]]:
    """See `load_store`. Raises CheckpointUnusable; PeerError: try again later."""
    context.pserver.loading = True
    try:
        return await _load(context, ref)
    finally:
        context.pserver.loading = False


async def _load(context: PserverContext, ref: CheckpointRef) -> tuple[Store, dict[str, int]]:
    directory, pserver, cause = context.directory, context.pserver, ""
    for attempt in range(TRIES):
        layout, slots, spec = directory.layout, directory.slots, directory.spec
        if layout is None or slots is None or spec is None:
            raise PeerError("the layout or the slot map is not there yet")
        await pserver.prepare_tables(layout)
        try:
            place = (pserver.index, slots, pserver.schedule, pserver.new_pool(), pserver.clipping)
            found: tuple[Store, dict[str, int]] = await context.offload(
                store_loader.load_store, spec.storage, context.keys.job, layout.digest, ref, *place
            )
        except (CheckpointUnusable, PeerError):
            raise
        except ConnectionError as away:
            msg = f"the storage is not reached: {away}"
            if not context.own_index.record.waits:  # written once, for people to read
                context.own_index.set(
                    waits=f"pserver-{pserver.index} waits to load checkpoint {ref.uuid} (step {ref.step}): {msg}"
                )
            raise PeerError(msg) from away
        except Exception as error:
            cause = f"checkpoint {ref.uuid} (step {ref.step}) could not be read, {attempt + 1} times: {error!r}"
            log.exception("checkpoint_unread", index=pserver.index, cause=cause)
            await asyncio.sleep(ids.jitter(PAUSE_S * 2**attempt))
            continue
        if directory.slots != slots:
            raise PeerError("the slot map changed while the checkpoint was read")
        return found
    raise CheckpointUnusable(cause)
