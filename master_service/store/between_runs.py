"""What the user changes of a job before its members are started.

FAILED, not through its script, no lock held
    --start_again--> WAITING: the first master takes the job back to its newest checkpoint
another spec, no lock held --renew--> what may change is written; more epochs: COMPLETED
    --> WAITING, and training goes on
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from master_service.core.changes import Change
from master_service.core.decisions import lifecycle
from master_service.store import schema
from trireme_shared.checkpoints.stored import read_manifest
from trireme_shared.platform.etcd import Compare, Etcd, Put
from trireme_shared.platform.etcd.reading import must_read
from trireme_shared.platform.runtime import telemetry
from trireme_shared.protocol.errors import CheckpointUnusable, Conflict
from trireme_shared.protocol.evaluations import evaluation_of
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import JobSpec, JobState
from trireme_shared.protocol.records.checkpoints import CheckpointLatest
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
    etcd: Etcd, keys: Keys, wanted: JobSpec, offload: Callable[..., Awaitable[Any]] = asyncio.to_thread
) -> bool:
    """Give the job what may change of `wanted` (trireme_shared.protocol.records.setting_effects); whether
    anything did. With more epochs training goes on, also if the job was COMPLETED. Raises Conflict if a
    master runs or stop_early has ended the job; OSError; as `start_again`."""
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
    if spec.epochs > stored.epochs:
        changes = lifecycle.train_longer(must_read(JobState, state.key, state.value), spec.epochs).changes
        latest = await etcd.get(keys.latest)
        if latest is not None:
            unchanged.append(Compare.mod(latest.key, "==", latest.mod_revision))
            before = must_read(CheckpointLatest, latest.key, latest.value)
            puts.append(Put(keys.latest, (await offload(_not_final, spec, before)).to_bytes()))
    await _write(etcd, keys, unchanged, changes, puts)
    log.info("renewed", job=keys.job, epochs=spec.epochs)
    return True


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
