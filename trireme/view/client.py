"""The master's REST API as Python calls: one method for each operation; returns JSON objects, raises the errors of shared.errors.

async with Client("http://127.0.0.1:8470") as client:
    print((await client.job())["phase"])
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Self
from urllib.parse import quote

import httpx

from shared.errors import DeadlineExceeded, InvalidArgument, NotReady, PeerError, TriremeError, Unauthorized, from_map
from shared.runtime import clock, ids
from shared.security.hidden import without_user
from shared.security.tls import client_context

TIMEOUT_S = 10.0
MASTERLESS = "etcd+"  # etcd+http://HOST:PORT/JOB is the address of a job without a master (job_address.py)
PAUSE_S = 0.2
JOBS = "/v1/jobs/"


class Client:
    """`url`: of a master, or of one job of a cluster (`http://HOST:PORT/v1/jobs/NAME`). `async with` opens and closes it. Raises the
    TriremeError in the master's answer; PeerError if nothing answers at `url`; DeadlineExceeded if an answer takes more than
    `timeout_s`. Calls to a master that is taking over are repeated for that long."""

    def __init__(self, url: str, *, token: str = "", timeout_s: float = TIMEOUT_S) -> None:
        if url.startswith(MASTERLESS):
            msg = f"{without_user(url)} is a masterless job: no master can answer this"
            raise InvalidArgument(msg, hint="see docs/masterless.md for the commands that work")
        self.url = url.rstrip("/")
        self._root, named, job = self.url.partition(JOBS)
        self._of_job = f"{JOBS}{job}" if named else "/v1"  # else the only job that the master leads
        self._job = self._of_job if named else "/v1/job"
        self._timeout_s = timeout_s
        self._http = httpx.AsyncClient(
            base_url=self._root,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=httpx.Timeout(timeout_s, connect=2.0),
            verify=client_context() or True,
            trust_env=False,
        )

    def __repr__(self) -> str:
        return f"<Client {self.url}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def job(self) -> dict[str, Any]:
        return await self._call("GET", self._job)

    async def explanation(self) -> dict[str, Any]:
        """Why the job does not progress, and what to do: `code`, `summary`, `details`, `hints`, and the same for others in `also`."""
        return await self._call("GET", f"{self._job}/explanation")

    async def task_summary(self) -> dict[str, Any]:
        return await self._call("GET", f"{self._of_job}/task-summary")

    async def task(self, task_id: str) -> dict[str, Any]:
        return await self._call("GET", f"{self._of_job}/tasks/{task_id}")

    def tasks(self, state: str | None = None) -> AsyncIterator[dict[str, Any]]:
        """All tasks (of one state), page by page as they are consumed."""
        return self._list(f"{self._of_job}/tasks", "tasks", {"state": state} if state else {})

    def epoch_losses(self) -> AsyncIterator[dict[str, Any]]:
        """`number`, `loss`, `records` of each epoch."""
        return self._list(f"{self._of_job}/metrics", "points", {"metric": "epoch_loss"})

    def members(self) -> AsyncIterator[dict[str, Any]]:
        return self._list(f"{self._of_job}/members", "members", {})

    async def events(self, after: int = 0, wait_s: float = 0.0) -> dict[str, Any]:
        """One page of events with a number above `after`. Waits up to `wait_s` seconds for the first one."""
        return await self._call("GET", f"{self._of_job}/events", {"after": after, "wait_s": wait_s})

    def metric_series(self) -> AsyncIterator[dict[str, Any]]:
        """The metrics that are kept by step, in the order of their names."""
        return self._list(f"{self._of_job}/metric-series", "series", {})

    async def metric(self, name: str, first: int, last: int, most: int, by: str = "step") -> list[dict[str, Any]]:
        """A metric's points of the steps in [first, last]; steps share points if there are more than `most`."""
        query = {"from_step": first, "to_step": last, "points": most, "by": by}
        found = await self._call("GET", f"{self._of_job}/metric-series/{quote(name, safe='')}", query)
        return list(found["points"])

    async def create_checkpoint(self, key: str, *, cause: str = "", limit_s: float = 600.0) -> dict[str, Any]:
        """Starts an operation (see `operation`); a repeated `key` gives the same operation."""
        return await self._call(
            "POST", f"{self._of_job}/checkpoints", key=key, body={"cause": cause, "limit_s": limit_s}
        )

    def checkpoints(self) -> AsyncIterator[dict[str, Any]]:
        """The checkpoints that can be restored."""
        return self._list(f"{self._of_job}/checkpoints", "checkpoints", {})

    async def restore_checkpoint(self, checkpoint_id: str, key: str) -> dict[str, Any]:
        """Starts an operation."""
        return await self._call("POST", f"{self._of_job}/checkpoints/{checkpoint_id}/restore", key=key)

    async def create_resize(self, key: str, **asked: Any) -> dict[str, Any]:
        """Starts a resize; its `resize_id` is the id of its operation."""
        return await self._call("POST", f"{self._of_job}/resizes", key=key, body=asked)

    async def resize_prediction(self, **asked: Any) -> dict[str, Any]:
        """What a resize would move; nothing changes."""
        query = {name: value for name, value in asked.items() if value is not None}
        return await self._call("GET", f"{self._of_job}/resize-prediction", query)

    async def resize(self, resize_id: str, wait_s: float = 0.0) -> dict[str, Any]:
        """Waits up to `wait_s` seconds for its end."""
        return await self._call("GET", f"{self._of_job}/resizes/{resize_id}", {"wait_s": wait_s})

    async def operation(self, operation_id: str, wait_s: float = 0.0) -> dict[str, Any]:
        """`state` is RUNNING (`reason`: what it waits for), DONE or FAILED. Waits up to `wait_s` seconds for the end."""
        return await self._call("GET", f"{self._of_job}/operations/{operation_id}", {"wait_s": wait_s})

    async def _list(self, path: str, items: str, query: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        token = ""
        while True:
            page = await self._call(
                "GET", path, {**query, "page_size": 500, **({"page_token": token} if token else {})}
            )
            for item in page[items]:
                yield item
            token = page.get("next_page_token") or ""
            if not token:
                return

    async def _call(
        self,
        method: str,
        path: str,
        query: dict[str, Any] | None = None,
        *,
        key: str = "",
        body: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        deadline = clock.monotonic() + self._timeout_s
        while True:
            try:
                return await self._request(method, path, query, key, body)
            except NotReady:
                if clock.monotonic() > deadline:
                    raise
            await asyncio.sleep(ids.jitter(PAUSE_S))

    async def _request(
        self, method: str, path: str, query: dict[str, Any] | None, key: str, body: dict[str, Any] | None
    ) -> dict[str, Any]:
        headers = {"Idempotency-Key": key} if key else {}
        try:
            response = await self._http.request(method, path, params=query or {}, headers=headers, json=body)
        except httpx.TimeoutException as error:
            msg = f"{method} {self._root}{path} gave no answer in time ({type(error).__name__})"
            raise DeadlineExceeded(msg) from error
        except httpx.TransportError as error:
            msg = f"{self._root} cannot be reached: {error}"
            raise PeerError(msg, hint="is the job running? `trireme run` prints the master's address") from error
        if response.is_error:
            raise error_of(response)
        document: dict[str, Any] = response.json()
        return document


def error_of(response: httpx.Response) -> TriremeError:
    """The error that an answer is. `details` also has the answer's `request_id` (of the master's log), `errors` (each value that is
    wrong), a `code` that this version does not know, and `retry_after_s`."""
    try:
        problem = response.json()
    except ValueError:
        problem = None
    if isinstance(problem, dict) and "code" in problem:
        error = from_map({"message": problem.get("detail", ""), **problem})
        error.details.update({name: problem[name] for name in ("request_id", "errors") if problem.get(name)})
        if error.code != problem["code"]:
            error.details["code"] = problem["code"]
    elif response.status_code == Unauthorized.status:
        error = Unauthorized(f"{response.url} refused the token; give the job's token in TRIREME_TOKEN")
    else:
        error = PeerError(f"{response.url} answered {response.status_code} {response.reason_phrase}")
    if (after := response.headers.get("Retry-After", "")).isdecimal():
        error.details["retry_after_s"] = int(after)
    return error
