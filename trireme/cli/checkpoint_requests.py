"""`trireme checkpoint create | restore`: asked of a running job's master, followed to the end; progress goes to stderr.

POST -> Operation --long polls, also across a change of masters--> DONE: the answer    FAILED: its error    still RUNNING: exit 7
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from rich.console import Console

from shared.errors import DeadlineExceeded, NotFound, PeerError, TriremeError, from_map
from shared.runtime import clock, ids
from trireme.cli import exit_codes
from trireme.cli.queries import address
from trireme.view.client import Client
from trireme.view.job_address import reach

if TYPE_CHECKING:
    from trireme.view.spectator import Spectator

LONG_POLL_S = 5.0
PAUSE_S = 0.5
AWAY_S = 30.0  # how long a job may be without a master

Document = dict[str, Any]
Peer: TypeAlias = "Client | Spectator"
Call: TypeAlias = "Callable[[Peer], Awaitable[Document]]"
Connect: TypeAlias = "Callable[[], AbstractAsyncContextManager[Peer]]"


def create(job: str | None, data_dir: Path | None, url: str | None, wait_s: float, *, as_json: bool) -> int:
    """Returns the exit code."""
    key = ids.new_id("cli")
    return _run(
        lambda: _client(job, data_dir, url),
        lambda client: client.create_checkpoint(key, cause="asked by trireme checkpoint create"),
        wait_s,
        as_json=as_json,
    )


def restore(
    job: str | None, data_dir: Path | None, url: str | None, which: str, wait_s: float, *, as_json: bool
) -> int:
    """`which`: a step, or how the uuid begins. Returns the exit code."""
    key = ids.new_id("cli")

    async def ask(client: Peer) -> Document:
        return await client.restore_checkpoint(await _chosen(client, which), key)

    return _run(lambda: _client(job, data_dir, url), ask, wait_s, as_json=as_json)


def _client(job: str | None, data_dir: Path | None, url: str | None) -> AbstractAsyncContextManager[Peer]:
    """Of whoever leads now: the launcher writes a new leader's address into the run file."""
    return reach(address(job, data_dir, url), token=os.environ.get("TRIREME_TOKEN", ""))


def _run(connect: Connect, ask: Call, wait_s: float, *, as_json: bool) -> int:
    try:
        operation = asyncio.run(_asked_and_followed(connect, ask, wait_s))
    except TriremeError as error:
        return exit_codes.tell(error, as_json=as_json)
    if as_json:
        print(json.dumps(operation))  # noqa: T201
    else:
        what = f"step {operation['step']}  {operation['checkpoint_id']}" if operation.get("checkpoint_id") else ""
        Console(soft_wrap=True).print(f"{operation['state']}  {what}  {operation['operation_id']}", highlight=False)
    return exit_codes.OK


async def _asked_and_followed(connect: Connect, ask: Call, wait_s: float) -> Document:
    operation = await _of_any_master(connect, ask)
    return await follow(connect, operation, wait_s, _say) if wait_s else operation


async def follow(connect: Connect, operation: Document, wait_s: float, say: Callable[[str], None]) -> Document:
    """The operation once it is DONE; `say` hears what it waits for. Raises its error if it FAILED, and DeadlineExceeded
    if it is still under way after `wait_s`: it goes on."""
    deadline, said = clock.monotonic() + wait_s, ""
    name = operation["operation_id"]
    while operation["state"] == "RUNNING":
        if operation["reason"] != said:
            said = operation["reason"]
            say(said)
        left = deadline - clock.monotonic()
        if left <= 0:
            msg = f"operation {name} is still under way after {wait_s:g} s: {said}"
            raise DeadlineExceeded(msg, hint="it goes on; wait longer with --wait-s", operation=name)
        operation = await _polled(connect, name, min(left, LONG_POLL_S))
    if operation["state"] == "FAILED":
        raise from_map({"code": operation.get("error_code"), "message": operation["reason"], "details": operation})
    say(operation["reason"])
    return operation


async def _polled(connect: Connect, operation_id: str, wait_s: float) -> Document:
    return await _of_any_master(connect, lambda client: client.operation(operation_id, wait_s))


async def _of_any_master(connect: Connect, call: Call) -> Document:
    """While one master falls and the next one rises. Raises PeerError after AWAY_S."""
    deadline = clock.monotonic() + AWAY_S
    while True:
        try:
            async with connect() as client:
                return await call(client)
        except PeerError:
            if clock.monotonic() > deadline:
                raise
        await asyncio.sleep(ids.jitter(PAUSE_S))


async def _chosen(client: Peer, which: str) -> str:
    """Raises NotFound, which lists what there is."""
    there = [checkpoint async for checkpoint in client.checkpoints()]
    for checkpoint in there:
        if which == str(checkpoint["step"]) or checkpoint["checkpoint_id"].startswith(which):
            return str(checkpoint["checkpoint_id"])
    steps = ", ".join(f"step {checkpoint['step']} ({checkpoint['checkpoint_id'][:8]})" for checkpoint in there)
    msg = f"the job has no checkpoint {which}; there are: {steps or 'none yet'}"
    raise NotFound(msg, hint="`trireme checkpoint list` shows them")


def _say(text: str) -> None:
    print(text, file=sys.stderr)  # noqa: T201
