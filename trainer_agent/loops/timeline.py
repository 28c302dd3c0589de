"""Work that belongs to one timeline of the job: a roll-back ends it, whatever it waits for.

on_timeline(directory, 7, work) ─► its result      state.timeline is no longer 7 ─► work cancelled, RolledBack
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from shared.membership.directory import Directory
from trainer_agent.waiting.single_error import single_error

LOOK_S = 0.5

T = TypeVar("T")


class RolledBack(Exception):
    """The job went back to a checkpoint: parameters, positions and tasks of before are void."""


def timeline_of(directory: Directory) -> int:
    return directory.state.timeline if directory.state else 0


async def on_timeline(directory: Directory, timeline: int, work: Coroutine[Any, Any, T]) -> T:
    """Raises RolledBack (also if the job left the timeline in the last moment), and what `work` raises."""
    try:
        with single_error():
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(_left(directory, timeline))
                result = await work
                watching.cancel()
    finally:
        work.close()
    if timeline_of(directory) != timeline:
        raise RolledBack(_sentence(directory, timeline))
    return result


async def _left(directory: Directory, timeline: int) -> None:
    while timeline_of(directory) == timeline:
        await directory.changed(directory.revision, LOOK_S)
    raise RolledBack(_sentence(directory, timeline))


def _sentence(directory: Directory, timeline: int) -> str:
    return f"the job is in timeline {timeline_of(directory)}, not in {timeline} any more"
