"""What the user changes of a job before its members are started.

FAILED, not through its script, no lock held
    --start_again--> WAITING: the first master takes the job back to its newest checkpoint
another spec, no lock held --renew--> what may change is written; more epochs: COMPLETED
    --> WAITING, and training goes on
hyperparameters that the user accepts: with the spec, in one transaction, the event `settings_changed` and the
    optimizer in the layout
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from master_service.core.changes import Change, Event
from master_service.core.decisions import lifecycle
from master_service.store import schema
from master_service.store.schema import read_events
from trireme_shared.checkpoints.stored import read_manifest
from trireme_shared.platform.etcd import Compare, Etcd, Put
from trireme_shared.platform.etcd.reading import must_read
from trireme_shared.platform.runtime import telemetry
from trireme_shared.protocol.errors import CheckpointUnusable, Conflict
from trireme_shared.protocol.evaluations import evaluation_of
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import JobSpec, JobState
from trireme_shared.protocol.records.checkpoints import CheckpointLatest
from trireme_shared.protocol.records.layout import Layout, OptimizerSpec
from trireme_shared.protocol.records.setting_effects import renewed

log = telemetry.logger("start_again")


async def start_again(etcd: Etcd, keys: Keys) -> bool:
    """Whether the job was opened again; False if there is nothing to do. Call it only on the user's request:
    masters that follow each other leave a failed job as it is. Raises Conflict if a master runs, PeerError,
    StateUnreadable."""
    found = await etcd.get(keys.state)
    if found is None:
        return False
    decision = lifecycle.start_again(must_read(JobState, found.key, found.value))
    if not decision.answer:
        return False
    await _write(etcd, keys, [Compare.mod(keys.state, "==", found.mod_revision)], decision.changes)
    log.info("started_again", job=keys.job)
    return True


async def renew(
    etcd: Etcd,
    keys: Keys,
    wanted: JobSpec,
    offload: Callable[..., Awaitable[Any]] = asyncio.to_thread,
    *,
    optimizer: OptimizerSpec | None = None,
) -> bool:
    """Give the job what may change of `wanted` (trireme_shared.protocol.records.setting_effects); whether
    anything did. With more epochs training goes on, also if the job was COMPLETED. `optimizer`: the script's,
    if the user has accepted changes. Raises Conflict if a master runs, stop_early has ended the job, or the
    global batch would change within an epoch; OSError; as `start_again`."""
    found, state = await etcd.get(keys.spec), await etcd.get(keys.state)
    if found is None or state is None:
        return False
    stored = must_read(JobSpec, found.key, found.value)
    spec = renewed(stored, wanted)
    if spec == stored:
        return False
    unchanged = [Compare.mod(kv.key, "==", kv.mod_revision) for kv in (found, state)]
    changes: tuple[Change, ...] = ()
    puts = [Put(keys.spec, spec.to_bytes())]
    if spec.pservers != stored.pservers:  # with the other strategy
        puts.append(Put(keys.pservers_desired, str(spec.pservers).encode()))
    latest = await etcd.get(keys.latest)
    before = must_read(CheckpointLatest, latest.key, latest.value) if latest is not None else None
    if spec.accepted > stored.accepted:
        if spec.global_batch_size != stored.global_batch_size and before is not None:
            await offload(_check_epoch_has_ended, stored, spec, before)
        layout = await etcd.get(keys.layout)
        if layout is not None and optimizer is not None:
            unchanged.append(Compare.mod(layout.key, "==", layout.mod_revision))
            known = must_read(Layout, layout.key, layout.value)
            puts.append(Put(keys.layout, known.with_fields(optimizer=optimizer).to_bytes()))
        changes += await _told(etcd, keys, spec, before.step if before is not None else 0)
    if spec.epochs > stored.epochs:
        changes += lifecycle.train_longer(must_read(JobState, state.key, state.value), spec.epochs).changes
        if latest is not None and before is not None:
            unchanged.append(Compare.mod(latest.key, "==", latest.mod_revision))
            puts.append(Put(keys.latest, (await offload(_not_final, spec, before)).to_bytes()))
    await _write(etcd, keys, unchanged, changes, puts)
    log.info("renewed", job=keys.job, epochs=spec.epochs)
    return True


def _check_epoch_has_ended(stored: JobSpec, spec: JobSpec, latest: CheckpointLatest) -> None:
    """Raises Conflict if the job's newest checkpoint is inside an epoch: its lanes have taken minibatches of
    the old size of it, and no reader could go on from there."""
    record = read_manifest(stored.storage, stored.job, latest.kept[0]).record
    at_end = all(position.exhausted for position in record.positions)
    if at_end or not any(position.index or position.offset for position in record.positions):
        return
    raise Conflict(
        f"global_batch_size is {stored.global_batch_size}, and {spec.global_batch_size} is asked for: it can "
        f"change between two epochs, and the newest checkpoint (step {latest.step}) is inside epoch "
        f"{record.positions[0].epoch + 1}",
        hint=f"run it again with {stored.global_batch_size} to its end and then with more epochs, or train a "
        f"new job from its parameters: --init-from {stored.job} --job NAME",
    )


async def _told(etcd: Etcd, keys: Keys, spec: JobSpec, step: int) -> tuple[Change, ...]:
    """The event of the newest change that was accepted, to be written behind those that are kept."""
    change, kept = spec.history[-1], await read_events(etcd, keys.events)
    if not kept.next_id:
        found = await etcd.get(keys.spec)
        kept.begin(found.mod_revision if found is not None else 0)
    event = Event(
        "settings_changed",
        f"from step {step} on with changes that were accepted: {change.text}",
        {"step": step, "number": change.number, "changes": change.text},
    )
    return kept.told([(change.time, event)])


def _not_final(spec: JobSpec, latest: CheckpointLatest) -> CheckpointLatest:
    """The version that was the last one is evaluated as any other of its kind, so its checkpoint is told
    which evaluation it is of."""
    kept = []
    for ref in latest.kept:
        number = 0
        if spec.evaluate_every is not None and not ref.evaluation:
            try:
                record = read_manifest(spec.storage, spec.job, ref).record
            except CheckpointUnusable:  # whoever loads it tells the user
                pass
            else:
                number = evaluation_of(record, spec.evaluate_every, spec.epochs) or 0
        kept.append(ref.with_fields(evaluation=number) if number else ref)
    return latest.with_fields(kept=tuple(kept), final=False)


async def _write(
    etcd: Etcd,
    keys: Keys,
    unchanged: list[Compare],
    changes: tuple[Change, ...],
    puts: list[Put] | None = None,
) -> None:
    """Raises Conflict if a master runs, or somebody else wrote meanwhile."""
    nobody = [Compare.create(lock, "==", 0) for lock in (keys.master_lock, keys.sweep_lock)]
    written = await etcd.txn([*nobody, *unchanged], [*schema.operations(keys, None, changes), *(puts or [])])
    if not written.succeeded:
        raise Conflict(f"job {keys.job} is not started again: a master runs already; end it first")
