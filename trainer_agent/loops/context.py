"""What the loops of one trainer work with, and work that belongs to one timeline of the job: a rollback
cancels it, wherever it waits.

on_timeline(directory, 7, work) ─► its result
state.timeline is not 7 any more ─► work cancelled, RolledBack
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from trainer_agent.core.duties import Next, next_duty
from trainer_agent.data_plane.step_exchange import StepExchange
from trainer_agent.model.compute import Compute
from trainer_agent.tasks.activity import Activity
from trainer_agent.tasks.reports import Reports
from trainer_agent.tasks.source import TaskSource
from trainer_agent.waiting import SingleErrorGroup
from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.membership.directory import Directory
from trireme_shared.protocol.records import JobSpec
from trireme_shared.protocol.records.job_choices import Narrow

LOOK_S = 0.5
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LoopContext:
    """`stopping`: this trainer is asked to stop."""

    spec: JobSpec
    etcd: Etcd
    directory: Directory
    compute: Compute
    exchange: StepExchange
    source: TaskSource
    reports: Reports
    activity: Activity
    stopping: asyncio.Event

    @property
    def gradient_dtypes(self) -> list[Narrow | None]:
        """By block: the narrower dtype in which its gradients travel, if any."""
        return self.compute.layout.payloads(self.spec.gradient_dtype)

    def duty(self) -> Next:
        """What this trainer has to do now."""
        return next_duty(self.directory.state, self.directory.trainers, self.source.trainer, self.spec.mode)


class RolledBack(Exception):
    """The job went back to a checkpoint: the parameters, positions and tasks this trainer has are no longer
    valid."""


def timeline_of(directory: Directory) -> int:
    return directory.state.timeline if directory.state else 0


async def on_timeline(directory: Directory, timeline: int, work: Coroutine[Any, Any, T]) -> T:
    """Raises RolledBack, also if the job left the timeline before `work` began (then it does not begin) or
    just when it ended, and what `work` raises."""
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
