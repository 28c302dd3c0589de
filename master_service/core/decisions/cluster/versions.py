"""Versions of what users change in a cluster, and requests that expect one. Decisions only.

GET ─► version ─► the request expects it ─► its decision ─► still that version: carried out │ another one: PreconditionFailed

A version is a digest of what users and the leader have decided, as the leader's transactions keep it in etcd: every leader has the
same one. Progress, reasons and what members say of themselves are no part of it. Each transaction depends on the one before, so what
is compared here is what etcd holds when the request takes effect.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from master_service.core.state.cluster import ClusterDecision, ClusterState, Place
from trireme_shared.protocol.errors import PreconditionFailed
from trireme_shared.protocol.records.cluster import ClusterJob, JobSchedule

A = TypeVar("A")
Decide = Callable[[ClusterState, float], ClusterDecision[A]]

# specs never change: `create_time` and `number` tell two jobs of one name apart
OF_JOB = {
    "job",
    "standing",
    "wanted",
    "epoch",
    "trainers",
    "pservers",
    "preempted_by",
    "scheduling",
    "number",
    "create_time",
}
OF_SCHEDULE = {"name", "cron", "time_zone", "concurrency", "scheduling", "source_digest", "create_time"}


def version_of_job(job: ClusterJob) -> str:
    return _digest(job.model_dump(mode="json", include=OF_JOB, exclude_defaults=True))


def version_of_schedule(schedule: JobSchedule) -> str:
    """Its runs do not change it."""
    return _digest(schedule.model_dump(mode="json", include=OF_SCHEDULE, exclude_defaults=True))


def version_of_place(place: Place, *, drained: bool) -> str:
    return _digest([*place, drained])


@dataclass(frozen=True, slots=True)
class Expected:
    """`versions`: one of them is expected; None: any. Its methods give decisions that raise NotFound, PreconditionFailed, and what the
    given one raises."""

    versions: frozenset[str] | None = None

    def job(self, name: str, decide: Decide[A]) -> Decide[A]:
        return self._checked(f"job {name}", lambda state: version_of_job(state.job(name)), decide)

    def schedule(self, name: str, decide: Decide[A]) -> Decide[A]:
        return self._checked(f"schedule {name}", lambda state: version_of_schedule(state.schedule(name)), decide)

    def place(self, member: str, decide: Decide[A]) -> Decide[A]:
        def version(state: ClusterState) -> str:
            place = state.place(member)
            return version_of_place(place, drained=place in state.drains)

        return self._checked(f"pool member {member}", version, decide)

    def _checked(self, what: str, version: Callable[[ClusterState], str], decide: Decide[A]) -> Decide[A]:
        if self.versions is None:
            return decide

        def checked(state: ClusterState, now: float) -> ClusterDecision[A]:
            self._check(what, version(state))
            return decide(state, now)

        return checked

    def _check(self, what: str, version: str) -> None:
        if self.versions is None or version in self.versions:
            return
        expected = sorted(self.versions)
        msg = (
            f"{what} has version {version}, not {' or '.join(expected) or 'one that If-Match can name'}: it has changed"
        )
        raise PreconditionFailed(msg, hint="read it again, then decide anew", version=version, expected=expected)


ANY = Expected()


def _digest(parts: Any) -> str:
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
