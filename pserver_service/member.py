"""One pserver as a member of its job, without HTTP: claims an index, holds it, writes checkpoints, takes part
in rollbacks. One that was asked to stop (SIGTERM, a spot notice) saves its parameters first, within a time
limit:

stopping -> draining in ps/<index> -> the master asks for a checkpoint -> it is the latest
         -> parts and commits under way are finished -> the index is released

It serves meanwhile. When another process has claimed the index, the job goes back to that checkpoint: few
steps are done again, with the same bits. If nobody would make a checkpoint (nobody trains, no master), it
leaves at once. One that is not wanted any more, because a resize has moved its slots to others, asks for no
checkpoint, and finishes the parts of those that were begun before.
"""

from __future__ import annotations

import asyncio

from pserver_service.checkpoints.copies import PausedCopy, StoreCopies
from pserver_service.checkpoints.independent import Independent
from pserver_service.context import PserverContext
from pserver_service.handoff.follower import SlotFollower
from pserver_service.handoff.sender import HandOver
from pserver_service.recovery import Rejoin, Rollback
from pserver_service.start_rows import StartRowsReader
from trireme_shared.checkpoints.parts import Checkpointer
from trireme_shared.platform.etcd.errors import UNUSABLE
from trireme_shared.platform.runtime import clock, telemetry
from trireme_shared.platform.runtime.containment import Containment, LongLivedGroup
from trireme_shared.protocol.records import Dispatch, Mode, Phase, Stage
from trireme_shared.protocol.records.operations import saves_on_demand

LOOK_S = 0.1
NO_CHECKPOINT_S = 3.0  # until it leaves; a standby may take over, a trainer may come back

log = telemetry.logger("pserver.drain")


class Member:
    """`serve` runs until the process shall end. `run` does not drain and release at the end, and needs
    `directory.run()` beside it."""

    def __init__(self, context: PserverContext) -> None:
        self._directory, self._pserver, self._own_index = (
            context.directory,
            context.pserver,
            context.own_index,
        )
        self.checkpointer = StoreCopies(context).checkpointer
        self.drain = Drain(context, self.checkpointer)
        self.follower = SlotFollower(context)
        self.rollback, self.rejoin = Rollback(context, self.follower), Rejoin(context, self.follower)
        self.start_rows = StartRowsReader(context)
        self._paused, self._independent = PausedCopy(context), Independent(context)
        self._hand_over = HandOver(context)

    async def serve(self, stopping: asyncio.Event, claim_wait_s: float, drain_seconds: float) -> bool:
        """True: it was asked to stop, has drained and released the index. False: the index is lost. Raises as
        `run`."""
        async with LongLivedGroup() as group:
            running, following = (
                group.create_task(self.run(claim_wait_s, drain_seconds)),
                group.create_task(self._directory.run()),
            )
            asked = group.create_task(stopping.wait())
            await asyncio.wait((running, following, asked), return_when=asyncio.FIRST_COMPLETED)
            if stopping.is_set() and not running.done():
                draining = group.create_task(self.drain.run(drain_seconds))
                await asyncio.wait((running, draining), return_when=asyncio.FIRST_COMPLETED)
                draining.cancel()
            for task in (running, following, asked):
                task.cancel()
        if not stopping.is_set():
            return False
        await self._own_index.release(asked=True)
        return True

    async def run(self, claim_wait_s: float, drain_seconds: float) -> None:
        """Returns when the index is lost, or is not wanted any more and the parts of checkpoints that were
        begun before are finished, for which this process stays at most `drain_seconds`. Raises
        DeadlineExceeded: none was free for `claim_wait_s`."""
        index = await self._own_index.claim_index(claim_wait_s)
        self._pserver.claimed(index, self._directory, self._own_index, self.start_rows, self.follower)
        self._directory.observers += [self.follower.follow, self._own_index.follow]
        async with LongLivedGroup() as group:
            # of a failed recovery nobody knows what the store holds: another process begins with a checkpoint
            tasks = [group.create_task(part.run()) for part in (self.rollback, self.rejoin)]
            contained = {
                "saving checkpoints": self.checkpointer.run,
                "copying for a paused checkpoint": self._paused.run,
                "saving its own checkpoints": self._independent.run,
                "reading the rows that tables start with": self.start_rows.run,
                "handing blocks over": self._hand_over.run,
            }
            keep = Containment(UNUSABLE).keep
            tasks += [group.create_task(keep(run, what)) for what, run in contained.items()]
            holding = group.create_task(self._own_index.hold())
            unwanted = group.create_task(self._unwanted(drain_seconds))
            await asyncio.wait((holding, unwanted), return_when=asyncio.FIRST_COMPLETED)
            if unwanted.done():
                await self._own_index.release(asked=True)
            for task in (*tasks, holding, unwanted):
                task.cancel()

    async def _unwanted(self, drain_seconds: float) -> None:
        """Returns when the job does not want this index any more, and the parts that were begun are finished:
        nobody else has the versions from before the slots moved away, and training may wait for one that is
        evaluated. A resize may want the index again meanwhile."""
        while True:
            await self._own_index.unwanted()
            await self.drain.run(drain_seconds, asks=False)
            if not self._own_index.is_wanted:
                return


class Drain:
    """Saves the parameters of a process that was asked to stop, or that is not wanted any more."""

    def __init__(self, context: PserverContext, checkpointer: Checkpointer) -> None:
        self._directory, self._pserver, self._own_index = (
            context.directory,
            context.pserver,
            context.own_index,
        )
        self._checkpointer = checkpointer

    async def run(self, limit_s: float, *, asks: bool = True) -> None:
        """Returns when there is nothing left to save, or after `limit_s`. `asks`: also for a checkpoint of
        what the process has now; else it finishes those that are begun."""
        begin = clock.monotonic()
        doing = "a checkpoint of this step or a later one"
        try:
            async with asyncio.timeout(limit_s):
                if asks and self._could_be_saved():
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
