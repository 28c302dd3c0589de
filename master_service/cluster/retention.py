"""Jobs that have ended are deleted: those whose retention is over, and those whose deletion a leader has begun and not finished.

One at a time, each in a transaction of its own, after its files. One whose files cannot be deleted is tried again later.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from master_service.core.decisions.cluster.retention import due
from master_service.core.state.cluster import ClusterState
from shared.errors import CallerError, PeerError
from shared.records.cluster import ClusterJob
from shared.runtime import clock, telemetry

LOOK_S = 5.0
AGAIN_S = 60.0  # after a deletion that failed

log = telemetry.logger("retention")


class Cluster(Protocol):
    """What it needs of the leader."""

    @property
    def state(self) -> ClusterState: ...
    async def delete_job(self, name: str) -> ClusterJob: ...


class Retention:
    """`retention_s`: of all jobs of the cluster; None: only deletions that were begun are finished."""

    def __init__(self, cluster: Cluster, retention_s: float | None) -> None:
        self._cluster, self._retention_s = cluster, retention_s
        self._failed: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<Retention of {self._retention_s} s>"

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            now = clock.monotonic()
            self._failed = {job: when for job, when in self._failed.items() if now - when < AGAIN_S}
            for name in due(self._cluster.state, clock.wall_time(), self._retention_s):
                if name not in self._failed:
                    await self._delete(name)

    async def _delete(self, name: str) -> None:
        try:
            await self._cluster.delete_job(name)
            log.info("job_deleted", job=name)
        except (CallerError, PeerError) as error:
            # its members leave, its user was faster, or its files cannot be deleted
            self._failed[name] = clock.monotonic()
            log.warning("job_not_deleted", job=name, cause=error.message)
