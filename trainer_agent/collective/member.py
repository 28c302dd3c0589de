"""One trainer as a member of its collective job: its group, its own parameters and optimizer, and how the
job's first values become known.

    initial values ─┐
    checkpoint ─────┼─► a version, `holds` in trainers/<id> ─► steps with the others, shares of checkpoints
        ─► the last version is saved
    other trainers ─┘

    first values:  init_ps/lock (leased, create = 0) ─► layout with a digest of the values, and init_ps/done

Every trainer makes its own first values, and one of them says which they are. Whoever has the same values has
version 0, and says so in its key; the others get theirs from a trainer that has some.
"""

from __future__ import annotations

import asyncio

from trainer_agent.collective.exchange import CollectiveGroup
from trainer_agent.collective.gathering import MeanGradients
from trainer_agent.collective.groups import GroupView
from trainer_agent.collective.native.exchange import NativeExchange
from trainer_agent.collective.ports import CollectivePorts
from trainer_agent.collective.replica import Replica
from trainer_agent.collective.state.checkpoints import CheckpointContext, Restorer, ShareCopies
from trainer_agent.collective.state.following import Following
from trainer_agent.collective.state.giving import StateGiver
from trainer_agent.data_plane.fleet_client import Connect, Suspect
from trainer_agent.membership.lease import LOOK_S, PATIENCE_S, Membership, fits, lock
from trainer_agent.model.compute import Compute
from trainer_agent.waiting import Backoff, SingleErrorGroup
from trireme_shared.blocks.gradient_norm import Clipping
from trireme_shared.checkpoints.start_tables import mark_in
from trireme_shared.checkpoints.writer import Offload
from trireme_shared.platform.etcd import Compare, Etcd, LeaseLost, Put
from trireme_shared.platform.membership.directory import Directory
from trireme_shared.platform.runtime import clock, telemetry
from trireme_shared.protocol.errors import NotReady, PeerError
from trireme_shared.protocol.records import Holding, JobSpec
from trireme_shared.protocol.records.step import StepRecord

SAVED_LOOK_S = 0.05

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
        checkpoints = CheckpointContext(spec, *place, ports.background, compute, replica)
        self.copies = ShareCopies(checkpoints, self._saved)
        view.observers.append(self._remember)
        self.group = group = CollectiveGroup(means, replica, compute, spec, self.copies, ports.step_in)
        self.server = server = ports.server
        server.join(directory, membership)
        server.giver = StateGiver(spec.job, compute, replica, self._saved, ports.step_in)
        self._restorer = Restorer(checkpoints, group.in_use, group.swapping, means.stop, group.start)
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
            for part in (
                self.group.run,
                self.copies.checkpointer.run,
                self._restorer.run,
                self._following.run,
            ):
                group.create_task(part())

    async def until_saved(self, limit_s: float) -> None:
        """Until no part of a checkpoint is being written or committed here, at most so long."""
        checkpointer, deadline = self.copies.checkpointer, clock.monotonic() + limit_s
        while checkpointer.busy:
            if clock.monotonic() > deadline:
                log.warning("left_unsaved", waited_s=limit_s, checkpointer=repr(checkpointer))
                return
            await asyncio.sleep(SAVED_LOOK_S)


async def begin_together(
    spec: JobSpec,
    directory: Directory,
    etcd: Etcd,
    membership: Membership,
    compute: Compute,
    group: CollectiveGroup,
    offload: Offload,
) -> bool:
    """Returns when the job's first values are known; if they are this trainer's and the job has not gone on
    from them, it has version 0. False: start again, see ensure_initialised. `offload`: where files are read.
    Raises LayoutMismatch, InvalidArgument."""
    group.replica.begin(spec.lanes)
    digest, first = group.replica.digest(), group.replica.record
    trainer = membership.record.trainer
    backoff = Backoff("waiting for the first values of the job", PATIENCE_S)
    while not directory.init_done or directory.layout is None:
        if directory.state is not None and directory.state.phase.final:
            return True
        try:
            if not compute.may_initialise:
                return False
            if await lock(directory, etcd, membership.lease_id, trainer):
                await _publish(directory, etcd, trainer, compute, digest)
        except (PeerError, LeaseLost) as error:
            await backoff.failed(error)
        await directory.changed(directory.revision, LOOK_S)
    if not fits(spec, compute.layout, directory.layout):
        return False
    if group.replica.record is not first:
        # the job goes back to a checkpoint, which is loaded already, or is being loaded (Restorer)
        return True
    state = directory.state
    # once it has run, also if nobody is listed now because there are too few of them
    begun = state is not None and (bool(state.checkpoint) or state.generation > state.timeline)
    if begun or digest != directory.layout.values:
        group.replica.forget()
        log.info("values_wanted", mine=digest, theirs=directory.layout.values, begun=begun)
        return True
    if (rows := group.replica.rows) is not None and mark_in(compute.layout.initial):
        from trainer_agent.collective.rows import put_start_rows  # noqa: PLC0415  loads numba

        await offload(put_start_rows, rows, compute.layout, spec.init_from, spec.init_optimizer)
        if group.replica.record is not first:
            return True
    group.replica.timeline = state.timeline if state is not None else 0
    group.start()
    hold(membership, group)
    return True


def hold(membership: Membership, group: CollectiveGroup) -> None:
    """Say in the trainer's key which version it has: from now on the job may count on it."""
    replica = group.replica
    assert replica.version is not None
    membership.set(
        holds=Holding(timeline=replica.timeline, checkpoint=replica.checkpoint, version=replica.version)
    )
    log.info("holds", version=replica.version, timeline=replica.timeline)


async def _publish(directory: Directory, etcd: Etcd, trainer: str, compute: Compute, digest: str) -> None:
    """Idempotent. Raises NotReady: another trainer does it."""
    keys = directory.keys
    if await etcd.get(keys.init_done) is not None:
        return  # only this trainer's view is late
    layout = compute.layout.with_fields(values=digest)
    mine = [Compare.value(keys.init_lock, "==", trainer.encode()), Compare.create(keys.layout, "==", 0)]
    if not (
        await etcd.txn(mine, [Put(keys.layout, layout.to_bytes()), Put(keys.init_done, trainer.encode())])
    ).succeeded:
        raise NotReady("another trainer says which values the job begins with")
    log.info("initialised", digest=layout.digest[:12], values=digest)
