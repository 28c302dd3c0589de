"""What the loops of one trainer work with."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from trainer_agent.core.duties import Next, next_duty
from trainer_agent.data_plane.step_exchange import StepExchange
from trainer_agent.model.compute import Compute
from trainer_agent.tasks.activity import Activity
from trainer_agent.tasks.reports import Reports
from trainer_agent.tasks.source import TaskSource
from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.membership.directory import Directory
from trireme_shared.protocol.records import JobSpec
from trireme_shared.protocol.records.job_choices import Narrow


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
