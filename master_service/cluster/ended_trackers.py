"""Trackers of jobs that have ended get what they lack, and the end: also if the leader that saw the end died, or they were away.

One job at a time. What cannot be done within LIMIT_S is tried again later, each time twice as late, ATTEMPTS times.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from master_service.control.tracking import finish, result_of
from master_service.core.changes import Event
from master_service.core.state.cluster import ClusterState
from master_service.storage.job_storage import JobStorage
from master_service.trackers.memory import Memory
from shared.errors import CallerError, PeerError, TriremeError
from shared.records import JobSpec, JobState
from shared.records.cluster import ClusterJob
from shared.runtime import clock, telemetry

LOOK_S = 2.0
LIMIT_S = 60.0
AGAIN_S = 60.0
ATTEMPTS = 8

log = telemetry.logger("ended_trackers")


class Cluster(Protocol):
    """What it needs of the leader."""

    @property
    def storage(self) -> Callable[[JobSpec], JobStorage]: ...
    @property
    def state(self) -> ClusterState: ...
    def leads(self, name: str) -> bool: ...
    def permitted_s(self) -> float: ...
    async def state_of(self, name: str) -> JobState: ...


@dataclass(slots=True)
class Attempts:
    done: int = 0
    next: float = 0.0


class EndedTrackers:
    def __init__(self, cluster: Cluster, tell: Callable[[list[Event]], None]) -> None:
        self._cluster, self._tell = cluster, tell
        self._attempts: dict[str, Attempts] = {}
        self._over: set[str] = set()

    def __repr__(self) -> str:
        return f"<EndedTrackers: {len(self._over)} jobs done, {sorted(self._attempts)} to do>"

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                jobs = self._due()
            except (CallerError, PeerError):  # it leads no more, or not yet
                continue
            for job in jobs:
                try:
                    await self._finish(job)
                except (TriremeError, OSError) as error:
                    self._again(job.job, str(error))

    def _due(self) -> list[ClusterJob]:
        jobs, now = self._cluster.state.jobs, clock.monotonic()
        led = {name for name in jobs if self._cluster.leads(name)}
        self._over = {name for name in self._over if name in jobs and name not in led}
        self._attempts = {name: each for name, each in self._attempts.items() if name in jobs and name not in led}
        return [
            job
            for name, job in jobs.items()
            if job.spec.trackers and job.standing.final and job.wanted != "delete"
            if name not in self._over and name not in led
            if name not in self._attempts or self._attempts[name].next <= now
        ]

    async def _finish(self, job: ClusterJob) -> None:
        if not await asyncio.to_thread(lambda: Memory(job.spec.storage).ended):
            state = await self._cluster.state_of(job.job)
            storage = self._cluster.storage(job.spec)

            async def folder() -> Path:
                return await storage.script_folder()

            result = result_of(job.standing, job.reason, state.result)
            late = await finish(job.spec, result, LIMIT_S, self._tell, folder, self._cluster.permitted_s)
            if late:
                self._again(job.job, "; ".join(f"{name} {cause}".strip() for name, cause in late.items()))
                return
        self._over.add(job.job)
        self._attempts.pop(job.job, None)

    def _again(self, name: str, cause: str) -> None:
        attempts = self._attempts.setdefault(name, Attempts())
        attempts.done += 1
        attempts.next = clock.monotonic() + AGAIN_S * 2 ** (attempts.done - 1)
        log.warning("trackers_unfinished", job=name, attempt=attempts.done, of=ATTEMPTS, cause=cause)
        if attempts.done == ATTEMPTS:
            self._over.add(name)
            message = f"trackers of job {name} did not get its end: {cause}. Its stored metrics have everything"
            self._tell([Event("tracker_given_up", message, {"job": name})])
