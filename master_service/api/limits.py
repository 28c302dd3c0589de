"""Limits of requests: the body's size, end and depth, and text that can be encoded again. Also the id of each request, and bugs
as problems."""

from __future__ import annotations

import re
from collections.abc import Callable

from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from master_service.api import problems
from trireme_shared.platform.runtime import telemetry
from trireme_shared.protocol.errors import TooLarge

MAX_BODY_BYTES = 1 << 20
DEPTH = 100
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

log = telemetry.logger("rest")


class Bounded:
    """Around all routes: an id for every request (or the caller's own), bodies up to MAX_BODY_BYTES, text that can be
    encoded again, bugs as problems."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        request_id = scope["request_id"] = problems.request_id_of(headers)
        started = False

        async def named_send(message: Message) -> None:
            nonlocal started
            started = True
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            announced = headers.get(b"content-length", b"0")
            if announced.isdigit() and int(announced) > MAX_BODY_BYTES:
                raise _too_large(int(announced))
            body = await read_body(receive)
        except TooLarge as error:
            problem = problems.problem_of(error, request_id)
            response = problems.problem_response(problem, {"Connection": "close"})  # the rest of the body is not read
            await response(scope, receive, named_send)
            return
        if body is None:
            return
        try:
            await self._app(scope, replayed(body, receive, _check_text), named_send)
        except Exception:  # a bug: the master goes on, the caller gets a problem
            log.exception("request_failed", request_id=request_id, path=scope["path"])
            if started:
                raise
            response = problems.problem_response(problems.problem_of_bug(request_id))
            await response(scope, receive, named_send)


async def read_body(receive: Receive) -> bytes | None:
    """The whole body; None if the connection was closed before its end: then nobody waits for an answer. Raises TooLarge."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            raise _too_large(len(body))
        if not message.get("more_body"):
            return bytes(body)


def replayed(body: bytes, receive: Receive, check: Callable[[bytes], None] | None = None) -> Receive:
    """Gives a body that was read already, after `check(body)`; then what comes next."""
    read = False

    async def replay() -> Message:
        nonlocal read
        if read:
            return await receive()
        read = True
        if check is not None:
            check(body)
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def _check_text(body: bytes) -> None:
    """Raises HTTPException for JSON that is nested too deep; and for a lone surrogate: Python's JSON takes it, but it cannot be
    encoded again, for etcd say."""
    if max(body.count(b"["), body.count(b"{")) >= DEPTH:
        try:
            from_json(body)
        except ValueError as error:
            if "recursion limit" in str(error):
                msg = f"the body's JSON is nested too deep: {error}; send at most {DEPTH} levels"
                raise HTTPException(422, msg) from error
    if SURROGATE.search(body):
        try:
            from_json(body)
        except ValueError as error:
            msg = f"the body is no JSON, or half a surrogate pair (\\ud800 to \\udfff) stands in its text: {error}; send valid Unicode"
            raise HTTPException(422, msg) from error


def _too_large(size: int) -> TooLarge:
    return TooLarge(f"the body has {size} bytes or more, at most {MAX_BODY_BYTES} are taken; send it in parts")
