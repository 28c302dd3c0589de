"""What every path has in common: HEAD, OPTIONS, and that what would be ignored in silence is refused.

HEAD    ─► as GET, without the body
OPTIONS ─► 204 with Allow; no CORS headers: pages of other sites get nothing
?page_sise=5 ─► 422
POST with If-Match to an operation that compares no versions ─► 422
"""

from __future__ import annotations

from urllib.parse import parse_qsl

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from master_service.api.openapi.paths import DocumentedPaths
from master_service.api.problems import invalid, problem_response
from trireme_shared.protocol.rest import ProblemPart


class EveryMethod:
    """ASGI, around `app`."""

    def __init__(self, app: ASGIApp, paths: DocumentedPaths) -> None:
        self._app, self._paths = app, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method, path = scope["method"], scope["path"]
        versioned = any(name == b"if-match" for name, _ in scope["headers"])
        if method == "OPTIONS" or scope["query_string"] or versioned:
            await self._paths.ready()
        if method == "OPTIONS" and (allowed := self._paths.allowed(path)):
            await Response(status_code=204, headers={"Allow": ", ".join(allowed)})(scope, receive, send)
            return
        if method == "HEAD":
            method, send = "GET", _head_of(send)
            scope = {**scope, "method": method}
        wrong = self._wrong(method, path, scope["query_string"]) if scope["query_string"] else ()
        if versioned:
            wrong += self._not_compared(method, path)
        if wrong:
            response = problem_response(invalid(wrong, scope.get("request_id", "")))
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _wrong(self, method: str, path: str, query: bytes) -> tuple[ProblemPart, ...]:
        """What is wrong with the names of the parameters; their values are the routes' concern."""
        known = self._paths.methods(path).get(method)
        if known is None:  # it may have any, or there is no such operation: 404 or 405
            return ()
        given = [name for name, _ in parse_qsl(query.decode("latin-1"), keep_blank_values=True)]
        wrong: dict[str, str] = {}
        for name in given:
            if name not in known:
                wrong[name] = f"is not known; {', '.join(sorted(known)) or 'nothing'} can be given"
            elif given.count(name) > 1:
                wrong[name] = "is given more than once"
        return tuple(ProblemPart(location=f"query.{name[:200]}", message=text) for name, text in wrong.items())

    def _not_compared(self, method: str, path: str) -> tuple[ProblemPart, ...]:
        """A caller who names a version relies on it."""
        if method == "GET" or method not in self._paths.methods(path) or self._paths.takes_if_match(method, path):
            return ()
        return (ProblemPart(location="header.If-Match", message="is not taken here: no version would be compared"),)


def _head_of(send: Send) -> Send:
    """Sends the head of an answer, and ends it there."""
    ended = False

    async def send_head(message: Message) -> None:
        nonlocal ended
        if message["type"] == "http.response.start":
            await send(message)
        elif message["type"] == "http.response.body" and not ended:
            ended = True
            await send({"type": "http.response.body", "body": b""})

    return send_head
