"""Work that belongs to one timeline of the job: a rollback cancels it, wherever it waits.

on_timeline(directory, 7, work) ─► its result      state.timeline is not 7 any more ─► work cancelled, RolledBack
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

from trainer_agent.waiting import SingleErrorGroup
from trireme_shared.platform.membership.directory import Directory

LOOK_S = 0.5

T = TypeVar("T")


class RolledBack(Exception):
    """The job went back to a checkpoint: the parameters, positions and tasks this trainer has are no longer valid."""


def timeline_of(directory: Directory) -> int:
    return directory.state.timeline if directory.state else 0


async def on_timeline(directory: Directory, timeline: int, work: Coroutine[Any, Any, T]) -> T:
    """Raises RolledBack, also if the job left the timeline before `work` began (then it does not begin) or just when it ended, and
    what `work` raises."""
    try:
        if timeline_of(directory) != timeline:
            raise RolledBack(_sentence(directory, timeline))
        async with SingleErrorGroup() as group:
            watching = group.create_task(_watch(directory, timeline))
            result = await work
            watching.cancel()
    finally:
        work.close()
    if timeline_of(directory) != timeline:
        raise RolledBack(_sentence(directory, timeline))
    return result


async def _watch(directory: Directory, timeline: int) -> None:
    while timeline_of(directory) == timeline:
        await directory.changed(directory.revision, LOOK_S)
    raise RolledBack(_sentence(directory, timeline))


def _sentence(directory: Directory, timeline: int) -> str:
    return f"the job is in timeline {timeline_of(directory)}, not in {timeline} any more"
