"""The REST API of the jobs that a process leads: token, request id, limit of the body, routes, problems.

request -> Guarded -> of a page at a standby: ForwardedToLeader -> Bounded -> EveryMethod (middleware.py)
             |         -> route: decode -> the job's master -> encode
             `- requests for every task: DirectTaskLeases (routes/tasks.py), without FastAPI
every error -> problem+json
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

from fastapi import Depends, FastAPI
from starlette.types import ASGIApp

from master_service.api import problems
from master_service.api.logins import LoginCodes
from master_service.api.middleware import (
    Bounded,
    EveryMethod,
    ForwardedToLeader,
    Guarded,
)
from master_service.api.openapi import documentation
from master_service.api.openapi.document import document_of
from master_service.api.openapi.documentation import DocumentedPaths
from master_service.api.rendered import RenderedJobs, RenderedPool
from master_service.api.routes import events, job, jobs, logs, operations, system, tasks
from master_service.api.routes.dependencies import job_in_path
from master_service.api.routes.jobs import listed_view
from master_service.api.routes.logs import LogSource
from master_service.api.routes.tasks import DirectTaskLeases
from master_service.api.server_sent import Streams
from master_service.cluster.leader import ClusterMaster, JobsLed
from trireme_shared import __version__
from trireme_shared.platform.runtime import telemetry
from trireme_shared.platform.security.access import Access
from trireme_shared.protocol.errors import NotLeader, NotReady

CALM_S = 1.0  # from the start, or from the last look in a takeover

log = telemetry.logger("rest")

DESCRIPTION = (
    "Control plane of Trireme jobs: tasks, members, progress. Everything of a job is below "
    "/v1/jobs/{job}; while there is one job "
    "only, below /v1, too (/v1/job, /v1/tasks, ...). Errors are RFC 9457 problem details."
)

OF_ONE_JOB = (
    job.metrics,
    events.router,
    logs.router,
    tasks.router,
    tasks.leases,
    job.members,
    operations.checkpoints,
    operations.resizes,
    operations.router,
)


def make_app(jobs: JobsLed, access: Access | None = None, logs_of: LogSource | None = None) -> ASGIApp:
    """The application. `access` None: it needs no token and answers at loopback names only. `logs_of` None:
    it serves no logs."""
    return guarded(make_api(jobs, logs_of), jobs, access)


def guarded(
    api: FastAPI, jobs: JobsLed, access: Access | None = None, to_leader: ssl.SSLContext | None = None
) -> ASGIApp:
    """The application around `make_api(jobs)`. `to_leader`: for a leader at https."""
    routes = DirectTaskLeases(api, jobs)
    return Guarded(ForwardedToLeader(routes, jobs, to_leader), access or Access())


async def warm_up(api: FastAPI, jobs: JobsLed, calm_s: float = CALM_S) -> None:
    """Make what routes need at their first requests (validators, the document), before somebody waits for it:
    half a second of a processor, in a thread, so that requests get their turns. Not while `jobs` are taken
    over: that goes first."""
    while True:
        await asyncio.sleep(calm_s)
        try:
            jobs.check_leading()
        except NotReady:
            continue
        except NotLeader:  # it stands by
            pass
        break
    await asyncio.to_thread(api.openapi)
    log.debug("warmed_up")


def make_api(jobs: JobsLed, logs_of: LogSource | None = None) -> FastAPI:
    """All routes in FastAPI, with their documentation; nobody is asked for a token."""
    app = api_of(clustered=isinstance(jobs, ClusterMaster))
    serve_from(app, jobs, logs_of or LogSource())
    return app


def serve_from(app: FastAPI, jobs: JobsLed, logs_of: LogSource) -> None:
    """Its routes ask these from now on."""
    app.state.jobs, app.state.logs, app.state.streams = jobs, logs_of, Streams()
    app.state.logins = LoginCodes()
    app.state.rendered_jobs, app.state.rendered_pool = RenderedJobs(listed_view), RenderedPool()


class _Api(FastAPI):
    def openapi(self) -> dict[str, Any]:
        return document_of(self)


def api_of(*, clustered: bool) -> FastAPI:
    """The routes of a cluster's leader, or of the master of one job; `state.jobs` is not set."""
    app = _Api(
        title="Trireme master",
        version=__version__,
        description=DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,  # openapi/documentation.py
        redirect_slashes=False,  # a path with a slash at its end does not exist
    )
    if clustered:
        for routes in (jobs.router, jobs.pool, jobs.schedules, events.of_cluster):
            app.include_router(routes)
    # the second: of the only job
    for prefix, of_job in (("/v1/jobs/{job}", "/v1/jobs/{job}"), ("/v1", "/v1/job")):
        named = "{job}" in prefix
        parameters = [Depends(job_in_path)] if named else []
        if not (named and clustered):  # a cluster answers for jobs that nobody leads now, too
            app.include_router(job.router, prefix=of_job, dependencies=parameters, include_in_schema=named)
        for routes in OF_ONE_JOB:
            app.include_router(routes, prefix=prefix, dependencies=parameters, include_in_schema=named)
    app.include_router(documentation.router)
    app.include_router(system.router)
    app.include_router(system.open_router)
    streams = {
        path: names for path, names in (events.STREAMS | logs.STREAMS).items() if clustered or "{job}" in path
    }
    paths = DocumentedPaths(app.openapi, beside=dict.fromkeys(documentation.PATHS) | streams)
    problems.install(app, paths)
    app.add_middleware(EveryMethod, paths=paths)
    app.add_middleware(Bounded)
    return app
