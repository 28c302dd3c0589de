"""One checkpoint read for the place that this pserver has now, and only used if the place is the same when it is read.

read -> what it holds       wrong answers -> again, a few times -> CheckpointUnusable: another checkpoint may be whole
   `-> storage not reached -> said once in ps/<index> -> PeerError: again, no other checkpoint is reached either

How long a job waits for its parameters is bounded by the master (`recovery_timeout_s`).
"""

from __future__ import annotations

import asyncio

from pserver_service.context import PserverContext
from pserver_service.core.store import Store
from pserver_service.recovery import store_loader
from shared.errors import CheckpointUnusable, PeerError
from shared.records.checkpoints import CheckpointRef
from shared.runtime import ids, telemetry

PAUSE_S = 0.5
TRIES = 4

log = telemetry.logger("pserver.loading")


async def load_checkpoint(context: PserverContext, ref: CheckpointRef) -> tuple[Store, dict[str, int]]:
    """What `load_store` gives. Raises CheckpointUnusable; PeerError: not now, ask again."""
    directory, pserver, cause = context.directory, context.pserver, ""
    for attempt in range(TRIES):
        layout, slots, spec = directory.layout, directory.slots, directory.spec
        if layout is None or slots is None or spec is None:
            raise PeerError("the layout or the slot map is not there yet")
        try:
            place = (pserver.index, slots, pserver.schedule, pserver.new_pool())
            found: tuple[Store, dict[str, int]] = await context.offload(
                store_loader.load_store, spec.storage, context.keys.job, layout.digest, ref, *place
            )
        except (CheckpointUnusable, PeerError):
            raise
        except ConnectionError as away:
            msg = f"the storage is not reached: {away}"
            if not context.own_index.record.waits:  # said once, for people
                context.own_index.set(
                    waits=f"pserver {pserver.index} waits to load checkpoint {ref.uuid} (step {ref.step}): {msg}"
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
