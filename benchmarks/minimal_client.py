"""A trainer's side of the task routes at the least cost: one keep-alive connection, real HTTP, the real token
and records.

A load generator: no redirects to another leader, no time limits of its own, one request at a time.
"""

from __future__ import annotations

import asyncio
from typing import Self
from urllib.parse import urlsplit

from pydantic_core import from_json

from trireme_shared.protocol.errors import PeerError, from_map
from trireme_shared.protocol.records import AcquireTask, Completed, CompleteTask, TaskAnswer


class MinimalMaster(asyncio.Protocol):
    """Of trainer_agent.tasks.master.MasterPort what the benchmark asks for. `connect` it, `close` it."""

    def __init__(self, url: str, token: str) -> None:
        parts = urlsplit(url)
        self._address = parts.hostname, parts.port
        authorization = f"Authorization: Bearer {token}\r\n" if token else ""
        self._fixed = f"Host: {parts.netloc}\r\n{authorization}Content-Type: application/json\r\n".encode()
        self._transport: asyncio.Transport
        self._answer: asyncio.Future[tuple[int, bytes]]
        self._seen = b""

    async def connect(self) -> Self:
        await asyncio.get_running_loop().create_connection(lambda: self, *self._address)
        return self

    def close(self) -> None:
        self._transport.close()

    async def acquire_task(self, ask: AcquireTask) -> TaskAnswer:
        key = b"Idempotency-Key: %s\r\n" % ask.request.encode()
        return TaskAnswer.model_validate_json(await self._post(b"/v1/task-leases", ask.to_bytes(), key))

    async def complete_task(self, task_id: str, done: CompleteTask) -> Completed:
        path = b"/v1/task-leases/%s/complete" % task_id.encode()
        return Completed.model_validate_json(await self._post(path, done.to_bytes()))

    async def _post(self, path: bytes, body: bytes, headers: bytes = b"") -> bytes:
        """The body of a 200. Raises the error that another answer carries, PeerError."""
        self._answer = asyncio.get_running_loop().create_future()
        length = b"Content-Length: %d\r\n\r\n" % len(body)
        self._transport.write(
            b"".join((b"POST ", path, b" HTTP/1.1\r\n", self._fixed, headers, length, body))
        )
        status, answer = await self._answer
        if status != 200:
            problem = from_json(answer)
            raise from_map({"message": problem.get("detail", ""), **problem})
        return answer

    # ------------------------------------------------------------ asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._seen += data
        head, end, body = self._seen.partition(b"\r\n\r\n")
        if not end:
            return
        lines = head.lower().split(b"\r\n")
        length = next(int(line.partition(b":")[2]) for line in lines if line.startswith(b"content-length:"))
        if len(body) >= length:
            self._seen = b""
            self._answer.set_result((int(lines[0].split(b" ")[1]), body))

    def connection_lost(self, error: Exception | None) -> None:
        if not self._answer.done():
            self._answer.set_exception(PeerError(f"the master closed the connection: {error}"))
