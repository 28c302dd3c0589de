"""Waiting for an operation of a running job (a checkpoint, a restore), also while one master takes over from another.

RUNNING --long polls--> DONE: the operation     FAILED: its error     still RUNNING at the end: DeadlineExceeded
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from shared.errors import DeadlineExceeded, PeerError, from_map
from shared.runtime import clock, ids
from trireme.view.job_address import AnyClient, Connect

LONG_POLL_S = 5.0
PAUSE_S = 0.5
AWAY_S = 30.0  # how long a job may be without a master

Document = dict[str, Any]
Call: TypeAlias = "Callable[[AnyClient], Awaitable[Document]]"


async def wait_for_operation(
    connect: Connect, operation: Document, wait_s: float, report: Callable[[str], None]
) -> Document:
    """The operation once it is DONE; `report` gets what it waits for. Raises the operation's error if it FAILED, and
    DeadlineExceeded if it is still RUNNING after `wait_s`; then it goes on."""
    deadline, reported = clock.monotonic() + wait_s, ""
    name = operation["operation_id"]
    while operation["state"] == "RUNNING":
        if operation["reason"] != reported:
            reported = operation["reason"]
            report(reported)
        left = deadline - clock.monotonic()
        if left <= 0:
            msg = f"operation {name} is still running after {wait_s:g} s: {reported}"
            raise DeadlineExceeded(msg, hint="it goes on; wait longer with --wait-s", operation=name)
        operation = await _polled(connect, name, min(left, LONG_POLL_S))
    if operation["state"] == "FAILED":
        raise from_map({"code": operation.get("error_code"), "message": operation["reason"], "details": operation})
    report(operation["reason"])
    return operation


async def _polled(connect: Connect, operation_id: str, wait_s: float) -> Document:
    return await call_any_master(connect, lambda client: client.operation(operation_id, wait_s))


async def call_any_master(connect: Connect, call: Call) -> Document:
    """Call whichever master leads; repeat while none answers. Raises PeerError after AWAY_S."""
    deadline = clock.monotonic() + AWAY_S
    while True:
        try:
            async with connect() as client:
                return await call(client)
        except PeerError:
            if clock.monotonic() > deadline:
                raise
        await asyncio.sleep(ids.jitter(PAUSE_S))
