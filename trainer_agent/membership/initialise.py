"""One trainer at a time gives the parameter servers their first values; if it dies before the end, another one does.

init_ps/lock (leased, create = 0) ─► POST init to every pserver ─► layout and init_ps/done, if none of them was replaced
all others wait, and compare the layout with their own model
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from typing import Literal, cast

from trainer_agent.data_plane.fleet_client import Connect, Routes, route
from trainer_agent.membership.lease import Membership
from trainer_agent.model.compute import Compute
from trainer_agent.waiting import Backoff, SingleErrorGroup
from trireme_shared.platform.etcd import Compare, Etcd, LeaseLost, Put
from trireme_shared.platform.etcd.reading import read_record
from trireme_shared.platform.membership.directory import Directory
from trireme_shared.platform.runtime import process_setup, telemetry
from trireme_shared.protocol.errors import LayoutMismatch, NotReady, PeerError, StaleGeneration, WrongOwner
from trireme_shared.protocol.records import JobSpec, JobState, Mode, PserverMember, SlotMap
from trireme_shared.protocol.records.layout import Layout, TableSpec
from trireme_shared.protocol.records.step import LanePosition, StepRecord
from trireme_shared.protocol.wire.messages import InitBlock, InitHeader

LOOK_S = 0.5
PATIENCE_S = 3600.0
SHOWN = 8  # differences of tables in a message

log = telemetry.logger("initialise")


async def ensure_initialised(
    spec: JobSpec, directory: Directory, etcd: Etcd, membership: Membership, compute: Compute, connect: Connect
) -> bool:
    """Returns when the parameter servers hold parameters of this model. False: start again, because the device was chosen here (`auto`)
    and the trainer that initialised them has another kind, or because the job starts over and this model cannot. Raises LayoutMismatch."""
    trainer = membership.record.trainer
    backoff = Backoff("waiting for the parameters to be initialised", PATIENCE_S)
    while not directory.init_done or directory.layout is None:
        if directory.state is not None and directory.state.phase.final:
            return True
        try:
            if not compute.may_initialise:
                return False
            if _all_there(directory) and await lock(directory, etcd, membership.lease_id, trainer):
                await _initialise(spec, directory, etcd, trainer, compute, connect)
        except (PeerError, StaleGeneration, WrongOwner, LeaseLost) as error:
            await backoff.failed(error)
        await directory.changed(directory.revision, LOOK_S)
    return fits(spec, compute.layout, directory.layout)


def fits(spec: JobSpec, own: Layout, layout: Layout) -> bool:
    """False: the device was chosen here (`auto`), and the trainer that initialised the parameters has another kind: start again with
    that one. Raises LayoutMismatch."""
    check_layout(own, layout)
    mine, job = own.device, layout.device
    if spec.mode is Mode.ASYNC or not job or mine == job:
        return True
    if spec.device == "auto":
        log.info("device_chosen", mine=mine, job=job)
        return False
    raise LayoutMismatch(
        f"this trainer computes on {mine}, the job was initialised on {job}: the bits of a synchronous job depend on the kind of device",
        hint=f"start its trainers with device auto or {job}, or start a new job",
        mine=mine,
        job=job,
    )


def followed(spec: JobSpec, layout: Layout | None) -> JobSpec:
    """With the job's kind of device for `auto`, if it is known already."""
    if spec.device != "auto" or spec.mode is Mode.ASYNC or layout is None or not layout.device:
        return spec
    return spec.with_fields(device=cast("Literal['cpu', 'cuda']", layout.device))


def _different_tables(mine: Sequence[TableSpec], job: Sequence[TableSpec]) -> str:
    """Which, and in what: for messages."""
    ours, theirs = ({table.name: table for table in tables} for tables in (mine, job))
    found = [f"{name}, which the job does not have" for name in ours if name not in theirs]
    found += [f"no {name}, which the job has" for name in theirs if name not in ours]
    for name in sorted(ours.keys() & theirs.keys()):
        of_both = ours[name].differences(theirs[name])
        found += [f"{name}: {setting} {one}, the job has {other}" for setting, one, other in of_both]
    more = f", and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return "; ".join(found[:SHOWN]) + more


def check_layout(mine: Layout, job: Layout) -> None:
    """Raises LayoutMismatch, which names the differences."""
    differences = []
    if mine.digest != job.digest and mine.unordered == job.unordered != "":
        raise LayoutMismatch(
            "this trainer's model has the parameters and buffers of the job's, but in another order (digest "
            f"{mine.digest[:12]}, the job has {job.digest[:12]})",
            hint="modules that are made from a set of names have another order with another PYTHONHASHSEED (it is "
            f"{os.environ.get(process_setup.HASH_SEED, 'not set')} here): sort the names, or give all members the same PYTHONHASHSEED",
            mine=mine.digest,
            job=job.digest,
        )
    if mine.digest != job.digest:
        differences.append(
            f"names, shapes, dtypes or memory formats (digest {mine.digest[:12]}, the job has {job.digest[:12]})"
        )
    if mine.segments != job.segments:
        differences.append(f"segments ({_sizes(mine)}, the job has {_sizes(job)})")
    if mine.block_bytes != job.block_bytes:
        differences.append(f"block_bytes ({mine.block_bytes}, the job has {job.block_bytes})")
    if mine.tables != job.tables:
        differences.append(f"embedding tables ({_different_tables(mine.tables, job.tables)})")
    if mine.optimizer.name != job.optimizer.name:
        differences.append(f"the optimizer ({mine.optimizer.name}, the job has {job.optimizer.name})")
    if mine.initial != job.initial and not differences:
        raise LayoutMismatch(
            f"init_from gave this trainer other values than the job began with (digest {mine.initial[:12] or 'none'}, the job has "
            f"{job.initial[:12] or 'none'}): the file was changed meanwhile",
            hint="this trainer takes the job's own copy when it starts again; start a new job for the new file",
            mine=mine.initial,
            job=job.initial,
        )
    if not differences and (others := _different_constants(mine, job)):
        raise LayoutMismatch(
            f"model() gave this trainer other constants than the job began with: {others}; trainers do not send constants to each other",
            hint="model() must give the same values on every host and at every time: draw from the generators of torch, numpy or random, which are "
            "seeded for model(), or load the values from one file; values that shall be shared are a floating-point buffer (register_buffer)",
            mine="; ".join(f"{each.name} {each.digest}" for each in mine.constants or ()),
            job="; ".join(f"{each.name} {each.digest}" for each in job.constants or ()),
        )
    if differences:
        raise LayoutMismatch(
            f"this trainer's model is not the job's: different {'; '.join(differences)}",
            hint="give every trainer the same script and packages, or start a new job",
            mine=mine.digest,
            job=job.digest,
        )


def _different_constants(mine: Layout, job: Layout) -> str:
    """Which, with both digests. "" if none, or if one side does not know its own (it is of an earlier version)."""
    if mine.constants is None or job.constants is None:
        return ""
    ours, theirs = ({each.name: each.digest for each in layout.constants or ()} for layout in (mine, job))
    found = [
        f"{name} (digest {ours.get(name, 'none')}, the job has {theirs.get(name, 'none')})"
        for name in {**ours, **theirs}
        if ours.get(name) != theirs.get(name)
    ]
    return ", ".join(found[:SHOWN]) + (f", and {len(found) - SHOWN} more" if len(found) > SHOWN else "")


def _sizes(layout: Layout) -> str:
    return ", ".join(f"{s.elements} {s.dtype} {s.kind}" for s in layout.segments)


def _all_there(directory: Directory) -> bool:
    """By the number in etcd, not in this trainer's spec: the job may have been started again with another number."""
    wanted, slots = directory.pservers_desired, directory.slots
    return slots is not None and max(slots.owners) + 1 == len(directory.pservers) == wanted


async def lock(directory: Directory, etcd: Etcd, lease_id: int, trainer: str) -> bool:
    """True if this trainer holds the lock, also if it had it before."""
    key = directory.keys.init_lock
    taken = await etcd.txn([Compare.create(key, "==", 0)], [Put(key, trainer.encode(), lease_id)])
    if taken.succeeded:
        return True
    holder = await etcd.get(key)
    return holder is not None and holder.value == trainer.encode()


async def _initialise(
    spec: JobSpec, directory: Directory, etcd: Etcd, trainer: str, compute: Compute, connect: Connect
) -> None:
    """Idempotent. Raises PeerError if a parameter server was replaced meanwhile, or the job's state is another than this trainer sees: the
    caller starts over."""
    keys = directory.keys
    if await etcd.get(keys.init_done) is not None:
        return  # only this trainer's view is late
    registered = (await etcd.range(keys.pservers, prefix=True)).kvs
    found = {kv.key: (kv, member) for kv in registered if (member := read_record(PserverMember, kv.key, kv.value))}
    members = [member for _, member in found.values()]
    state, placed = await etcd.get(keys.state), await etcd.get(keys.slots)
    seen, slots = directory.state, directory.slots
    if len(members) != directory.pservers_desired or seen is None or slots is None:
        raise NotReady(f"{len(members)} of {directory.pservers_desired} parameter servers are registered")
    newest = (
        state and read_record(JobState, keys.state, state.value),
        placed and read_record(SlotMap, keys.slots, placed.value),
    )
    if state is None or placed is None or newest != (seen, slots):
        raise NotReady("this trainer does not see the job's newest state yet")
    log.info("initialising", pservers=len(members), blocks=sum(1 for _ in compute.layout.blocks()))
    routes = route(compute.layout, slots)
    async with SingleErrorGroup() as group:
        for member in members:
            group.create_task(
                _fill(_header(spec, directory, member, compute, seen, slots), member, compute, routes, connect)
            )
    # both keys in one transaction, so that a repetition on a stale view cannot replace a published layout
    same = [Compare.create(key, "==", kv.create_revision) for key, (kv, _) in found.items()]
    same += [Compare.mod(kv.key, "==", kv.mod_revision) for kv in (state, placed)]
    mine = [Compare.value(keys.init_lock, "==", trainer.encode()), Compare.create(keys.layout, "==", 0)]
    published = [Put(keys.layout, compute.layout.to_bytes()), Put(keys.init_done, trainer.encode())]
    if not (await etcd.txn([*same, *mine], published)).succeeded:
        raise NotReady(
            "a parameter server was replaced meanwhile, the job has another state, or another trainer initialises"
        )
    log.info("initialised", digest=compute.layout.digest[:12])


def _header(
    spec: JobSpec, directory: Directory, member: PserverMember, compute: Compute, state: JobState, slots: SlotMap
) -> InitHeader:
    sync = spec.mode is Mode.SYNC
    positions = tuple(LanePosition(lane=lane) for lane in range(spec.lanes)) if sync else ()
    return InitHeader(
        job=spec.job,
        term=directory.master.term if directory.master else 0,
        generation=state.generation,
        timeline=state.timeline,
        slots=slots.version,
        mode=spec.mode,
        lanes=spec.lanes if sync else 1,
        layout=compute.layout,
        pserver=member.index,
        record=StepRecord(version=0, positions=positions, lane_zero=compute.initial_lane_zero()),
    )


async def _fill(header: InitHeader, member: PserverMember, compute: Compute, routes: Routes, connect: Connect) -> None:
    async def blocks() -> AsyncIterator[tuple[InitBlock, memoryview]]:
        for block in routes.blocks.get(member.index, ()):
            yield InitBlock(block=block), compute.current(block)
            for name, values in compute.initial_state(block):
                yield InitBlock(block=block, state=name), values

    await connect(member).init(header, blocks())
