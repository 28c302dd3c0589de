"""The progress of what takes long."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from master_service.api import render
from master_service.api.routes.dependencies import MasterOf, PageSize, PageToken, WaitS, committed
from trireme_shared.protocol.records.operations import Operation, OperationState
from trireme_shared.protocol.rest import OperationPage

router = APIRouter(prefix="/operations", tags=["operations"])


@router.get("", operation_id="listOperations")
async def list_operations(
    master: MasterOf,
    state: Annotated[OperationState | None, Query()] = None,
    page_size: PageSize = 100,
    page_token: PageToken = "",
) -> OperationPage:
    """Those that run and the last ones that ended, newest first; resizes are among them."""
    return await committed(master, lambda: render.operations(master.job, state, page_size, page_token))


@router.get("/{operation_id}", operation_id="getOperation")
async def get_operation(master: MasterOf, operation_id: str, wait_s: WaitS = 0.0) -> Operation:
    """Answers at once, or when it has ended, at most `wait_s` later; `reason` says what it waits for."""
    operations = master.term.operations
    await operations.wait(operation_id, wait_s)
    return await committed(master, lambda: operations.get(operation_id))
