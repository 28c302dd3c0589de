"""One trainer as a member of its collective job: the group that it exchanges gradients with, and all that concerns its own parameters and optimizer.

initial values ─┐
checkpoint ─────┼─► a version, `holds` in trainers/<id> ─► steps with the others, shares of checkpoints ─► the last version is saved
other trainers ─┘
"""

from __future__ import annotations

import asyncio

from trainer_agent.collective.exchange import CollectiveGroup
from trainer_agent.collective.gathering import MeanGradients
from trainer_agent.collective.groups import GroupView
from trainer_agent.collective.native.exchange import NativeExchange
from trainer_agent.collective.ports import CollectivePorts
from trainer_agent.collective.replica import Replica
from trainer_agent.collective.state.following import Following
from trainer_agent.collective.state.giving import StateGiver
from trainer_agent.collective.state.restoring import Restorer
from trainer_agent.collective.state.saving import ShareCopies
from trainer_agent.data_plane.fleet_client import Connect, Suspect
from trainer_agent.membership.lease import Membership
from trainer_agent.model.compute import Compute
from trainer_agent.waiting import SingleErrorGroup
from trireme_shared.blocks.gradient_norm import Clipping
from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.membership.directory import Directory
from trireme_shared.platform.runtime import clock, telemetry
from trireme_shared.protocol.records import JobSpec
from trireme_shared.protocol.records.step import StepRecord

LOOK_S = 0.05

log = telemetry.logger("collective.member")


class CollectiveMember:
    """Run `run()` beside the loops, which use `group`."""

    def __init__(
        self,
        spec: JobSpec,
        etcd: Etcd,
        directory: Directory,
        membership: Membership,
        compute: Compute,
        connect: Connect,
        suspect: Suspect,
        ports: CollectivePorts,
    ) -> None:
        me, place = membership.record.trainer, (etcd, directory, membership)
        view = GroupView(directory, etcd, me, compute.layout.slot_count)
        self._means = means = MeanGradients(view, connect, compute, suspect, membership, spec, ports)
        if spec.exchange == "native" and ports.native is not None:
            means.native = NativeExchange(means, spec, me, etcd, lambda: membership.lease_id, ports.native)
        replica = Replica(compute, Clipping.of(spec))
        self.copies = ShareCopies(spec, *place, ports.background, compute, replica, self._saved)
        view.observers.append(self._remember)
        self.group = group = CollectiveGroup(means, replica, compute, spec, self.copies, ports.step_in)
        self.server = server = ports.server
        server.join(directory, membership)
        server.giver = StateGiver(spec.job, compute, replica, self._saved, ports.step_in)
        locks = group.in_use, group.swapping
        self._restorer = Restorer(spec, *place, ports.background, compute, replica, *locks, means.stop, group.start)
        self._following = Following(*place, compute, group, self.copies, ports.connect_donor, ports.step_in)

    def __repr__(self) -> str:
        return f"<CollectiveMember {self.group!r}>"

    def _remember(self) -> None:
        """In each generation: its trainers share the blocks of a checkpoint."""
        if self._means.view.group is not None:
            self.copies.remember(self._means.view.group.trainers)

    def _saved(self, record: StepRecord) -> StepRecord:
        """With the results of steps before it that may not be stored yet."""
        if self._means.store is None:
            return record
        history = self._means.store.history
        return history.saved(history.record(record.version) or record)

    async def run(self) -> None:
        async with SingleErrorGroup() as group:
            for part in (self.group.run, self.copies.checkpointer.run, self._restorer.run, self._following.run):
                group.create_task(part())

    async def until_saved(self, limit_s: float) -> None:
        """Until no part of a checkpoint is being written or committed here, at most so long."""
        checkpointer, deadline = self.copies.checkpointer, clock.monotonic() + limit_s
        while checkpointer.busy:
            if clock.monotonic() > deadline:
                log.warning("left_unsaved", waited_s=limit_s, checkpointer=repr(checkpointer))
                return
            await asyncio.sleep(LOOK_S)
