"""`trireme scale`: other numbers of trainers and parameter servers for a running job. Progress goes to
stderr."""

from __future__ import annotations

import asyncio
import json
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from trireme.cli import exit_codes
from trireme.cli.targets import job_target
from trireme.view.job_address import LONG_POLL_S, AnyClient, Connect, OpenJob, call_any_master, open_job
from trireme.view.progress import say
from trireme_shared.platform.runtime import clock, ids
from trireme_shared.protocol.errors import DeadlineExceeded, TriremeError, from_map
from trireme_shared.protocol.records.operations import OperationState, ResizePrediction
from trireme_shared.protocol.rest import ResizeView

POLL_S = 0.5
MIB = 1 << 20


def scale(
    job: str | None,
    data_dir: Path | None,
    url: str | None,
    asked: dict[str, Any],
    wait_s: float,
    *,
    dry_run: bool,
    as_json: bool,
) -> int:
    """`asked`: the body of createResize. `dry_run`: predictResize instead. Returns the exit code."""
    key = ids.new_id("cli")

    def connect() -> AbstractAsyncContextManager[OpenJob]:
        target = job_target(job, data_dir, url)
        return open_job(target.address, token=target.token)

    async def run() -> ResizePrediction | ResizeView:
        if dry_run:
            return await call_any_master(connect, lambda client, name: client.predict_resize(name, **asked))
        begun = await call_any_master(
            connect, lambda client, name: client.create_resize(name, key=key, **asked)
        )
        resize = await call_any_master(connect, partial(_look, begun.operation_id, 0.0))
        return await _ended(connect, resize, wait_s) if wait_s else resize

    try:
        found = asyncio.run(run())
    except TriremeError as error:
        return exit_codes.report_error(error, as_json=as_json)
    if as_json:
        print(json.dumps(found.model_dump(mode="json")))  # noqa: T201
    else:
        text = (
            f"{found.phase}  {found.reason}  {found.resize_id}"
            if isinstance(found, ResizeView)
            else _told(found)
        )
        Console(soft_wrap=True).print(text, highlight=False)
    return exit_codes.OK


async def _ended(connect: Connect, resize: ResizeView, wait_s: float) -> ResizeView:
    """The resize once it is committed. Raises its error if it ended otherwise, DeadlineExceeded after
    `wait_s`."""
    deadline, said, resize_id = clock.monotonic() + wait_s, "", resize.resize_id
    while resize.state is OperationState.RUNNING:
        line = f"{resize.phase}: {resize.reason}"
        if resize.groups:
            line += f"; {resize.bytes_moved / MIB:.1f} of {resize.bytes / MIB:.1f} MiB moved"
        if line != said:
            say(line)
            said = line
        left = deadline - clock.monotonic()
        if left <= 0:
            msg = f"resize {resize_id} is still running after {wait_s:g} s: {resize.reason}"
            hint = "it goes on; `trireme explain` may tell why it takes long; wait longer with --wait-s"
            raise DeadlineExceeded(msg, hint=hint, operation=resize_id)
        poll_s = min(left, LONG_POLL_S if resize.phase == "PLANNED" else POLL_S)
        resize = await call_any_master(connect, partial(_look, resize_id, poll_s))
    if resize.state is OperationState.FAILED:
        details = resize.model_dump(mode="json")
        raise from_map(
            {"code": resize.error_code, "message": f"{resize.phase}: {resize.reason}", "details": details}
        )
    return resize


async def _look(resize_id: str, wait_s: float, client: AnyClient, job: str) -> ResizeView:
    return await client.get_resize(job, resize_id, wait_s=wait_s)


def _told(found: ResizePrediction) -> str:
    trainers = f"{found.before_trainers} to {found.trainers} trainers"
    if not found.before_pservers and not found.pservers:
        return f"{trainers}: who comes fetches the parameters from the others, which train on"
    head = (
        f"{found.before_pservers} to {found.pservers} parameter servers, {trainers}: "
        f"{found.slots} slots in {found.groups} groups would move, {found.bytes / MIB:.1f} MiB"
    )
    rows = [
        f"  pserver-{each.pserver}  sends {each.sent / MIB:.1f} MiB, receives {each.received / MIB:.1f} MiB"
        for each in found.by_pserver
    ]
    return "\n".join([head, *rows])
