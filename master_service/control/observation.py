"""What an explanation needs beside the job: who renews its lease, whether etcd answers and takes writes, who initialises.

Each question to etcd has a limit of ANSWER_S; an unanswered one is itself an observation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from master_service.control.stall import StallWatch
from master_service.core.explanation.situation import Reported, Situation
from master_service.core.state.job import Job
from trireme_shared.platform.etcd import Etcd, NoSpace
from trireme_shared.platform.runtime import clock
from trireme_shared.protocol.errors import TriremeError
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import UserFailure
from trireme_shared.protocol.records.cluster import Kind
from trireme_shared.protocol.records.record import shortened

ANSWER_S = 1.0
ERROR_CHARACTERS = 500


@dataclass(frozen=True, slots=True)
class Movement:
    """What was trained, as far as this process knows. `moved_at`: when anything was last reported as trained (-inf: never)."""

    moved_at: float
    records_per_s: float
    step: int | None


class Observer:
    """Of one job, for as long as this process leads it (or watches it)."""

    def __init__(self, etcd: Etcd, keys: Keys, stall: StallWatch) -> None:
        self._etcd, self._keys, self._stall = etcd, keys, stall
        self._since = clock.monotonic()

    async def observe(
        self,
        job: Job,
        movement: Movement,
        *,
        unrenewed_s: float = 0.0,
        storage_away: str = "",
        reported: Iterable[tuple[float, str, UserFailure]] = (),
        given: int | None = None,
        why_fewer: Mapping[Kind, str] | None = None,
    ) -> Situation:
        """`unrenewed_s`: since the leader's own lease was renewed. `reported`: (time, task or "", failure). `given`,
        `why_fewer`: as in Situation. Waits at most ANSWER_S for each of etcd's answers, which are asked for at the same time."""
        async with asyncio.TaskGroup() as group:
            silent = group.create_task(self._stall.silent(job))
            space = group.create_task(self._space())
            holder = group.create_task(self._initialiser(job))
        now, since = clock.monotonic(), self._since if job.phase_since is None else job.phase_since
        full = space.result()
        return Situation(
            job,
            now,
            phase_s=now - since,
            still_s=now - max(since, movement.moved_at, _last_sign(job)),
            records_per_s=movement.records_per_s,
            step=movement.step,
            silent=silent.result() if full is not None else {},
            etcd_silent_s=0.0 if full is not None else max(ANSWER_S, unrenewed_s),
            etcd_full=full or "",
            storage_away=storage_away,
            initialiser=holder.result(),
            reported=[Reported(_short(failure), now - at, task_id) for at, task_id, failure in reported],
            given=given,
            why_fewer=why_fewer or {},
        )

    async def _space(self) -> str | None:
        """Why etcd takes no writes, or ""; None if it does not answer."""
        try:
            found = await self._etcd.space(timeout_s=ANSWER_S)
        except TriremeError:
            return None
        if not found.full:
            return ""
        told = NoSpace.told(f"{found.used_bytes / (1 << 20):.0f} MiB are stored")
        return f"{told.message}; {told.hint}"

    async def _initialiser(self, job: Job) -> str:
        if job.members.init_done:
            return ""
        try:
            found = await self._etcd.get(self._keys.init_lock, timeout_s=ANSWER_S)
        except TriremeError:
            return ""
        return found.value.decode(errors="replace") if found else ""


def _last_sign(job: Job) -> float:
    """When a task that is under way last had a finished minibatch."""
    queue = job.due
    signs = [held.last_sign for held in queue.pending.values() if held.minibatches] if queue else []
    return max(signs, default=float("-inf"))


def _short(failure: UserFailure) -> UserFailure:
    return failure.with_fields(message=shortened(failure.message, ERROR_CHARACTERS), traceback="")
