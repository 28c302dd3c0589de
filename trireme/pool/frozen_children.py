"""Children of a host agent that live on without their lease: one watch for each job that has children here.
trireme/launch/leases.py says what counts."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from trireme.launch.leases import LostLeases
from trireme_shared.platform.etcd.errors import UNUSABLE
from trireme_shared.platform.etcd.reading import read_record
from trireme_shared.platform.runtime import telemetry
from trireme_shared.platform.runtime.containment import Containment, LongLivedGroup
from trireme_shared.protocol.errors import TriremeError
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import JobSpec

if TYPE_CHECKING:
    from trireme.pool.place import Host, Place

LOOK_S = 1.0

log = telemetry.logger("host_agent")


class FrozenChildren:
    """`places`: all of the host."""

    def __init__(self, host: Host, places: Sequence[Place]) -> None:
        self._host, self._places = host, places

    def __repr__(self) -> str:
        return f"<FrozenChildren of {self._host.name}>"

    async def run(self) -> None:
        """Until cancelled."""
        watches: dict[str, asyncio.Task[None]] = {}
        contained = Containment(UNUSABLE)
        async with LongLivedGroup() as group:
            while True:
                jobs = {place.job for place in self._places if place.child is not None}
                for job in watches.keys() - jobs:
                    watches.pop(job).cancel()
                for job in jobs - watches.keys():
                    watching = contained.keep(partial(self._watch, job), f"watching leases of job {job}")
                    watches[job] = group.create_task(watching)
                await asyncio.sleep(LOOK_S)

    async def _watch(self, job: str) -> None:
        keys = Keys(job, self._host.keys.root)
        lost = LostLeases(await self._lease_ttl_s(keys))
        await lost.follow(
            self._host.etcd, keys, self._alive_in(job), partial(self._end, lost), f"{self._host.name}-"
        )

    async def _lease_ttl_s(self, keys: Keys) -> float:
        """Of the job's members, from its spec."""
        while True:
            try:
                found = await self._host.etcd.get(keys.spec)
                spec = read_record(JobSpec, found.key, found.value) if found is not None else None
                if spec is not None:
                    return spec.lease_ttl_s
            except TriremeError as error:
                log.debug("etcd_away", key=keys.spec, cause=str(error))
            await asyncio.sleep(LOOK_S)

    def _alive_in(self, job: str) -> Callable[[], dict[str, int]]:
        def alive() -> dict[str, int]:
            return {
                place.short_name: place.child.pid
                for place in self._places
                if place.job == job and place.child is not None and place.child.alive
            }

        return alive

    def _end(self, lost: LostLeases, name: str) -> None:
        for place in self._places:
            if place.short_name == name and place.child is not None:
                pid, loss = place.child.pid, lost.ended(place.child.pid)
                log.warning("child_lost_its_lease", member=place.member, pid=pid, cause=str(loss))
                if loss is not None and loss.stopped:
                    place.child.pardon()
                place.child.send(signal.SIGKILL)
