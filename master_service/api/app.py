"""The REST API of the jobs that a process leads: request id, limit of the body, token, routes, problems.

request -> bounded (ASGI) -> token -> route: decode -> the job's master -> encode        every error -> problem+json
    └─ requests for every task: hot_routes.py, without FastAPI
"""

from __future__ import annotations

import hmac

from fastapi import Depends, FastAPI, Request
from starlette.types import ASGIApp

from master_service.api import problems
from master_service.api.hot_routes import DirectTaskLeases
from master_service.api.limits import MAX_BODY_BYTES, Bounded
from master_service.api.routes import (
    checkpoints,
    explanation,
    job,
    members,
    operations,
    resizes,
    schedules,
    system,
    task_leases,
    tasks,
)
from master_service.api.routes import jobs as cluster_jobs
from master_service.api.routes.dependencies import job_in_path
from master_service.cluster.leader import ClusterMaster
from master_service.leadership.jobs_led import JobsLed
from shared import __version__
from shared.errors import Unauthorized

DESCRIPTION = (
    "Control plane of Trireme jobs: tasks, members, progress. Everything of a job is below /v1/jobs/{job}; while there is one job "
    "only, below /v1, too (/v1/job, /v1/tasks, ...). Errors are RFC 9457 problem details."
)


def make_app(jobs: JobsLed, *, token: str = "") -> ASGIApp:
    """The application. `token` empty: no authentication (for 127.0.0.1 only)."""
    return DirectTaskLeases(make_api(jobs, token=token), jobs, token, max_body_bytes=MAX_BODY_BYTES)


def make_api(jobs: JobsLed, *, token: str = "") -> FastAPI:
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
    app.state.jobs = jobs
    allowed, clustered = [Depends(authorised)], isinstance(jobs, ClusterMaster)
    if clustered:
        app.include_router(cluster_jobs.router, dependencies=allowed)
        app.include_router(cluster_jobs.pool, dependencies=allowed)
        app.include_router(schedules.router, dependencies=allowed)
    for prefix, of_job in (("/v1/jobs/{job}", "/v1/jobs/{job}"), ("/v1", "/v1/job")):  # the second: of the only job
        named = "{job}" in prefix
        parameters = [*allowed, Depends(job_in_path)] if named else allowed
        if not (named and clustered):  # a cluster answers for jobs that nobody leads now, too
            for resource in (job.of_job, explanation.router):
                app.include_router(resource, prefix=of_job, dependencies=parameters, include_in_schema=named)
        for routes in (job, tasks, task_leases, members, checkpoints, resizes, operations):
            app.include_router(routes.router, prefix=prefix, dependencies=parameters, include_in_schema=named)
    app.include_router(system.router, dependencies=allowed)
    app.include_router(system.open_router)
    problems.install(app)
    app.add_middleware(Bounded)
    return app
