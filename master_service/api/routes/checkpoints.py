"""Checkpoints: list, create, verify, restore.

Requests that take long answer 202 with an Operation; `wait_s` waits for its end. Models are exported by `trireme export`: that
needs torch and the job's script, which a master does not load.
"""

from __future__ import annotations

from fastapi import APIRouter

from master_service.api import render
from master_service.api.routes.asking import Asking
from master_service.api.routes.dependencies import MasterOf, PageSize, PageToken, answered, committed
from trireme_shared.protocol.records.operations import Operation
from trireme_shared.protocol.rest import CheckpointDetails, CheckpointPage, CreateCheckpoint

router = APIRouter(prefix="/checkpoints", tags=["checkpoints"])


@router.post("", operation_id="createCheckpoint", status_code=202)
async def create_checkpoint(master: MasterOf, asking: Asking, asked: CreateCheckpoint | None = None) -> Operation:
    """Save one of the next steps; training does not stop for it. A request that comes while one is being made gets the next one."""
    asked, operations = asked or CreateCheckpoint(), master.term.operations
    cause, limit_s = asked.cause or asking.by, asked.limit_s
    return await asking.begin(lambda once: operations.create_checkpoint(asking.key, cause, limit_s, once))


@router.get("", operation_id="listCheckpoints")
async def list_checkpoints(master: MasterOf, page_size: PageSize = 100, page_token: PageToken = "") -> CheckpointPage:
    """Checkpoints that are kept, the newest of the job's present history first."""
    return await committed(master, lambda: render.checkpoints(master.job, page_size, page_token))


@router.get("/{checkpoint_id}", operation_id="getCheckpoint")
async def get_checkpoint(master: MasterOf, checkpoint_id: str) -> CheckpointDetails:
    """With the details of its manifest."""
    return await answered(render.checkpoint_details(master, checkpoint_id))


@router.post("/{checkpoint_id}/verify", operation_id="verifyCheckpoint", status_code=202)
async def verify_checkpoint(master: MasterOf, asking: Asking, checkpoint_id: str) -> Operation:
    """Read every part and compare its checksum; the operation is FAILED if one is not as it was written."""
    operations = master.term.operations
    return await asking.begin(lambda once: operations.verify_checkpoint(asking.key, asking.by, checkpoint_id, once))


@router.post("/{checkpoint_id}/restore", operation_id="restoreCheckpoint", status_code=202)
async def restore_checkpoint(master: MasterOf, asking: Asking, checkpoint_id: str) -> Operation:
    """The whole job goes back to that step and continues from there. The files are verified before anything is stopped."""
    cause, operations = f"restore {asking.by}", master.term.operations
    return await asking.begin(lambda once: operations.restore_checkpoint(asking.key, cause, checkpoint_id, once))
