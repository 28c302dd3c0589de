"""The progress of operations."""

from __future__ import annotations

from fastapi import APIRouter

from master_service.api.routes.dependencies import MasterOf, WaitS, committed
from shared.records.operations import Operation

router = APIRouter(prefix="/operations", tags=["operations"])


@router.get("/{operation_id}", operation_id="getOperation")
async def get_operation(master: MasterOf, operation_id: str, wait_s: WaitS = 0.0) -> Operation:
    """Answers at once, or when it has ended, at most `wait_s` later; `reason` says what it waits for."""
    operations = master.term.operations
    await operations.wait(operation_id, wait_s)
    return await committed(master, lambda: operations.get(operation_id))
