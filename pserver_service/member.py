"""One pserver as a member of its job, without HTTP: claims an index, holds it, writes checkpoints, takes part in rollbacks."""

from __future__ import annotations

import asyncio

from pserver_service.checkpoints.independent import Independent
from pserver_service.checkpoints.pause import PausedCopy
from pserver_service.checkpoints.store_copies import StoreCopies
from pserver_service.context import PserverContext
from pserver_service.drain import Drain
from pserver_service.handoff.follower import SlotFollower
from pserver_service.handoff.sender import HandOver
from pserver_service.recovery import Rejoin, Rollback
from pserver_service.start_rows import StartRowsReader


class Member:
    """`serve` runs until the process shall end. `run` does not drain and release at the end, and needs `directory.run()` beside it."""

    def __init__(self, context: PserverContext) -> None:
        self._directory, self._pserver, self._own_index = context.directory, context.pserver, context.own_index
        self.checkpointer = StoreCopies(context).checkpointer
        self.drain = Drain(context, self.checkpointer)
        self.follower = SlotFollower(context)
        self.rollback, self.rejoin = Rollback(context, self.follower), Rejoin(context, self.follower)
        self.start_rows = StartRowsReader(context)
        saving = self.checkpointer, PausedCopy(context), Independent(context)
        self._parts = (*saving, self.rollback, self.rejoin, self.start_rows, HandOver(context))

    async def serve(self, stopping: asyncio.Event, claim_wait_s: float, drain_seconds: float) -> bool:
        """True: it was asked to stop, has drained (drain.py) and released the index. False: the index is lost. Raises as `run`."""
        async with asyncio.TaskGroup() as group:
            running, following = group.create_task(self.run(claim_wait_s)), group.create_task(self._directory.run())
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

    async def run(self, claim_wait_s: float) -> None:
        """Returns when the index is lost or not wanted any more. Raises DeadlineExceeded: none was free for `claim_wait_s`."""
        index = await self._own_index.claim_index(claim_wait_s)
        self._pserver.claimed(index, self._directory, self._own_index, self.start_rows, self.follower)
        self._directory.observers += [self.follower.follow, self._own_index.follow]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(part.run()) for part in self._parts]
            holding, unwanted = (group.create_task(wait()) for wait in (self._own_index.hold, self._own_index.unwanted))
            await asyncio.wait((holding, unwanted), return_when=asyncio.FIRST_COMPLETED)
            if unwanted.done():
                await self._own_index.release(asked=True)
            for task in (*tasks, holding, unwanted):
                task.cancel()
