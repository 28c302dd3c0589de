"""What follows from who is there and from the clock, decided by whoever is in charge of the job.

members change -> follow (generation, lanes, phase) -> lost trainers' tasks go back, a roll-back advances (recovery.py)
every sweep    -> tasks over their time -> requeued, discarded, or (lanes) their trainer put out
"""

from __future__ import annotations

import asyncio

from master_service.control.recovery import Recovery
from master_service.core.decisions import tasks
from master_service.core.decisions.membership import follow
from master_service.core.state.changes import Decision
from master_service.core.state.job import Job
from master_service.core.state.metrics import Metrics
from master_service.datasets.manifests import Manifests
from master_service.store.writer import Writer
from shared.errors import NotLeader, PeerError
from shared.etcd import Etcd
from shared.keys import Keys
from shared.runtime import clock, ids, telemetry

SWEEP_S = 1.0
PAUSE_S = 0.5

log = telemetry.logger("oversight")


class Oversight:
    """Of one reign. `look_again` after each change of `writer.job.members`."""

    def __init__(self, etcd: Etcd, keys: Keys, writer: Writer, manifests: Manifests, metrics: Metrics) -> None:
        self._etcd, self._writer = etcd, writer
        self._changed = asyncio.Event()
        self._recovery = Recovery(etcd, keys, writer, manifests, metrics)

    def look_again(self) -> None:
        self._changed.set()

    async def run(self) -> None:
        """Until the writer's reign ends (raises NotLeader in an ExceptionGroup) or cancelled."""
        self._changed.set()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_members())
            group.create_task(self._sweep())

    async def put_out(self, trainer: str, reason: str) -> None:
        """End a trainer's membership: its lease is revoked, the watch sees its key vanish."""
        member = self._writer.job.members.trainers.get(trainer)
        if member is None or not member.lease:
            return
        log.warning("trainer_put_out", trainer=trainer, cause=reason)
        await self._etcd.revoke(member.lease)

    async def _follow_members(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            before = self._writer.job.state
            await self._writer.decide(_follow)
            if self._writer.job.state != before:
                self._changed.set()  # a new phase may ask for more
            await self._put_back_lost()
            try:
                if await self._recovery.advance():
                    self._changed.set()
            except NotLeader:
                raise
            except PeerError as error:  # etcd is away; what was read or revoked is done again
                log.warning("recovery_delayed", cause=error.message)
                await asyncio.sleep(ids.jitter(PAUSE_S))
                self._changed.set()

    async def _put_back_lost(self) -> None:
        while await self._writer.decide(lambda job, _: tasks.put_back_lost(job)):
            pass

    async def _sweep(self) -> None:
        interval = min(SWEEP_S, self._writer.job.spec.task_timeout_floor_s / 4)
        while True:
            await asyncio.sleep(interval)
            await self._recovery.give_up_late()
            late = await self._writer.decide(tasks.expire)
            if not late:
                continue
            self._writer.job.training.grant_again(clock.monotonic())
            for trainer in late:
                await self.put_out(trainer, "its task ran over its time while other lanes wait for it")


def _follow(job: Job, _now: float) -> Decision[None]:
    return follow(job.spec, job.state, job.lanes, job.slots, job.members)
