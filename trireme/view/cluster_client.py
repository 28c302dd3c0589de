"""The REST API of a cluster's leader as Python calls: its jobs and its pool. Everything inside one job is in client.py.

async with ClusterClient(url, token=token) as cluster:
    await cluster.create_job(request, key="...")
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Literal
from urllib.parse import quote

from trireme.view.client import JOBS, Client

Action = Literal["pause", "resume", "cancel"]


class ClusterClient(Client):
    """`url`: of the leader. Raises as Client does."""

    async def create_job(self, request: dict[str, Any], key: str) -> dict[str, Any]:
        """The job as it is now; a repeated `key` gives the same job."""
        return await self._call("POST", "/v1/jobs", key=key, body=request)

    def jobs(self, standing: str | None = None) -> AsyncIterator[dict[str, Any]]:
        """All jobs (with one standing), in the order of their submission."""
        return self._list("/v1/jobs", "jobs", {"state": standing} if standing else {})

    async def job_named(self, name: str) -> dict[str, Any]:
        """The job in full, as `Client.job` of it."""
        return await self._call("GET", f"{JOBS}{name}")

    async def job_source(self, name: str) -> dict[str, Any]:
        """The script that was sent with the job, and its modules, as a Source."""
        return await self._call("GET", f"{JOBS}{name}/source")

    async def job_tasks(self, name: str) -> list[dict[str, Any]]:
        """Its pre-tasks, then its post-tasks."""
        found = await self._call("GET", f"{JOBS}{name}/job-tasks")
        return list(found["job_tasks"])

    async def act(self, name: str, action: Action) -> dict[str, Any]:
        return await self._call("POST", f"{JOBS}{name}/{action}")

    async def delete_job(self, name: str) -> dict[str, Any]:
        return await self._call("DELETE", f"{JOBS}{name}")

    async def create_schedule(self, request: dict[str, Any], key: str) -> dict[str, Any]:
        """A repeated `key` gives the same schedule."""
        return await self._call("POST", "/v1/schedules", key=key, body=request)

    def schedules(self) -> AsyncIterator[dict[str, Any]]:
        return self._list("/v1/schedules", "schedules", {})

    async def delete_schedule(self, name: str) -> dict[str, Any]:
        return await self._call("DELETE", f"/v1/schedules/{name}")

    def pool_members(self) -> AsyncIterator[dict[str, Any]]:
        return self._list("/v1/pool-members", "members", {})

    async def drain_member(self, member: str) -> dict[str, Any]:
        """The member as it is now."""
        return await self._call("POST", f"/v1/pool-members/{quote(member, safe='')}/drain")

    async def undrain_member(self, member: str) -> dict[str, Any]:
        return await self._call("POST", f"/v1/pool-members/{quote(member, safe='')}/undrain")

    async def pool(self) -> dict[str, Any]:
        """How many members of each kind there are, and how many the jobs need."""
        return await self._call("GET", "/v1/pool")
