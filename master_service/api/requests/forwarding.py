"""Requests that a standby answers through the leader, if they ask for it: `Trireme-Forward: leader`.

request ─► standby ── token, Host and Origin are checked here ──► leader ── its own checks ──► answer, piece by piece

For pages: a browser shows a page of the master that it was opened at, and may not ask another one. Programs follow `details.leader` of
NOT_LEADER by themselves. A request is passed on once: the leader of a moment ago answers NOT_LEADER, and it comes again.
"""

from __future__ import annotations

import asyncio
import ssl

import aiohttp
from starlette.types import ASGIApp, Receive, Scope, Send
from yarl import URL

from master_service.api.limits import MAX_BODY_BYTES, read_body, replayed
from master_service.cluster.leader import JobsLed
from trireme_shared.platform.runtime import http, telemetry
from trireme_shared.protocol.errors import NotLeader, NotReady, TooLarge

HEADER, WANTED = b"trireme-forward", b"leader"
MOST = 256  # at once
SILENT_S = 60.0  # streams send something every 10 s, and other requests wait at most 30 s
CHUNK_BYTES = 1 << 16
HERE = ("/v1/version", "/v1/access")  # every master answers these alike
PASSED_ON = frozenset(
    {"authorization", "accept", "content-type", "idempotency-key", "if-match", "if-none-match", "last-event-id", "x-request-id"}
)  # fmt: skip
OF_CONNECTIONS = frozenset({"connection", "keep-alive", "transfer-encoding", "date"})

log = telemetry.logger("forwarding")


class ForwardedToLeader:
    """ASGI, around `app`, within the checks of who asks. `tls`: for leaders at https."""

    def __init__(self, app: ASGIApp, jobs: JobsLed, tls: ssl.SSLContext | None = None) -> None:
        self._app, self._jobs, self._tls = app, jobs, tls
        self._open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        leader = self._leader_for(scope)
        if not leader or self._open >= MOST:
            await self._app(scope, receive, send)
            return
        try:
            body = await read_body(receive)
        except TooLarge:
            await self._app(scope, receive, send)  # its head says how long it is, or it is cut there as well
            return
        if body is None:
            return
        self._open += 1
        try:
            passed_on = await self._pass_on(leader, scope, body, receive, send)
        finally:
            self._open -= 1
        if not passed_on:
            await self._app(scope, replayed(body, receive), send)

    def _leader_for(self, scope: Scope) -> str:
        """The leader's URL; "": the request is answered here."""
        if scope["type"] != "http" or not scope["path"].startswith("/v1/") or scope["path"] in HERE:
            return ""
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"0")
        if headers.get(HEADER) != WANTED or not length.isdigit() or int(length) > MAX_BODY_BYTES:
            return ""
        try:
            self._jobs.check_leading()
        except NotLeader as error:
            return str(error.details.get("leader", ""))
        except NotReady:
            return ""
        return ""

    async def _pass_on(self, leader: str, scope: Scope, body: bytes, receive: Receive, send: Send) -> bool:
        """Whether the leader answered."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        path = scope.get("raw_path", b"").decode("latin-1") or scope["path"]
        query = scope["query_string"].decode("latin-1")
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=2.0, sock_read=SILENT_S)
        begun = False
        leaving = asyncio.ensure_future(_gone(receive))
        try:
            async with (
                http.session(tls=self._tls) as session,
                session.request(
                    scope["method"],
                    URL(f"{leader}{path}" + (f"?{query}" if query else ""), encoded=True),
                    data=body or None,
                    headers={name: value for name, value in headers.items() if name in PASSED_ON},
                    timeout=timeout,
                    allow_redirects=False,
                ) as answer,
            ):
                answered = [
                    (name.lower().encode("latin-1"), value.encode("latin-1"))
                    for name, value in answer.headers.items()
                    if name.lower() not in OF_CONNECTIONS
                ]
                await send({"type": "http.response.start", "status": answer.status, "headers": answered})
                begun = True
                while piece := await _next_piece(answer, leaving):
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            log.info("leader_does_not_answer", leader=leader, cause=f"{type(error).__name__}: {error}")
            if begun:
                raise  # the connection is cut, so that half an answer is not taken for a whole one
            return False
        finally:
            leaving.cancel()
        return True


async def _next_piece(answer: aiohttp.ClientResponse, leaving: asyncio.Future[None]) -> bytes:
    """Empty at the end of the answer, or once nobody waits for it."""
    reading = asyncio.ensure_future(answer.content.readany())
    try:
        await asyncio.wait((reading, leaving), return_when=asyncio.FIRST_COMPLETED)
        return await reading if not leaving.done() or reading.done() else b""
    finally:
        reading.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
