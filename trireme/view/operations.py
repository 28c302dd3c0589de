"""Waiting for an operation of a running job (a checkpoint, a restore), also while one master takes over from another.

RUNNING --long polls--> DONE: the operation     FAILED: its error     still RUNNING at the end: DeadlineExceeded
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from trireme.view.job_address import AnyClient, Connect
from trireme_shared.platform.runtime import clock, ids
from trireme_shared.protocol.errors import DeadlineExceeded, PeerError, from_map
from trireme_shared.protocol.records.operations import Operation, OperationState

LONG_POLL_S = 5.0
PAUSE_S = 0.5
AWAY_S = 30.0  # how long a job may be without a master

R = TypeVar("R")


async def wait_for_operation(
    connect: Connect, operation: Operation, wait_s: float, report: Callable[[str], None]
) -> Operation:
    """The operation once it is DONE; `report` gets what it waits for. Raises the operation's error if it FAILED, and
    DeadlineExceeded if it is still RUNNING after `wait_s`; then it goes on."""
    deadline, reported = clock.monotonic() + wait_s, ""
    name = operation.operation_id
    while operation.running:
        if operation.reason != reported:
            reported = operation.reason
            report(reported)
        left = deadline - clock.monotonic()
        if left <= 0:
            msg = f"operation {name} is still running after {wait_s:g} s: {reported}"
            raise DeadlineExceeded(msg, hint="it goes on; wait longer with --wait-s", operation=name)
        operation = await _polled(connect, name, min(left, LONG_POLL_S))
    if operation.state is OperationState.FAILED:
        details = operation.model_dump(mode="json")
        raise from_map({"code": operation.error_code, "message": operation.reason, "details": details})
    report(operation.reason)
    return operation


async def _polled(connect: Connect, operation_id: str, wait_s: float) -> Operation:
    return await call_any_master(connect, lambda client, job: client.get_operation(job, operation_id, wait_s=wait_s))


async def call_any_master(connect: Connect, call: Callable[[AnyClient, str], Awaitable[R]]) -> R:
    """Call whichever master leads; repeat while none answers. Raises PeerError after AWAY_S."""
    deadline = clock.monotonic() + AWAY_S
    while True:
        try:
            async with connect() as (client, job):
                return await call(client, job)
        except PeerError:
            if clock.monotonic() > deadline:
                raise
        await asyncio.sleep(ids.jitter(PAUSE_S))
