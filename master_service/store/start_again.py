"""A job that failed, but not through its script, is opened again before its members are started.

FAILED, no lock held --start_again--> WAITING: the first master takes the job back to its newest checkpoint
"""

from __future__ import annotations

from master_service.core.decisions import lifecycle
from master_service.store import schema
from shared.errors import Conflict
from shared.etcd import Compare, Etcd
from shared.etcd.reading import must_read
from shared.keys import Keys
from shared.records import JobState
from shared.runtime import telemetry

log = telemetry.logger("start_again")


async def start_again(etcd: Etcd, keys: Keys) -> bool:
    """Whether the job was opened again; False if there is nothing to do. Call it only on the user's request: masters that
    follow each other leave a failed job as it is. Raises Conflict if a master runs, PeerError, StateUnreadable."""
    found = await etcd.get(keys.state)
    if found is None:
        return False
    decision = lifecycle.start_again(must_read(JobState, found.key, found.value))
    if not decision.answer:
        return False
    nobody = [Compare.create(lock, "==", 0) for lock in (keys.master_lock, keys.sweep_lock)]
    unchanged = Compare.mod(keys.state, "==", found.mod_revision)
    written = await etcd.txn([*nobody, unchanged], schema.operations(keys, None, decision.changes))
    if not written.succeeded:
        raise Conflict(f"job {keys.job} is not started again: a master runs already; end it first")
    log.info("started_again", job=keys.job)
    return True
