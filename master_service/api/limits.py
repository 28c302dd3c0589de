"""Limits of requests: the size of the body, and text that can be encoded again. Also the id of each request, and bugs as problems."""

from __future__ import annotations

import re

from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from master_service.api import problems
from shared.errors import TooLarge
from shared.runtime import telemetry

MAX_BODY_BYTES = 1 << 20
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
        seen, started = bytearray(), False

        async def bounded_receive() -> Message:
            message = await receive()
            seen.extend(message.get("body", b""))
            if len(seen) > MAX_BODY_BYTES:  # sent without a length: the connection is closed
                return {"type": "http.disconnect"}
            if message["type"] == "http.request" and not message.get("more_body"):
                _check_text(seen)
            return message

        async def named_send(message: Message) -> None:
            nonlocal started
            started = True
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        announced = headers.get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > MAX_BODY_BYTES:
            response = problems.problem_response(problems.problem_of(_too_large(int(announced)), request_id))
            await response(scope, receive, named_send)
            return
        try:
            await self._app(scope, bounded_receive, named_send)
        except Exception:  # a bug: the master goes on, the caller gets a problem
            log.exception("request_failed", request_id=request_id, path=scope["path"])
            if started:
                raise
            response = problems.problem_response(problems.problem_of_bug(request_id))
            await response(scope, receive, named_send)


def _check_text(body: bytearray) -> None:
    """Raises HTTPException for a lone surrogate: Python's JSON takes it, but it cannot be encoded again, for etcd say."""
    if SURROGATE.search(body):
        try:
            from_json(body)
        except ValueError as error:
            msg = f"the body is no JSON, or half a surrogate pair (\\ud800 to \\udfff) stands in its text: {error}; send valid Unicode"
            raise HTTPException(422, msg) from error


def _too_large(size: int) -> TooLarge:
    return TooLarge(f"the body has {size} bytes or more, at most {MAX_BODY_BYTES} are taken; send it in parts")
