"""The leader's own decisions: they are taken also when too many requests wait, and the irreversible ones on what etcd has.

decide --reversible--> written
   `-- ends the job, or starts it over --> checkpoints read from etcd --> decided again; written only if none became the newest since
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from master_service.core.changes import Decision, ForgetParameters, RequireLatest
from master_service.core.state.job import Job
from master_service.store.writer import A, GroupCommit, HeldLock
from trireme_shared.platform.etcd import Etcd, Get
from trireme_shared.platform.etcd.reading import read_record
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import JobState, Phase
from trireme_shared.protocol.records.checkpoints import CheckpointLatest, OwnCheckpoints


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """As etcd has them; `revision`: of `checkpoints/latest`, 0 if it does not exist."""

    latest: CheckpointLatest | None
    own: dict[int, OwnCheckpoints]
    revision: int


async def read_checkpoints(etcd: Etcd, keys: Keys) -> Checkpoints:
    """Raises PeerError."""
    found = await etcd.txn([], [Get(keys.latest), Get(keys.own_prefix, prefix=True)])
    newest = found.range(0).first
    latest = read_record(CheckpointLatest, newest.key, newest.value) if newest else None
    own = [read_record(OwnCheckpoints, kv.key, kv.value) for kv in found.range(1).kvs]
    return Checkpoints(latest, {each.pserver: each for each in own if each}, newest.mod_revision if newest else 0)


class LeaderWriter:
    """A Writer. With `lock` its decisions are written only while that lock is held."""

    def __init__(self, etcd: Etcd, keys: Keys, writer: GroupCommit, lock: HeldLock | None = None) -> None:
        self._etcd, self._keys, self._writer, self._lock = etcd, keys, writer, lock

    @property
    def job(self) -> Job:
        return self._writer.job

    async def decide(self, decision: Callable[[Job, float], Decision[A]]) -> A:
        """The decision sees the newest checkpoints if it cannot be taken back: the watches may be late. Raises PeerError."""
        unsure = False

        def tentative(job: Job, now: float) -> Decision[A | None]:
            nonlocal unsure
            decided = decision(job, now)
            unsure = is_irreversible(decided)
            return Decision(None) if unsure else decided

        answer = await self._writer.decide_as_leader(tentative, self._lock)
        if not unsure:
            return answer  # type: ignore[return-value]
        there = await read_checkpoints(self._etcd, self._keys)

        def sure(job: Job, now: float) -> Decision[A]:
            newer = there.revision >= job.members.latest_revision
            seen = replace(job.members, latest=there.latest, latest_revision=there.revision) if newer else job.members
            members = replace(seen, own={**seen.own, **there.own})
            decided = decision(replace(job, members=members), now)
            if is_irreversible(decided):
                return decided + Decision(None, (RequireLatest(members.latest_revision),))
            return decided

        return await self._writer.decide_as_leader(sure, self._lock)


def is_irreversible(decision: Decision[object]) -> bool:
    """Whether it ends the job, or starts it over: no checkpoint is used after it."""
    return any(
        isinstance(change, ForgetParameters) or (isinstance(change, JobState) and _gives_up(change))
        for change in decision.changes
    )


def _gives_up(state: JobState) -> bool:
    """FAILED, or all pservers drop their parameters and load nothing."""
    return state.phase is Phase.FAILED or (state.phase is Phase.ROLLING_BACK and not state.checkpoint)
