"""Who may use which route: checked in front of all routes, before a body is read. A route that is not named here needs an admin.

GET, HEAD, OPTIONS ─► viewer      what trainers report and ask for ─► member      everything else, also what does not exist ─► admin
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from master_service.api.problems import problem_of, problem_response, request_id_of
from trireme_shared.platform.security.access import CHALLENGE, READING, Access, Asked
from trireme_shared.platform.security.tokens import Role
from trireme_shared.protocol.errors import TriremeError, Unauthorized

HEALTH = frozenset({"/healthz", "/readyz"})
PAGES = frozenset({"/", "/about", "/docs", "/openapi.json"})  # the same for everybody, nothing of a job
FILES_OF_PAGES = ("/docs/", "/dashboard/")
OF_MEMBERS = frozenset({"task-leases", "metric-batches"})  # resources below a job that members write
OF_ONE_MEMBER = frozenset({"suspect", "failures"})  # members/{member_id}/...


def role_needed(method: str, path: str) -> Role | None:
    """Of a path, or of a path template. None: no token is needed."""
    if method in READING:
        is_open = path in HEALTH or path in PAGES or path.startswith(FILES_OF_PAGES)
        return None if is_open else Role.VIEWER
    return Role.MEMBER if method == "POST" and _is_of_members(path) else Role.ADMIN


def _is_of_members(path: str) -> bool:
    _, version, *parts = path.split("/") if path.startswith("/") else ("", "")
    if parts[:1] == ["jobs"]:
        parts = parts[2:]
    if version != "v1" or not parts:
        return False
    return parts[0] in OF_MEMBERS or (len(parts) == 3 and parts[0] == "members" and parts[2] in OF_ONE_MEMBER)


class Guarded:
    """ASGI, around `app`. Health answers every request."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (scope["path"] in HEALTH and scope["method"] in READING):
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        try:
            role = self._check(scope, headers)
        except TriremeError as error:
            request_id = request_id_of(headers)
            more = {"X-Request-Id": request_id}
            if isinstance(error, Unauthorized):
                more["WWW-Authenticate"] = CHALLENGE
            await problem_response(problem_of(error, request_id), more)(scope, receive, send)
            return
        scope.setdefault("state", {})["role"] = role
        await self._app(scope, receive, send)

    def _check(self, scope: Scope, headers: dict[bytes, bytes]) -> Role | None:
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
        )
        return self._access.admit(asked, role_needed(scope["method"], scope["path"]))
