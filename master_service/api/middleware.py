"""What stands before all routes, in the order in which a request meets it.

Guarded              who may use which route, before a body is read; what is refused or changed, in the log
ForwardedToLeader    pages at a standby: the leader answers
Bounded              the id of each request, the body's size, end and depth, bugs as problems
EveryMethod          HEAD, OPTIONS, and names that would be ignored in silence
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections import defaultdict
from collections.abc import Callable
from http import HTTPStatus
from urllib.parse import parse_qsl

import aiohttp
from pydantic import ValidationError
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from yarl import URL

from master_service.api.openapi.documentation import DocumentedPaths
from master_service.api.problems import invalid, problem_of, problem_of_bug, problem_response, request_id_of
from master_service.api.server_sent import until_gone
from master_service.cluster.leader import JobsLed
from trireme_shared.platform.runtime import http, telemetry
from trireme_shared.platform.runtime.telemetry import Tally
from trireme_shared.platform.security.access import CALLER, CHALLENGE, READING, Access, Asked, Caller
from trireme_shared.platform.security.tokens import Role
from trireme_shared.protocol.errors import NotLeader, NotReady, TooLarge, TriremeError, Unauthorized
from trireme_shared.protocol.rest import Problem, ProblemPart
from trireme_shared.protocol.urls import without_passwords

HEALTH = frozenset({"/healthz", "/readyz"})
PAGES = frozenset({"/", "/about", "/docs", "/openapi.json"})  # the same for everybody, nothing of a job
FILES_OF_PAGES = ("/docs/", "/dashboard/")
LOGIN_CODES, LOGINS = "/v1/login-codes", "/v1/logins"
OF_MEMBERS = frozenset({"task-leases", "metric-batches"})  # resources below a job that members write
OF_ONE_MEMBER = frozenset({"suspect", "failures"})  # members/{member_id}/...
FAILED = HTTPStatus.BAD_REQUEST  # the first status of those that tell of a failure
PASSING = frozenset({NotLeader.code, NotReady.code})  # every member asks again and again until it is over
PASSING_S = 10.0  # of these the log has one line within so many seconds, with their number
PATH_CHARACTERS = 300

log = telemetry.logger("rest")


def role_needed(method: str, path: str) -> Role | None:
    """The role that a path, or a path template, needs. A route that is not named here needs an admin. None:
    no token is needed.

    GET, HEAD, OPTIONS; a login code, which gives what the token gives ─► viewer
    a login by such a code ─► none
    what trainers report and ask for ─► member
    everything else, also what does not exist ─► admin
    """
    if method in READING:
        is_open = path in HEALTH or path in PAGES or path.startswith(FILES_OF_PAGES)
        return None if is_open else Role.VIEWER
    if method != "POST":
        return Role.ADMIN
    if path == LOGINS:
        return None
    if path == LOGIN_CODES:
        return Role.VIEWER
    return Role.MEMBER if _is_of_members(path) else Role.ADMIN


def _is_of_members(path: str) -> bool:
    _, version, *parts = path.split("/") if path.startswith("/") else ("", "")
    if parts[:1] == ["jobs"]:
        parts = parts[2:]
    if version != "v1" or not parts:
        return False
    return parts[0] in OF_MEMBERS or (len(parts) == 3 and parts[0] == "members" and parts[2] in OF_ONE_MEMBER)


class Guarded:
    """ASGI, around `app`. Health answers every request.

    refused by `access` ─► the log has it, with others of its kind
    answered with 4xx, 5xx ─► a line in the log, with the request's id
    something was changed by an admin ─► a line in the log, with the name of the token
    """

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access
        self._passing: defaultdict[str, Tally] = defaultdict(Tally)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (scope["path"] in HEALTH and scope["method"] in READING):
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        request_id = scope["request_id"] = request_id_of(headers)
        needed = role_needed(scope["method"], scope["path"])
        try:
            caller = self._check(scope, headers, needed)
        except TriremeError as error:
            more = {"X-Request-Id": request_id}
            if isinstance(error, Unauthorized):
                more["WWW-Authenticate"] = CHALLENGE
            await problem_response(problem_of(error, request_id), more)(scope, receive, send)
            return
        if needed is None:  # nobody vouches for its body, and no such route has one
            receive = replayed(b"", receive)
        scope.setdefault("state", {})["caller"] = caller
        status = 200

        async def seen_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if status < FAILED and needed is Role.ADMIN:
                    log.info("request_done", status=status, **_about(scope, caller))
            elif status >= FAILED:
                self._note_failure(message.get("body", b""), status, _about(scope, caller), needed)
                status = 200  # once
            await send(message)

        token = CALLER.set(caller)
        try:
            await self._app(scope, receive, seen_send)
        finally:
            CALLER.reset(token)

    def _note_failure(self, body: bytes, status: int, about: dict[str, str], needed: Role | None) -> None:
        try:
            problem = Problem.model_validate_json(body)
        except ValidationError:  # of a HEAD, say
            log.info("request_failed", status=status, **about)
            return
        tell = log.warning if status >= HTTPStatus.INTERNAL_SERVER_ERROR else log.info
        count = 1
        if problem.code in PASSING or needed is None:  # without a token anybody can cause any number
            tally = self._passing[problem.code]
            tally.add()
            count = tally.due(PASSING_S)
        if count:
            failure = {"status": status, "code": problem.code, "cause": problem.detail}
            tell("request_failed", **failure, count=count, **about)

    def _check(self, scope: Scope, headers: dict[bytes, bytes], needed: Role | None) -> Caller | None:
        def text(name: bytes) -> str:
            return headers.get(name, b"").decode("utf-8", "surrogateescape")

        asked = Asked(
            scope["method"],
            host=text(b"host"),
            origin=text(b"origin"),
            fetch_site=text(b"sec-fetch-site"),
            content_type=text(b"content-type"),
            authorization=text(b"authorization"),
            address=str((scope.get("server") or ("",))[0]),
            peer=str((scope.get("client") or ("",))[0]),
            request_id=scope["request_id"],
        )
        return self._access.admit(asked, needed)


def _about(scope: Scope, caller: Caller | None) -> dict[str, str]:
    """What a line in the log says of a request."""
    return {
        "method": scope["method"],
        "path": scope["path"][:PATH_CHARACTERS],
        "request_id": scope["request_id"],
        "token": caller.token if caller is not None else "",
        "peer": str((scope.get("client") or ("",))[0]),
    }


FORWARD_HEADER, FORWARD_WANTED = b"trireme-forward", b"leader"
MOST_FORWARDED = 256  # at once
SILENT_S = 60.0  # streams send something every 10 s, and other requests wait at most 30 s
CHUNK_BYTES = 1 << 16
ANSWERED_HERE = ("/v1/version", "/v1/access", LOGIN_CODES, LOGINS)  # every master answers these alike
PASSED_ON = frozenset(
    {"authorization", "accept", "content-type", "idempotency-key", "if-match", "if-none-match",
     "last-event-id", "x-request-id"}
)  # fmt: skip
OF_CONNECTIONS = frozenset({"connection", "keep-alive", "transfer-encoding", "date"})

forwarding_log = telemetry.logger("forwarding")


class ForwardedToLeader:
    """Requests that a standby answers through the leader, if they ask for it: `Trireme-Forward: leader`.
    ASGI, around `app`, within the checks of who asks.

    request ─► standby ── token, Host and Origin are checked here ──► leader ── its own checks
        ──► answer, piece by piece

    For pages: a browser shows a page of the master that it was opened at, and may not ask another one.
    Programs follow `details.leader` of NOT_LEADER by themselves. A request is passed on once: the leader of a
    moment ago answers NOT_LEADER, and it comes again. `tls`: for leaders at https.
    """

    def __init__(self, app: ASGIApp, jobs: JobsLed, tls: ssl.SSLContext | None = None) -> None:
        self._app, self._jobs, self._tls = app, jobs, tls
        self._open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        leader = self._leader_for(scope)
        if not leader or self._open >= MOST_FORWARDED:
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
        if scope["type"] != "http" or not scope["path"].startswith("/v1/") or scope["path"] in ANSWERED_HERE:
            return ""
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"0")
        if (
            headers.get(FORWARD_HEADER) != FORWARD_WANTED
            or not length.isdigit()
            or int(length) > MAX_BODY_BYTES
        ):
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
        headers["x-request-id"] = scope["request_id"]  # both logs have the same one
        path = scope.get("raw_path", b"").decode("latin-1") or scope["path"]
        query = scope["query_string"].decode("latin-1")
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=2.0, sock_read=SILENT_S)
        begun = False
        leaving = asyncio.ensure_future(until_gone(receive))
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
            forwarding_log.info(
                "leader_does_not_answer", leader=leader, cause=f"{type(error).__name__}: {error}"
            )
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


MAX_BODY_BYTES = 1 << 20


DEPTH = 100


SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class Bounded:
    """Around all routes: an id for every request (or the caller's own), bodies up to MAX_BODY_BYTES, text
    that can be encoded again, bugs as problems, no passwords of URLs in answers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        request_id = scope.setdefault("request_id", request_id_of(headers))
        if shows_users_texts(scope["path"]):
            send = WithoutPasswords(send)
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
            problem = problem_of(error, request_id)
            response = problem_response(problem, {"Connection": "close"})  # the rest of the body is not read
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
            response = problem_response(problem_of_bug(request_id))
            await response(scope, receive, named_send)


def shows_users_texts(path: str) -> bool:
    """Not of a script, which is shown as it is: who runs it needs it whole. Members get the URLs that they
    open."""
    return path.startswith("/v1/") and not _is_of_members(path) and not path.endswith("/source")


class WithoutPasswords:
    """Sends an answer without the passwords of the URLs in it: of a spec, a reason, an event, a log, whoever
    made the text. A stream sends whole messages."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._head: Message | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._head = message  # sent with the first part of the body: that may get shorter
            return
        body, head = message.get("body", b""), self._head
        if b"://" in body:
            message = {
                **message,
                "body": without_passwords(body.decode("utf-8", "surrogateescape")).encode(
                    "utf-8", "surrogateescape"
                ),
            }
        if head is not None:
            self._head = None
            if len(message.get("body", b"")) != len(body):
                head = {
                    **head,
                    "headers": [
                        (name, b"%d" % len(message["body"]) if name == b"content-length" else value)
                        for name, value in head["headers"]
                    ],
                }
            await self._send(head)
        await self._send(message)


async def read_body(receive: Receive) -> bytes | None:
    """The whole body; None if the connection was closed before its end: then nobody waits for an answer.
    Raises TooLarge."""
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
    """Raises HTTPException for JSON that is nested too deep; and for a lone surrogate: Python's JSON takes
    it, but it cannot be encoded again, for etcd say."""
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
            msg = (
                "the body is no JSON, or half a surrogate pair (\\ud800 to \\udfff) stands in its "
                f"text: {error}; send valid Unicode"
            )
            raise HTTPException(422, msg) from error


def _too_large(size: int) -> TooLarge:
    return TooLarge(
        f"the body has {size} bytes or more, at most {MAX_BODY_BYTES} are taken; send it in parts"
    )


class EveryMethod:
    """What every path has in common: HEAD, OPTIONS, and that what would be ignored in silence is refused.
    ASGI, around `app`.

    HEAD    ─► as GET, without the body
    OPTIONS ─► 204 with Allow; no CORS headers: pages of other sites get nothing
    ?page_sise=5 ─► 422
    POST with If-Match to an operation that compares no versions ─► 422
    """

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
        return tuple(
            ProblemPart(location=f"query.{name[:200]}", message=text) for name, text in wrong.items()
        )

    def _not_compared(self, method: str, path: str) -> tuple[ProblemPart, ...]:
        """A caller who names a version relies on it."""
        if (
            method == "GET"
            or method not in self._paths.methods(path)
            or self._paths.takes_if_match(method, path)
        ):
            return ()
        return (
            ProblemPart(
                location="header.If-Match", message="is not taken here: no version would be compared"
            ),
        )


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
