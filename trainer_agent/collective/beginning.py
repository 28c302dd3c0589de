"""The first values of a collective job: every trainer makes its own, and one of them says which they are.

init_ps/lock (leased, create = 0) ─► layout with a digest of the values, and init_ps/done
whoever has the same values has version 0, and says so in its key; the others get theirs from a trainer that has some
"""

from __future__ import annotations

from trainer_agent.collective.exchange import CollectiveGroup
from trainer_agent.membership.initialise import LOOK_S, PATIENCE_S, fits, lock
from trainer_agent.membership.lease import Membership
from trainer_agent.model.compute import Compute
from trainer_agent.waiting import Backoff
from trireme_shared.checkpoints.start_tables import mark_in
from trireme_shared.checkpoints.writer import Offload
from trireme_shared.platform.etcd import Compare, Etcd, LeaseLost, Put
from trireme_shared.platform.membership.directory import Directory
from trireme_shared.platform.runtime import telemetry
from trireme_shared.protocol.errors import NotReady, PeerError
from trireme_shared.protocol.records import Holding, JobSpec

log = telemetry.logger("beginning")


async def begin_together(
    spec: JobSpec,
    directory: Directory,
    etcd: Etcd,
    membership: Membership,
    compute: Compute,
    group: CollectiveGroup,
    offload: Offload,
) -> bool:
    """Returns when the job's first values are known; if they are this trainer's and the job has not gone on from them, it has version 0. False: start
    again, see ensure_initialised. `offload`: where files are read. Raises LayoutMismatch, InvalidArgument."""
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
        return True  # the job goes back to a checkpoint, which is loaded already, or is being loaded (restoring.py)
    state = directory.state
    # once it has run, also if nobody is listed now because there are too few of them
    begun = state is not None and (bool(state.checkpoint) or state.generation > state.timeline)
    if begun or digest != directory.layout.values:
        group.replica.forget()
        log.info("values_wanted", mine=digest, theirs=directory.layout.values, begun=begun)
        return True
    if (rows := group.replica.rows) is not None and mark_in(compute.layout.initial):
        from trainer_agent.collective.rows.stepping import put_start_rows  # noqa: PLC0415  loads numba

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
    membership.set(holds=Holding(timeline=replica.timeline, checkpoint=replica.checkpoint, version=replica.version))
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
