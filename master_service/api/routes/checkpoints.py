"""Checkpoints: list, create, verify, restore.

Requests that take long answer 202 with an Operation; `wait_s` waits for its end. Models are exported by `trireme export`: that
needs torch and the job's script, which a master does not load.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Request, Response

from master_service.api import render
from master_service.api.resources import CheckpointDetails, CheckpointPage, CreateCheckpoint
from master_service.api.routes.dependencies import MasterOf, PageSize, PageToken, WaitS, answered
from master_service.leadership.master import Master
from shared.records.operations import Operation

router = APIRouter(prefix="/v1/checkpoints", tags=["checkpoints"])

Key = Annotated[str, Header(alias="Idempotency-Key", max_length=200, description="the same key is the same operation")]


@router.post("", operation_id="createCheckpoint", status_code=202)
async def create_checkpoint(
    master: MasterOf,
    request: Request,
    response: Response,
    asked: CreateCheckpoint | None = None,
    idempotency_key: Key = "",
    wait_s: WaitS = 0.0,
) -> Operation:
    """Save one of the next steps; training does not stop for it. While one is being made, that one's operation answers."""
    asked = asked or CreateCheckpoint()
    cause = asked.cause or _asked_by(request)
    begun = await answered(master.term.operations.create_checkpoint(idempotency_key, cause, asked.limit_s))
    return await _waited(master, response, begun, wait_s)


@router.get("", operation_id="listCheckpoints")
async def list_checkpoints(master: MasterOf, page_size: PageSize = 100, page_token: PageToken = "") -> CheckpointPage:
    """Checkpoints that are kept, the newest of the job's present history first."""
    return render.checkpoints(master.job, page_size, page_token)


@router.get("/{checkpoint_id}", operation_id="getCheckpoint")
async def get_checkpoint(master: MasterOf, checkpoint_id: str) -> CheckpointDetails:
    """With the details of its manifest."""
    return await answered(render.checkpoint_details(master, checkpoint_id))


@router.post("/{checkpoint_id}/verify", operation_id="verifyCheckpoint", status_code=202)
async def verify_checkpoint(
    master: MasterOf,
    request: Request,
    response: Response,
    checkpoint_id: str,
    idempotency_key: Key = "",
    wait_s: WaitS = 0.0,
) -> Operation:
    """Read every part and compare its checksum; the operation is FAILED if one is not as it was written."""
    operations = master.term.operations
    begun = await answered(operations.verify_checkpoint(idempotency_key, _asked_by(request), checkpoint_id))
    return await _waited(master, response, begun, wait_s)


@router.post("/{checkpoint_id}/restore", operation_id="restoreCheckpoint", status_code=202)
async def restore_checkpoint(
    master: MasterOf,
    request: Request,
    response: Response,
    checkpoint_id: str,
    idempotency_key: Key = "",
    wait_s: WaitS = 0.0,
) -> Operation:
    """The whole job goes back to that step and continues from there. The files are verified before anything is stopped."""
    operations = master.term.operations
    begun = await answered(
        operations.restore_checkpoint(idempotency_key, f"restore {_asked_by(request)}", checkpoint_id)
    )
    return await _waited(master, response, begun, wait_s)


def _asked_by(request: Request) -> str:
    return f"asked by {request.client.host}" if request.client else "asked by REST"


async def _waited(master: Master, response: Response, begun: Operation, wait_s: float) -> Operation:
    response.headers["Location"] = f"/v1/operations/{begun.operation_id}"
    return await master.term.operations.wait(begun.operation_id, wait_s)
