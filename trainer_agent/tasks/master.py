"""The master as a trainer sees it: it gives tasks and takes reports. HttpMaster finds the leader; callers
retry PeerErrors."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol
from urllib.parse import quote

import aiohttp

from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.membership.directory import Directory
from trireme_shared.platform.runtime.http import call_json
from trireme_shared.protocol.errors import NotFound, NotLeader, TriremeError
from trireme_shared.protocol.records import (
    AcquireTask,
    Completed,
    CompleteTask,
    FailTask,
    MasterAddress,
    MetricBatch,
    MetricsTaken,
    Record,
    TaskAnswer,
    TaskProgress,
    UserFailure,
)

TIMEOUT_S = 10.0
STARTING_S = 30.0
LOOK_S = 5.0


class MasterPort(Protocol):
    """One attempt each. Raises the errors of trireme_shared.protocol.errors; PeerError: no answer, or no
    leader: ask again later."""

    async def acquire_task(self, ask: AcquireTask) -> TaskAnswer: ...
    async def report_progress(self, task_id: str, progress: TaskProgress) -> None: ...
    async def complete_task(self, task_id: str, done: CompleteTask) -> Completed: ...
    async def fail_task(self, task_id: str, failed: FailTask) -> None: ...
    async def report_metrics(self, batch: MetricBatch) -> MetricsTaken: ...
    async def report_suspect(self, member_id: str) -> object: ...
    async def report_failure(self, member_id: str, failure: UserFailure) -> None: ...


class HttpMaster:
    """Over REST, at the leader that the directory names or that a standby names in its answer."""

    def __init__(self, directory: Directory, client: aiohttp.ClientSession, etcd: Etcd) -> None:
        self._directory, self._client, self._etcd = directory, client, etcd

    async def acquire_task(self, ask: AcquireTask) -> TaskAnswer:
        """It may wait at the leader: PeerError as soon as another one leads."""
        call = self._post("/task-leases", ask, {"Idempotency-Key": ask.request}, ask.wait_s)
        return TaskAnswer.model_validate(await (self._while_it_leads(call) if ask.wait_s else call))

    async def _while_it_leads(self, call: Coroutine[Any, Any, Any]) -> Any:
        leader = self._directory.master
        calling, leading = asyncio.ensure_future(call), asyncio.ensure_future(self._other_leader(leader))
        try:
            await asyncio.wait({calling, leading}, return_when=asyncio.FIRST_COMPLETED)
            if calling.done():
                return calling.result()
            raise NotLeader("another master leads now, or none: ask again")
        finally:
            calling.cancel()
            leading.cancel()
            await asyncio.wait({calling, leading})

    async def _other_leader(self, leader: MasterAddress | None) -> None:
        while self._directory.master == leader:
            await self._directory.changed(self._directory.revision, LOOK_S)

    async def report_progress(self, task_id: str, progress: TaskProgress) -> None:
        await self._post(f"/task-leases/{quote(task_id)}/progress", progress)

    async def complete_task(self, task_id: str, done: CompleteTask) -> Completed:
        return Completed.model_validate(await self._post(f"/task-leases/{quote(task_id)}/complete", done))

    async def fail_task(self, task_id: str, failed: FailTask) -> None:
        await self._post(f"/task-leases/{quote(task_id)}/fail", failed)

    async def report_metrics(self, batch: MetricBatch) -> MetricsTaken:
        return MetricsTaken.model_validate(await self._post("/metric-batches", batch))

    async def report_suspect(self, member_id: str) -> None:
        await self._post(f"/members/{quote(member_id)}/suspect", None)

    async def report_failure(self, member_id: str, failure: UserFailure) -> None:
        """A trainer that is not registered (yet, or any more) shows by a key in etcd that it belongs to the
        job."""
        path = f"/members/{quote(member_id)}/failures"
        try:
            await self._post(path, failure)
        except NotFound:
            lease = await self._etcd.grant(STARTING_S)
            await self._etcd.put(self._directory.keys.starting(member_id), b"failed", lease.id)
            await self._post(path, failure)

    async def _post(
        self, path: str, record: Record | None, headers: dict[str, str] | None = None, longer_s: float = 0.0
    ) -> Any:
        master = self._directory.master
        if master is None:
            raise NotLeader("no master has published its address")
        path = f"/v1/jobs/{self._directory.keys.job}{path}"
        body = record.to_bytes() if record is not None else b"{}"
        limit_s = TIMEOUT_S + longer_s
        try:
            return await call_json(
                self._client, "POST", master.url + path, body, timeout_s=limit_s, headers=headers
            )
        except NotLeader as error:
            leader = error.details.get("leader")
            if not isinstance(leader, str) or not leader or leader == master.url:
                raise
            return await call_json(
                self._client, "POST", leader + path, body, timeout_s=limit_s, headers=headers
            )


def failure_of(error: TriremeError, *, task: str = "", trainer: str = "") -> UserFailure:
    """`error` as the record that tells the master, and in the end the user, what happened where."""
    return UserFailure(
        error_type=str(error.details.get("error_type", error.code)),
        message=str(error.details.get("error_message", error.message)),
        traceback=str(error.details.get("traceback", "")),
        task=task,
        trainer=trainer,
        fatal=bool(error.details.get("fatal")),
    )
