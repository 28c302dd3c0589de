"""How a trainer becomes one of the job's: its registration `trainers/<id>` in etcd, under a lease, what may
keep it from renewing that, and the parameters' first values.

    register (create = 0) ─► hold ... revoked or deleted ─► lost: exit, come back under a new name

If etcd is silent for longer than the lease, the trainer waits before its next push or pull (`certain`). Its
key is its own: it is created again if the lease ran out meanwhile. While etcd is down (connections are
refused) training goes on.

Code of the user that keeps Python's interpreter holds up the event loop, which then cannot renew the lease
(Life):

    the loop runs ─► sign of life (trireme_shared.platform.membership.life_sign)
    held up for longer than the lease, which is gone ─► the master is told
        of which records: counted as a death there (they are discarded, after some)
        of nothing on record: a failure of the user's code

One trainer at a time gives the parameter servers their first values; if it dies before the end, another one
does.

init_ps/lock (leased, create = 0) ─► POST init to every pserver
    ─► layout and init_ps/done, if none of them was replaced
all others wait, and compare the layout with their own model
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from trainer_agent.data_plane.fleet_client import Connect, Routes, route
from trainer_agent.model.compute import Compute
from trainer_agent.tasks.master import MasterPort
from trainer_agent.waiting import Backoff, SingleErrorGroup, retry
from trireme_shared.platform.etcd import Compare, Etcd, LeaseLost, Put
from trireme_shared.platform.etcd.reading import read_record
from trireme_shared.platform.membership.directory import Directory, OwnKey
from trireme_shared.platform.membership.life_sign import WORKS_FROM, LifeFile
from trireme_shared.platform.runtime import begun, clock, process_setup, telemetry
from trireme_shared.protocol.errors import (
    LayoutMismatch,
    NotReady,
    PeerError,
    StaleGeneration,
    TriremeError,
    WrongOwner,
)
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import (
    FailTask,
    JobSpec,
    JobState,
    Mode,
    PserverMember,
    SlotMap,
    TrainerMember,
    UserFailure,
)
from trireme_shared.protocol.records.layout import Layout, TableSpec
from trireme_shared.protocol.records.step import LanePosition, StepRecord
from trireme_shared.protocol.records.tasks import BegunWork
from trireme_shared.protocol.wire.messages import InitBlock, InitHeader

log = telemetry.logger("membership")
BEAT_S = 0.25
REPORT_S = 30.0
KEPT = "InterpreterKept"
WHAT_TO_DO = (
    "let that code release the interpreter (read or parse in smaller parts, or with a library that "
    "does), make it once in dataset(), "
    "or raise lease_ttl_s"
)
LOOK_S = 0.5
PATIENCE_S = 3600.0
SHOWN = 8  # differences of tables in a message


class Membership(OwnKey[TrainerMember]):
    """The trainer's own key."""

    _listed = False

    def follow(self, *, listed: bool) -> None:
        """After each change of the view: whether this trainer is among those that the job counts on. One that
        is no more may have lost its key."""
        before, self._listed = self._listed, listed
        if before and not listed:
            self.look()

    def created_again(self) -> None:
        """Collective: others may have gone on, further than this trainer can follow. It is no member before
        it knows."""
        if self.record.holds is not None:
            self._say_doubt(doubted=True)

    def without_doubt(self) -> None:
        """Collective: it has what the others have, or gets it."""
        if self.record.holds is not None and self.record.holds.doubted:
            self._say_doubt(doubted=False)

    def _say_doubt(self, *, doubted: bool) -> None:
        assert self.record.holds is not None
        self.set(holds=self.record.holds.with_fields(doubted=doubted))

    @property
    def lease_id(self) -> int:
        return self._lease.id if self._lease else 0

    async def register(self, keys: Keys, ttl_s: float) -> None:
        """Raises DeadlineExceeded."""
        await retry(lambda: self.try_register(keys, ttl_s), "registering in etcd")
        log.info("registered", trainer=self.record.trainer, lease=f"{self.lease_id:x}")

    async def try_register(self, keys: Keys, ttl_s: float) -> None:
        """Raises PeerError."""
        key = keys.trainer(self.record.trainer)
        if not await self.claim(key, ttl_s):
            raise PeerError(f"{key} is taken: by a registration whose answer was lost; its lease runs out")

    async def leave(self, *, asked: bool = False) -> None:
        """Release the key at once, unless the lease is over already. `asked`: see `release`."""
        if self.lease.alive:
            await self.release(asked=asked)


@dataclass(frozen=True, slots=True)
class HeldUp:
    """The event loop did not run for `seconds`, while this process used `processor_s` of processor time, at
    `works`."""

    seconds: float
    processor_s: float
    works: tuple[bytes, ...]

    @property
    def by_code(self) -> bool:
        return self.processor_s >= WORKS_FROM * self.seconds

    def __str__(self) -> str:
        named = [str(work) for work in map(BegunWork.from_bytes, self.works) if work is not None]
        where = f" while it {' and '.join(named)}" if named else ""
        return f"its Python interpreter was kept for {self.seconds:.0f} s{where}"


class Life:
    """The signs of life of one trainer. Run `run`; close it at the end."""

    def __init__(self, etcd: Etcd, trainer: str, master: MasterPort) -> None:
        self._etcd, self._trainer, self._master = etcd, trainer, master
        self._file = LifeFile()

    def __repr__(self) -> str:
        return f"<Life of {self._trainer}>"

    def close(self) -> None:
        self._file.close()

    async def run(self, membership: Membership) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            before, used = clock.monotonic(), clock.process_seconds()
            while True:
                lease = membership.lease
                if lease.alive:
                    self._file.write(lease.id, lease.ttl_s)
                await asyncio.sleep(BEAT_S)
                now, used_now = clock.monotonic(), clock.process_seconds()
                seconds = now - before - BEAT_S
                if seconds > lease.ttl_s / 2:
                    held_up = HeldUp(seconds, used_now - used, begun.overlapping(seconds))
                    log.warning("held_up", cause=str(held_up), processor_s=round(held_up.processor_s, 1))
                    if seconds > lease.ttl_s and held_up.by_code:
                        group.create_task(self._report(held_up, lease.id))
                before, used = now, used_now

    async def _is_gone(self, lease: int) -> bool:
        """Whether etcd has ended the lease; its supervisor may have renewed it."""
        try:
            return await self._etcd.time_to_live(lease) < 0
        except TriremeError:
            return False

    async def _report(self, held_up: HeldUp, lease: int) -> None:
        """If the lease was lost by it."""
        if not await self._is_gone(lease):
            return
        name = self._trainer.rpartition("-")[0] or self._trainer
        message = f"{name} lost its lease: {held_up}; {WHAT_TO_DO}"
        works = [work for work in map(BegunWork.from_bytes, held_up.works) if work is not None]
        try:
            for work in works:
                failure = UserFailure(
                    error_type=KEPT, message=message, task=f"task {work.task}", trainer=self._trainer
                )
                by = f"{self._trainer} {lease:x}"  # each loss counts
                failed = FailTask(
                    trainer=by, attempt=0, failure=failure, epoch=work.epoch, died_at=work.minibatch
                )
                await self._until_told(work.task, failed)
            if not works:
                failure = UserFailure(error_type=KEPT, message=message, trainer=self._trainer)
                await retry(
                    lambda: self._master.report_failure(self._trainer, failure),
                    "reporting a failure",
                    REPORT_S,
                )
        except TriremeError as error:
            log.warning("loss_unreported", cause=str(error))

    async def _until_told(self, task: str, failed: FailTask) -> None:
        await retry(lambda: self._master.fail_task(task, failed), "reporting a lost lease", REPORT_S)


async def ensure_initialised(
    spec: JobSpec,
    directory: Directory,
    etcd: Etcd,
    membership: Membership,
    compute: Compute,
    connect: Connect,
) -> bool:
    """Returns when the parameter servers hold parameters of this model. False: start again, because the
    device was chosen here (`auto`) and the trainer that initialised them has another kind, or because the job
    starts over and this model cannot. Raises LayoutMismatch."""
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
    """False: the device was chosen here (`auto`), and the trainer that initialised the parameters has another
    kind: start again with that one. Raises LayoutMismatch."""
    check_layout(own, layout)
    mine, job = own.device, layout.device
    if spec.mode is Mode.ASYNC or not job or mine == job:
        return True
    if spec.device == "auto":
        log.info("device_chosen", mine=mine, job=job)
        return False
    raise LayoutMismatch(
        f"this trainer computes on {mine}, the job was initialised on {job}: the bits of a "
        "synchronous job depend on the kind of device",
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
            hint="modules that are made from a set of names have another order with another "
            "PYTHONHASHSEED (it is "
            f"{os.environ.get(process_setup.HASH_SEED, 'not set')} here): sort the names, or give "
            "all members the same PYTHONHASHSEED",
            mine=mine.digest,
            job=job.digest,
        )
    if mine.digest != job.digest:
        differences.append(
            "names, shapes, dtypes or memory formats, or what `buffers` says (digest "
            f"{mine.digest[:12]}, the job has {job.digest[:12]})"
        )
    if mine.segments != job.segments:
        differences.append(f"segments ({_sizes(mine)}, the job has {_sizes(job)})")
    if mine.frozen != job.frozen and mine.sizes == job.sizes:
        differences.append(
            "what requires a gradient at first (without are the parameters number "
            f"{_told(mine.frozen)}, of the job {_told(job.frozen)})"
        )
    if mine.block_bytes != job.block_bytes:
        differences.append(f"block_bytes ({mine.block_bytes}, the job has {job.block_bytes})")
    if mine.tables != job.tables:
        differences.append(f"embedding tables ({_different_tables(mine.tables, job.tables)})")
    if (mine.optimizer.name, mine.optimizer.classes) != (job.optimizer.name, job.optimizer.classes):
        differences.append(f"the optimizer ({mine.optimizer.name}, the job has {job.optimizer.name})")
    if mine.initial != job.initial and not differences:
        raise LayoutMismatch(
            "init_from gave this trainer other values than the job began with (digest "
            f"{mine.initial[:12] or 'none'}, the job has "
            f"{job.initial[:12] or 'none'}): the file was changed meanwhile",
            hint="this trainer takes the job's own copy when it starts again; start a new job for the "
            "new file",
            mine=mine.initial,
            job=job.initial,
        )
    if not differences and (others := _different_constants(mine, job)):
        raise LayoutMismatch(
            f"model() gave this trainer other constants than the job began with: {others}; "
            "trainers do not send constants to each other",
            hint="model() must give the same values on every host and at every time: draw from the "
            "generators of torch, numpy or random, which are "
            "seeded for model(), or load the values from one file; values that shall be shared are "
            "a floating-point buffer (register_buffer)",
            mine="; ".join(f"{each.name} {each.digest}" for each in mine.constants or ()),
            job="; ".join(f"{each.name} {each.digest}" for each in job.constants or ()),
        )
    if differences:
        hint = "give every trainer the same script and packages, or start a new job"
        if mine.frozen and not job.sizes:
            hint = (
                "the job was begun by an earlier version of Trireme, which did not lay out parameters that "
                "are frozen at first: leave them out of the optimizer, or start a new job with --init-from"
            )
        raise LayoutMismatch(
            f"this trainer's model is not the job's: different {'; '.join(differences)}",
            hint=hint,
            mine=mine.digest,
            job=job.digest,
        )


def _different_constants(mine: Layout, job: Layout) -> str:
    """Which, with both digests. "" if none, or if one side does not know its own (it is of an earlier
    version)."""
    if mine.constants is None or job.constants is None:
        return ""
    ours, theirs = ({each.name: each.digest for each in layout.constants or ()} for layout in (mine, job))
    found = [
        f"{name} (digest {ours.get(name, 'none')}, the job has {theirs.get(name, 'none')})"
        for name in {**ours, **theirs}
        if ours.get(name) != theirs.get(name)
    ]
    return ", ".join(found[:SHOWN]) + (f", and {len(found) - SHOWN} more" if len(found) > SHOWN else "")


def _told(numbers: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"{first} to {last - 1}" for first, last in numbers) or "none"


def _sizes(layout: Layout) -> str:
    return ", ".join(f"{s.elements} {s.dtype} {s.kind}" for s in layout.segments)


def _all_there(directory: Directory) -> bool:
    """By the number in etcd, not in this trainer's spec: the job may have been started again with another
    number."""
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
    """Idempotent. Raises PeerError if a parameter server was replaced meanwhile, or the job's state is
    another than this trainer sees: the caller starts over."""
    keys = directory.keys
    if await etcd.get(keys.init_done) is not None:
        return  # only this trainer's view is late
    registered = (await etcd.range(keys.pservers, prefix=True)).kvs
    found = {
        kv.key: (kv, member) for kv in registered if (member := read_record(PserverMember, kv.key, kv.value))
    }
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
                _fill(
                    _header(spec, directory, member, compute, seen, slots), member, compute, routes, connect
                )
            )
    # both keys in one transaction, so that a repetition on a stale view cannot replace a published layout
    same = [Compare.create(key, "==", kv.create_revision) for key, (kv, _) in found.items()]
    same += [Compare.mod(kv.key, "==", kv.mod_revision) for kv in (state, placed)]
    mine = [Compare.value(keys.init_lock, "==", trainer.encode()), Compare.create(keys.layout, "==", 0)]
    published = [Put(keys.layout, compute.layout.to_bytes()), Put(keys.init_done, trainer.encode())]
    if not (await etcd.txn([*same, *mine], published)).succeeded:
        raise NotReady(
            "a parameter server was replaced meanwhile, the job has another state, or another "
            "trainer initialises"
        )
    log.info("initialised", digest=compute.layout.digest[:12])


def _header(
    spec: JobSpec,
    directory: Directory,
    member: PserverMember,
    compute: Compute,
    state: JobState,
    slots: SlotMap,
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


async def _fill(
    header: InitHeader, member: PserverMember, compute: Compute, routes: Routes, connect: Connect
) -> None:
    async def blocks() -> AsyncIterator[tuple[InitBlock, memoryview]]:
        for block in routes.blocks.get(member.index, ()):
            yield InitBlock(block=block), compute.current(block)
            for name, values in compute.initial_state(block):
                yield InitBlock(block=block, state=name), values

    await connect(member).init(header, blocks())
