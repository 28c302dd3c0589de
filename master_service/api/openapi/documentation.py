"""What this service is, for people and for generators: the dashboard, a page, the API's document, and Swagger UI to read it. The same for everybody,
without a token and without a network: all files are in this package."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response

from master_service import dashboard
from master_service.api.openapi import paths

FOLDER = Path(__file__).parent
FILES = {
    **dashboard.FILES,
    "/about": (FOLDER / "about.html", "text/html; charset=utf-8"),
    "/docs": (FOLDER / "swagger_ui" / "index.html", "text/html; charset=utf-8"),
    "/docs/start.js": (FOLDER / "swagger_ui" / "start.js", "text/javascript; charset=utf-8"),
    "/docs/swagger-ui-bundle.js": (FOLDER / "swagger_ui" / "swagger-ui-bundle.js", "text/javascript; charset=utf-8"),
    "/docs/swagger-ui.css": (FOLDER / "swagger_ui" / "swagger-ui.css", "text/css; charset=utf-8"),
}
DOCUMENT = "/openapi.json"
PATHS = (*FILES, DOCUMENT)
# Swagger UI has styles in its elements. Nothing comes from elsewhere, no page may frame these, forms go nowhere.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; connect-src 'self'; "
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


async def _file(request: Request) -> Response:
    where = request.url.path
    path, content_type = FILES[where]
    policy = dashboard.POLICY if where in dashboard.FILES else POLICY
    return _answer(request, _read(path), content_type, policy)


async def _document(request: Request) -> Response:
    state = request.app.state
    if not hasattr(state, "document"):
        document = await paths.offload(request.app.openapi)
        state.document = _tagged(text_of(document).encode())
    return _answer(request, state.document, "application/json")


for place in FILES:
    router.add_api_route(place, _file, methods=["GET"])
router.add_api_route(DOCUMENT, _document, methods=["GET"])


def text_of(document: Mapping[str, Any]) -> str:
    """As it is served, and as it lies in the repository."""
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def _answer(request: Request, tagged: tuple[bytes, str], content_type: str, policy: str = POLICY) -> Response:
    content, tag = tagged
    headers = {**HEADERS, "Content-Security-Policy": policy, "ETag": tag}
    if tag in request.headers.get("If-None-Match", ""):
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=content_type)


@cache
def _read(path: Path) -> tuple[bytes, str]:
    return _tagged(path.read_bytes())


def _tagged(content: bytes) -> tuple[bytes, str]:
    return content, f'"{hashlib.sha256(content).hexdigest()[:32]}"'
