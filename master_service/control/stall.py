"""For whom a job waits that makes no progress: members that have not renewed their leases for a while, or are gone.

progress ─► nothing to tell
none for STALL_S ─► etcd is asked how old each member's last renewal is ─► "waiting for pserver-0, silent for 14 s"
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from itertools import islice

from master_service.core.state.job import Job
from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.runtime import clock
from trireme_shared.protocol.errors import TriremeError
from trireme_shared.protocol.records import PserverMember, TrainerMember

STALL_S = 3.0
LOOK_S = 1.0  # who asks more often gets the last answer
ANSWER_S = 1.0
ASKED = 100  # members whose leases are looked at


class StallWatch:
    """It looks only when it is asked. `text`: empty while the job makes progress, and while nobody is silent: a step may take
    long."""

    def __init__(self, etcd: Etcd) -> None:
        self.text = ""
        self._etcd = etcd
        self._looking = asyncio.Lock()
        self._looked = self._moved = float("-inf")
        self._records = -1
        self._heard: dict[str, float] = {}  # when each member last renewed its lease, as far as known

    async def look(self, job: Job, records: int) -> str:
        """`records`: trained so far; another number is progress. Returns `text`."""
        async with self._looking:
            now = clock.monotonic()
            if now - self._looked >= LOOK_S:
                await self._look(job, records, now)
                self._looked = now
        return self.text

    async def _look(self, job: Job, records: int, now: float) -> None:
        if self._looked > float("-inf") and records != self._records:
            self._moved = now
        self._records = records
        present = _present(job)
        if now - self._moved < STALL_S or job.state.phase.final:
            gone = {name: at for name, at in self._heard.items() if name.startswith("pserver-")}
            self._heard = gone | dict.fromkeys(present, now)
            self.text = ""
            return
        await self._ask_all(job, now)
        self.text = waiting_for(job, self._heard, now)

    async def silent(self, job: Job) -> dict[str, float]:
        """Members that have not renewed their leases for a while, asked now, whether or not the job makes progress -> seconds."""
        async with self._looking:
            now = clock.monotonic()
            await self._ask_all(job, now)
            return late_members(job, self._heard, now)

    async def _ask_all(self, job: Job, now: float) -> None:
        async with asyncio.TaskGroup() as group:
            for name, member in islice(_present(job).items(), ASKED):
                group.create_task(self._ask(name, member, job.spec.lease_ttl_s, now))

    async def _ask(self, name: str, member: PserverMember | TrainerMember, ttl_s: float, now: float) -> None:
        with suppress(TriremeError):  # etcd is away: nothing new is known
            left_s = await self._etcd.time_to_live(member.lease, timeout_s=ANSWER_S)
            if left_s >= 0:
                self._heard[name] = now - max(0.0, ttl_s - left_s)


def late_members(job: Job, heard: dict[str, float], now: float) -> dict[str, float]:
    """`heard`: when each member last renewed its lease, also of parameter servers that are gone."""
    wanted = {*_present(job), *(f"pserver-{index}" for index in range(job.spec.pservers))}
    least_s = max(STALL_S, job.spec.lease_ttl_s * 2 / 3)
    return {name: now - at for name, at in heard.items() if name in wanted and now - at > least_s}


def waiting_for(job: Job, heard: dict[str, float], now: float) -> str:
    """A sentence about `late_members`, or ""."""
    silent = late_members(job, heard, now)
    late = sorted(silent, key=lambda name: -silent[name])
    if not late:
        return ""
    more = f" (and {len(late) - 1} more)" if len(late) > 1 else ""
    return f"waiting for {late[0]}, silent for {silent[late[0]]:.0f} s{more}"


def _present(job: Job) -> dict[str, PserverMember | TrainerMember]:
    pservers = {f"pserver-{index}": member for index, member in job.members.pservers.items()}
    return {**pservers, **job.members.trainers}
