"""One trainer as a member of its collective job: the exchange of gradients, and all that concerns its own parameters and optimizer.

initial values ─┐
checkpoint ─────┼─► a version, `holds` in trainers/<id> ─► steps with the others, shares of checkpoints ─► the last version is saved
other trainers ─┘
"""

from __future__ import annotations

import asyncio

from shared.errors import Gone
from shared.etcd import Etcd
from shared.membership.directory import Directory
from shared.records import JobSpec, TrainerList
from shared.records.operations import CheckpointRequest
from shared.records.step import StepRecord
from shared.runtime import clock, telemetry
from trainer_agent.collective.exchange import Collective, with_norm
from trainer_agent.collective.groups import Group, GroupView
from trainer_agent.collective.mean_blocks import released
from trainer_agent.collective.native.exchange import NativeExchange
from trainer_agent.collective.ports import CollectivePorts
from trainer_agent.collective.state.catching_up import Step
from trainer_agent.collective.state.following import Following
from trainer_agent.collective.state.giving import StateGiver
from trainer_agent.collective.state.restoring import Restorer
from trainer_agent.collective.state.saving import ShareCopies
from trainer_agent.data_plane.peers import Connect, Suspect
from trainer_agent.membership.lease import Membership
from trainer_agent.model.compute import Compute
from trainer_agent.waiting.single_error import SingleErrorGroup

LOOK_S = 0.05

log = telemetry.logger("collective.member")


class CollectiveMember(Collective):
    """Run `run()` beside the loops."""

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
        me, slot_count = membership.record.trainer, compute.layout.slot_count
        view = GroupView(directory, etcd, me, slot_count)
        super().__init__(view, connect, compute, suspect, membership.certain, spec, ports)
        if spec.exchange == "native" and ports.native is not None:
            self.native = NativeExchange(self, spec, me, etcd, lambda: membership.lease_id, ports.native)
        server = ports.server
        server.join(directory, membership)
        self.on_lost = lambda: membership.set(holds=None)
        self.on_formed = membership.without_doubt
        server.giver = StateGiver(spec.job, compute, self.replica, self._saved, ports.step_in)
        place = etcd, directory, membership
        self._put_off = False  # the copy of the version in use
        self.copies = ShareCopies(spec, *place, ports.background, compute, self.replica, self._saved)
        locks = self.in_use, self.swapping
        self._restorer = Restorer(spec, *place, ports.background, compute, self.replica, *locks, self.stop, self.start)
        self._following = Following(*place, compute, self, self.copies, ports.connect_donor, ports.step_in)

    def _regroup(self) -> None:
        super()._regroup()
        if self.view.group is not None:
            self.copies.remember(self.view.group.trainers)

    async def run(self) -> None:
        async with SingleErrorGroup() as group:
            for part in (super().run, self.copies.checkpointer.run, self._restorer.run, self._following.run):
                group.create_task(part())

    async def until_saved(self, limit_s: float) -> None:
        """Until no part of a checkpoint is being written or committed here, at most so long."""
        checkpointer, deadline = self.copies.checkpointer, clock.monotonic() + limit_s
        while checkpointer.busy:
            if clock.monotonic() > deadline:
                log.warning("left_unsaved", waited_s=limit_s, checkpointer=repr(checkpointer))
                return
            await asyncio.sleep(LOOK_S)

    # ------------------------------------------------------------ checkpoints

    async def reached(self) -> None:
        """Nothing is copied for a generation whose group is not formed: its members may have made this version of other records."""
        group = self.view.group
        if group is None or not self.replica.at_rest:
            return
        self._put_off = not group.formed.is_set()
        if not self._put_off:
            await self._copy(group)

    async def _copy(self, group: Group) -> None:
        store, version = self.store, self.replica.version
        since = store.had_in(version) if store is not None and version is not None else None
        await self.copies.at_version(group.trainers, since)

    async def goes_on_in(self, group: Group) -> None:
        """Some may have reached the version in the generation before, and some only now: an evaluated one would get parts of two generations, and be lost."""
        if self.replica.at_rest and self.copies.is_evaluated:
            await self._copy(group)

    async def leaves(self) -> None:
        """If all mean gradients of the next version are there already, nothing else waits for the group: who is late would leave without a copy."""
        if self._put_off:
            await self._formed()
            await self.reached()

    async def stays(self) -> None:
        """Who died may not have written its part of this version, and no later one is made: each generation copies it anew."""
        await self.reached()

    def checkpoint_again(self) -> CheckpointRequest | None:
        group = self.view.group
        return self.copies.again(group.trainers) if group is not None else None

    def _saved(self, record: StepRecord) -> StepRecord:
        if self.store is None:
            return record
        return self.store.history.saved(self.store.history.record(record.version) or record)

    # ------------------------------------------------------------ versions, for who has no lanes

    def listed(self) -> TrainerList | None:
        return self.view.group.trainers if self.view.group is not None else None

    async def wait(self, version: int) -> None:
        """Until it has all mean gradients of that version. Raises Gone."""
        await self.gather_to(version)

    def take(self, version: int) -> Step:
        """How that version, which it has, follows from the one before. Those before it are not kept for this trainer any more."""
        store = self.store
        assert store is not None
        record, gradients = store.history.record(version), store.retained(version)
        assert record is not None
        store.in_use = version
        store.forget()
        tensors = {number: buffer.tensor if buffer is not None else None for number, buffer in gradients.items()}
        rows = store.rows.whole[version] if store.rows is not None else None
        return Step(record, tensors, lambda: released(gradients), rows)

    def measured(self, version: int, norm: float) -> StepRecord:
        """Raises Gone: the job went back meanwhile."""
        record = self.store.history.record(version) if self.store is not None else None
        if self.store is None or record is None:
            raise Gone(f"this trainer has no version {version} any more")
        if self._spec.clip_grad_norm is not None:
            record = with_norm(record, norm)
            self.store.history.take_record(record)
        return record

    def handed_over(self) -> None:
        if self.store is not None and self.replica.version is not None:
            self.store.know_buffers(self.replica.version, self._compute.current)

    async def step_to(self, version: int) -> None:
        """The version in use is that, the next one, then."""
        await self.pull(version)
        async with self.swapping:
            self.swap()
