"""Why the job does not progress, and what to do."""

from __future__ import annotations

from fastapi import APIRouter

from master_service.api.routes.dependencies import MasterOf
from master_service.core.explanation.cause import Explanation
from master_service.leadership.explanation import explain_job

router = APIRouter()  # below /v1/jobs/{job}


@router.get("/explanation", operation_id="explainJob", tags=["job"])
async def explain(master: MasterOf) -> Explanation:
    """The most important cause, and in `also` the others. Answers while the master takes over and while etcd is silent, too."""
    return await explain_job(master)
