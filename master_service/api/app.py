"""The REST API of a `Master`: request id, limit of the body, token, routes, problems.

request -> bounded (ASGI) -> token -> route: decode -> master -> encode        every error -> problem+json
    └─ requests for every task: hot_routes.py, without FastAPI
"""

from __future__ import annotations

import hmac

from fastapi import Depends, FastAPI, Request
from starlette.types import ASGIApp

from master_service.api import problems
from master_service.api.hot_routes import DirectTaskLeases
from master_service.api.limits import MAX_BODY_BYTES, Bounded
from master_service.api.routes import checkpoints, job, members, operations, system, task_leases, tasks
from master_service.leadership.master import Master
from shared import __version__
from shared.errors import Unauthorized

DESCRIPTION = "Control plane of one Trireme job: tasks, members, progress. Errors are RFC 9457 problem details."


def make_app(master: Master, *, token: str = "") -> ASGIApp:
    """The application. `token` empty: no authentication (for 127.0.0.1 only)."""
    return DirectTaskLeases(make_api(master, token=token), master, token, max_body_bytes=MAX_BODY_BYTES)


def make_api(master: Master, *, token: str = "") -> FastAPI:
    """All routes in FastAPI, with their documentation."""

    async def authorised(request: Request) -> None:
        given = request.headers.get("authorization", "")
        if token and not hmac.compare_digest(given.encode("latin-1"), f"Bearer {token}".encode()):
            what = "another bearer token than the job's" if given else "no bearer token"
            raise Unauthorized(f"the request has {what}", hint="give the job's token in TRIREME_TOKEN")

    app = FastAPI(
        title="Trireme master",
        version=__version__,
        description=DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        openapi_url="/v1/openapi.json",
    )
    app.state.master = master
    for routes in (job, tasks, task_leases, members, checkpoints, operations, system):
        app.include_router(routes.router, dependencies=[Depends(authorised)])
    app.include_router(system.open_router)
    problems.install(app)
    app.add_middleware(Bounded)
    return app
