"""What a leader does for jobs that have ended: their trackers get what they lack, and what nobody needs any
more is deleted.

EndedTrackers   one job at a time, also if the leader that saw its end died, or a tracker was away. What
                cannot be done within LIMIT_S is tried again later, each time twice as late, ATTEMPTS times
Retention       jobs whose retention is over, or whose deletion a leader has begun and not finished: one at a
                time, each in a transaction of its own, after its files. One whose files cannot be deleted is
                tried again later, each time twice as late, every RAREST_S at least, and an event says why

Storages are others' libraries, which raise what they like: an error of one job's ends nothing but its turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from master_service.control.tracking import finish, result_of
from master_service.core.changes import Event
from master_service.core.decisions.cluster_jobs import due_for_deletion
from master_service.core.state.cluster import ClusterState
from master_service.storage.job_storage import JobStorage
from master_service.trackers.assignment import Memory
from trireme_shared.platform.runtime import clock, telemetry
from trireme_shared.platform.runtime.containment import backoff_s, described
from trireme_shared.protocol.errors import CallerError, NotLeader, NotReady, PeerError
from trireme_shared.protocol.records import JobSpec, JobState
from trireme_shared.protocol.records.cluster import ClusterJob

LOOK_S = 2.0
RETENTION_LOOK_S = 5.0
LIMIT_S = 60.0
AGAIN_S, RAREST_S = 60.0, 7200.0  # after something that failed
ATTEMPTS = 8

log = telemetry.logger("ended_jobs")


class Cluster(Protocol):
    """What it needs of the leader."""

    @property
    def storage(self) -> Callable[[JobSpec], JobStorage]: ...
    @property
    def state(self) -> ClusterState: ...
    def leads(self, name: str) -> bool: ...
    def permitted_s(self) -> float: ...
    async def state_of(self, name: str) -> JobState: ...
    async def delete_job(self, name: str) -> ClusterJob: ...


@dataclass(slots=True)
class Attempts:
    done: int = 0
    next: float = 0.0

    def failed(self) -> None:
        """One more has failed: the next one is later."""
        self.done += 1
        self.next = clock.monotonic() + backoff_s(self.done, AGAIN_S, RAREST_S)


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
                except NotLeader:
                    raise
                except Exception as error:  # noqa: BLE001  whatever a storage's library raises: one job's
                    self._again(job.job, described(error))

    def _due(self) -> list[ClusterJob]:
        now = clock.monotonic()
        jobs = {name: job for name, job in self._cluster.state.jobs.items() if job.spec.trackers}
        led = {name for name in jobs if self._cluster.leads(name)}
        self._over = {name for name in self._over if name in jobs and name not in led}
        self._attempts = {
            name: each for name, each in self._attempts.items() if name in jobs and name not in led
        }
        return [
            job
            for name, job in jobs.items()
            if job.standing.final and job.wanted != "delete"
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
        attempts.failed()
        log.warning("trackers_unfinished", job=name, attempt=attempts.done, of=ATTEMPTS, cause=cause)
        if attempts.done == ATTEMPTS:
            self._over.add(name)
            message = (
                f"trackers of job {name} did not get its end: {cause}. Its stored metrics have everything"
            )
            self._tell([Event("tracker_given_up", message, {"job": name})])


class Retention:
    """`retention_s`: of all jobs of the cluster; None: only deletions that were begun are finished. `tell`
    gets events."""

    def __init__(
        self, cluster: Cluster, retention_s: float | None, tell: Callable[[list[Event]], None]
    ) -> None:
        self._cluster, self._retention_s, self._tell = cluster, retention_s, tell
        self._attempts: dict[str, Attempts] = {}

    def __repr__(self) -> str:
        return f"<Retention of {self._retention_s} s, {sorted(self._attempts)} to do again>"

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(RETENTION_LOOK_S)
            state = self._cluster.state
            self._attempts = {name: each for name, each in self._attempts.items() if name in state.jobs}
            for name in due_for_deletion(state, clock.wall_time(), self._retention_s):
                if name not in self._attempts or self._attempts[name].next <= clock.monotonic():
                    await self._delete(name)

    async def _delete(self, name: str) -> None:
        try:
            await self._cluster.delete_job(name)
            log.info("job_deleted", job=name)
        except NotLeader:
            raise
        except NotReady as error:  # its members leave
            log.info("job_not_deleted", job=name, cause=error.message)
        except Exception as error:  # noqa: BLE001  whatever a storage's library raises: one job's
            if name not in self._cluster.state.jobs:  # its user was faster
                return
            attempts = self._attempts.setdefault(name, Attempts())
            attempts.failed()
            again_s = round(attempts.next - clock.monotonic())
            message = (
                f"job {name} could not be deleted, and is tried again in {again_s} s: {described(error)}"
            )
            self._tell([Event("job_not_deleted", message, {"job": name, "attempt": attempts.done})])
