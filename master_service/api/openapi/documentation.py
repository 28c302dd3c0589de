"""What this service is, for people and for generators: the dashboard, a page, the API's document, and Swagger
UI to read it. The same for everybody, without a token and without a network: all files are in this package.
DocumentedPaths tells from the document what each path takes."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.routing import compile_path

from master_service import dashboard

FOLDER = Path(__file__).parent
FILES = {
    **dashboard.FILES,
    "/about": (FOLDER / "about.html", "text/html; charset=utf-8"),
    "/docs": (FOLDER / "swagger_ui" / "index.html", "text/html; charset=utf-8"),
    "/docs/start.js": (FOLDER / "swagger_ui" / "start.js", "text/javascript; charset=utf-8"),
    "/docs/swagger-ui-bundle.js": (
        FOLDER / "swagger_ui" / "swagger-ui-bundle.js",
        "text/javascript; charset=utf-8",
    ),
    "/docs/swagger-ui.css": (FOLDER / "swagger_ui" / "swagger-ui.css", "text/css; charset=utf-8"),
}
DOCUMENT = "/openapi.json"
PATHS = (*FILES, DOCUMENT)
# Swagger UI has styles in its elements. Nothing comes from elsewhere, no page may frame these, forms go
# nowhere.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' "
    "data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # kept, and asked for again with its ETag
}

router = APIRouter(include_in_schema=False)


@dataclass(frozen=True, slots=True)
class Served:
    """A file, and the same compressed. `tag`: of the file as it is; the compressed one has a tag of its own,
    as RFC 9110 asks for."""

    plain: bytes
    packed: bytes
    tag: str

    @classmethod
    def of(cls, content: bytes) -> Served:
        """Takes up to 0.1 s of a processor: not for the event loop."""
        return cls(content, gzip.compress(content, mtime=0), hashlib.sha256(content).hexdigest()[:32])

    def answer(self, request: Request, content_type: str, policy: str) -> Response:
        packed = _takes_gzip(request.headers.get("Accept-Encoding", ""))
        tag = f'"{self.tag}-gzip"' if packed else f'"{self.tag}"'
        headers = {**HEADERS, "Content-Security-Policy": policy, "ETag": tag, "Vary": "Accept-Encoding"}
        if tag in request.headers.get("If-None-Match", ""):
            return Response(status_code=304, headers=headers)
        if packed:
            headers["Content-Encoding"] = "gzip"
        return Response(self.packed if packed else self.plain, headers=headers, media_type=content_type)


def _takes_gzip(accepted: str) -> bool:
    """Of an Accept-Encoding such as `br, gzip;q=0.5`; `gzip;q=0` refuses it."""
    offers = (each.partition(";q=") for each in accepted.lower().replace(" ", "").split(","))
    return any(name == "gzip" and (not weight or weight.strip("0.") != "") for name, _, weight in offers)


async def _file(request: Request) -> Response:
    where = request.url.path
    path, content_type = FILES[where]
    policy = dashboard.POLICY if where in dashboard.FILES else POLICY
    return (await offload(_read, path)).answer(request, content_type, policy)


async def _document(request: Request) -> Response:
    state = request.app.state
    if not hasattr(state, "document"):
        state.document = await offload(_minified, request.app.openapi)
    served: Served = state.document
    return served.answer(request, "application/json", POLICY)


for place in FILES:
    router.add_api_route(place, _file, methods=["GET"])
router.add_api_route(DOCUMENT, _document, methods=["GET"])


def text_of(document: Mapping[str, Any]) -> str:
    """As it lies in the repository, a value a line: for diffs."""
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def _minified(make: Callable[[], dict[str, Any]]) -> Served:
    return Served.of(json.dumps(make(), separators=(",", ":"), ensure_ascii=False).encode())


@cache
def _read(path: Path) -> Served:
    return Served.of(path.read_bytes())


Methods = dict[str, frozenset[str] | None]  # method -> names of its query parameters; None: it may have any
IF_MATCH = "If-Match"
offload = asyncio.to_thread


class DocumentedPaths:
    """Which methods each path has and which query parameters they take. Starlette's own 405 names only the
    methods of the first route that matches. A path of the only job is documented with the job's name in it.

    `document` is asked for by `ready`, in a thread: it takes a second of a processor, in which the event loop
    would renew no lease. `beside`: paths that can be read, which the document leaves out, with the names of
    their query parameters (None: any).
    """

    def __init__(
        self, document: Callable[[], dict[str, Any]], beside: Mapping[str, frozenset[str] | None]
    ) -> None:
        self._document = document
        self._beside = dict(beside)
        self._patterns: list[tuple[re.Pattern[str], Methods, frozenset[str]]] | None = None

    async def ready(self) -> None:
        """Before any of the questions."""
        if self._patterns is None:
            self._patterns = await offload(self._read)

    def methods(self, path: str) -> Methods:
        """Without HEAD and OPTIONS. Empty: there is no such path."""
        found: Methods = {}
        for methods, _ in self._matching(path):
            found = {**methods, **found}
        return found

    def takes_if_match(self, method: str, path: str) -> bool:
        return any(method in conditional for _, conditional in self._matching(path))

    def allowed(self, path: str) -> list[str]:
        """All methods, for the header Allow. Empty: as for `methods`."""
        found = set(self.methods(path))
        if "GET" in found:
            found.add("HEAD")
        return sorted(found | {"OPTIONS"}) if found else []

    def _matching(self, path: str) -> Iterator[tuple[Methods, frozenset[str]]]:
        """The methods of each known path that it is, and those of them that take If-Match."""
        assert self._patterns is not None, "not ready"
        named = "/v1/jobs/_" + path.removeprefix("/v1").removeprefix("/job")
        for pattern, methods, conditional in self._patterns:
            if pattern.match(path) or pattern.match(named):
                yield methods, conditional

    def _read(self) -> list[tuple[re.Pattern[str], Methods, frozenset[str]]]:
        known: list[tuple[str, Methods, frozenset[str]]] = [
            (template, {"GET": names}, frozenset()) for template, names in self._beside.items()
        ]
        for template, operations in self._document()["paths"].items():
            taken: Methods = {method.upper(): _names(each, "query") for method, each in operations.items()}
            conditional = (m.upper() for m, each in operations.items() if IF_MATCH in _names(each, "header"))
            known.append((template, taken, frozenset(conditional)))
        return [(compile_path(template)[0], taken, conditional) for template, taken, conditional in known]


def _names(operation: dict[str, Any], place: str) -> frozenset[str]:
    return frozenset(each["name"] for each in operation.get("parameters", []) if each["in"] == place)
