"""Version, metrics and health, for monitoring."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from master_service.api.prometheus import exposition
from master_service.api.routes.dependencies import JobsOf
from trireme_shared import __version__
from trireme_shared.platform.security.tokens import Role
from trireme_shared.protocol.rest import Health, TokenAccess, Version

router = APIRouter(tags=["system"])
open_router = APIRouter(tags=["system"])


@router.get("/v1/version", operation_id="getVersion")
async def get_version() -> Version:
    """Of the program, and of its API."""
    return Version(name="trireme-master", version=__version__, api="v1")


@router.get("/v1/access", operation_id="getAccess")
async def get_access(request: Request) -> TokenAccess:
    """What the token of this request may do. A standby answers too."""
    return TokenAccess(role=getattr(request.state, "role", Role.ADMIN))


@router.get("/metrics", operation_id="scrapeMetrics", response_class=Response)
async def scrape_metrics(jobs: JobsOf) -> Response:
    """Prometheus text. A standby answers too: trireme_master_leading is 0."""
    return Response(exposition(jobs), media_type=CONTENT_TYPE_LATEST)


@open_router.get("/healthz", operation_id="checkHealth")
async def check_health() -> Health:
    """The process lives."""
    return Health(status="ok")


@open_router.get("/readyz", operation_id="checkReadiness")
async def check_readiness(jobs: JobsOf) -> Health:
    """`ok`: it leads and can answer. `standby`: another master leads, and this one could take over. Else NOT_LEADER (it has lost
    etcd, say) or NOT_READY."""
    return Health(status="ok" if jobs.check_ready() else "standby")
