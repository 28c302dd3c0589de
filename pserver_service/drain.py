"""A parameter server that was asked to stop (SIGTERM, a spot notice) saves its parameters first, within a time limit.

stopping -> draining in ps/<index> -> the master asks for a checkpoint -> it is the latest
         -> parts and commits under way are finished -> the index is released

It serves meanwhile. When another process has claimed the index, the job goes back to that checkpoint: few steps are done
again, with the same bits. If nobody would make a checkpoint (nobody trains, no master), it leaves at once.
"""

from __future__ import annotations

import asyncio

from pserver_service.context import PserverContext
from trireme_shared.checkpoints.parts import Checkpointer
from trireme_shared.platform.runtime import clock, telemetry
from trireme_shared.protocol.records import Dispatch, Mode, Phase, Stage
from trireme_shared.protocol.records.operations import saves_on_demand

LOOK_S = 0.1
NO_CHECKPOINT_S = 3.0  # until it leaves; a standby may take over, a trainer may come back

log = telemetry.logger("pserver.drain")


class Drain:
    def __init__(self, context: PserverContext, checkpointer: Checkpointer) -> None:
        self._directory, self._pserver, self._own_index = context.directory, context.pserver, context.own_index
        self._checkpointer = checkpointer

    async def run(self, limit_s: float) -> None:
        """Returns when there is nothing left to save, or after `limit_s`."""
        begin = clock.monotonic()
        doing = "a checkpoint of this step or a later one"
        try:
            async with asyncio.timeout(limit_s):
                if self._could_be_saved():
                    await self._be_saved()
                doing = "its last checkpoint to be written and committed"
                while self._checkpointer.busy:
                    await self._look()
        except TimeoutError:
            log.warning("drained_too_slowly", index=self._pserver.index, seconds=limit_s, waited_for=doing)
        log.info("drained", index=self._pserver.index, seconds=round(clock.monotonic() - begin, 3))

    async def _be_saved(self) -> None:
        """Until the latest checkpoint has this version or a later one, or nobody would make one."""
        assert self._pserver.store is not None
        store, state, possible_at = self._pserver.store, self._directory.state, clock.monotonic()
        # asynchronous: the number of the next checkpoint
        version = store.highest if store.mode is Mode.SYNC or state is None else state.saved + 1
        while not self._is_saved(version):
            now = clock.monotonic()
            possible_at = now if self._could_be_saved() else possible_at
            if now - possible_at > NO_CHECKPOINT_S:
                log.info("not_saved", index=self._pserver.index, step=version, job=repr(self._directory))
                return
            if self._own_index.record.draining != version:
                self._own_index.set(draining=version)
            await self._look()

    def _could_be_saved(self) -> bool:
        """Whether the job trains, and somebody could ask for a checkpoint."""
        view = self._directory
        if view.spec is None or view.state is None or self._pserver.store is None:
            return False
        if view.master is None and view.spec.dispatch is Dispatch.MASTER:
            return False
        if not self._pserver.store.numbers:
            return False
        runs = view.state.phase in {Phase.RUNNING, Phase.CHECKPOINTING} and view.state.stage is Stage.TRAIN
        return runs and bool(view.trainers.names) and saves_on_demand(view.spec)

    def _is_saved(self, version: int) -> bool:
        latest = self._checkpointer.committer.seen.latest
        return latest is not None and latest.covers(self._pserver.timeline, version)

    async def _look(self) -> None:
        await self._directory.changed(self._directory.revision, LOOK_S)
