"""What an explanation needs beside the job: who renews its lease, whether etcd answers and takes writes, who
initialises; and for whom a job waits that makes no progress.

Each question to etcd has a limit of ANSWER_S; an unanswered one is itself an observation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

from master_service.core.explanation.situation import Reported, Situation
from master_service.core.state.job import Job
from trireme_shared.platform.etcd import Etcd, NoSpace
from trireme_shared.platform.runtime import clock
from trireme_shared.protocol.errors import TriremeError
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import PserverMember, TrainerMember, UserFailure
from trireme_shared.protocol.records.cluster import Kind
from trireme_shared.protocol.records.record import shortened

STALL_S = 3.0
LOOK_S = 1.0  # who asks more often gets the last answer
ASKED = 100  # members whose leases are looked at


class StallWatch:
    """Members that have not renewed their leases for a while, or are gone, while the job makes no progress.
    It looks only when it is asked.

    progress ─► nothing to tell
    none for STALL_S ─► etcd is asked how old each member's last renewal is
        ─► "waiting for pserver-0, silent for 14 s"

    `text`: empty while the job makes progress, and while nobody is silent: a step may take long.
    """

    def __init__(self, etcd: Etcd) -> None:
        self.text = ""
        self._etcd = etcd
        self._looking = asyncio.Lock()
        self._looked = self._moved = float("-inf")
        self._records = -1
        self._heard: dict[str, float] = {}  # when each member last renewed its lease, as far as known

    async def look(self, job: Job, records: int) -> str:
        """`records`: trained so far; another number is progress. Returns `text`."""
        async with self._looking:
            now = clock.monotonic()
            if now - self._looked >= LOOK_S:
                await self._look(job, records, now)
                self._looked = now
        return self.text

    async def _look(self, job: Job, records: int, now: float) -> None:
        if self._looked > float("-inf") and records != self._records:
            self._moved = now
        self._records = records
        present = _present(job)
        if now - self._moved < STALL_S or job.state.phase.final:
            gone = {name: at for name, at in self._heard.items() if name.startswith("pserver-")}
            self._heard = gone | dict.fromkeys(present, now)
            self.text = ""
            return
        await self._ask_all(job, now)
        self.text = waiting_for(job, self._heard, now)

    async def silent(self, job: Job) -> dict[str, float]:
        """Members that have not renewed their leases for a while, asked now, whether or not the job makes
        progress -> seconds."""
        async with self._looking:
            now = clock.monotonic()
            await self._ask_all(job, now)
            return late_members(job, self._heard, now)

    async def _ask_all(self, job: Job, now: float) -> None:
        async with asyncio.TaskGroup() as group:
            for name, member in islice(_present(job).items(), ASKED):
                group.create_task(self._ask(name, member, job.spec.lease_ttl_s, now))

    async def _ask(self, name: str, member: PserverMember | TrainerMember, ttl_s: float, now: float) -> None:
        with suppress(TriremeError):  # etcd is away: nothing new is known
            left_s = await self._etcd.time_to_live(member.lease, timeout_s=ANSWER_S)
            if left_s >= 0:
                self._heard[name] = now - max(0.0, ttl_s - left_s)


def late_members(job: Job, heard: dict[str, float], now: float) -> dict[str, float]:
    """`heard`: when each member last renewed its lease, also of parameter servers that are gone."""
    wanted = {*_present(job), *(f"pserver-{index}" for index in range(job.spec.pservers))}
    least_s = max(STALL_S, job.spec.lease_ttl_s * 2 / 3)
    return {name: now - at for name, at in heard.items() if name in wanted and now - at > least_s}


def waiting_for(job: Job, heard: dict[str, float], now: float) -> str:
    """A sentence about `late_members`, or ""."""
    silent = late_members(job, heard, now)
    late = sorted(silent, key=lambda name: -silent[name])
    if not late:
        return ""
    more = f" (and {len(late) - 1} more)" if len(late) > 1 else ""
    return f"waiting for {late[0]}, silent for {silent[late[0]]:.0f} s{more}"


def _present(job: Job) -> dict[str, PserverMember | TrainerMember]:
    pservers = {f"pserver-{index}": member for index, member in job.members.pservers.items()}
    return {**pservers, **job.members.trainers}


ANSWER_S = 1.0
ERROR_CHARACTERS = 500


@dataclass(frozen=True, slots=True)
class Movement:
    """What was trained, as far as this process knows. `moved_at`: when anything was last reported as trained
    (-inf: never)."""

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
        """`unrenewed_s`: since the leader's own lease was renewed. `reported`: (time, task or "", failure).
        `given`, `why_fewer`: as in Situation. Waits at most ANSWER_S for each of etcd's answers, which are
        asked for at the same time."""
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
