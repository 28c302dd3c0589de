"""What a request may bring beside its values: an Idempotency-Key (Once), and the version that it expects
(Expected). Decisions only."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from master_service.core.changes import Decision, DropAnswer
from master_service.core.state.cluster import ClusterDecision, ClusterState, Place
from master_service.core.state.job import Job
from master_service.core.state.kept import KeptAnswers
from trireme_shared.protocol.errors import IdempotencyKeyReused, PreconditionFailed, TriremeError
from trireme_shared.protocol.records.cluster import ClusterJob, JobSchedule
from trireme_shared.protocol.records.operations import KeptAnswer
from trireme_shared.protocol.records.record import Record
from trireme_shared.protocol.times import rfc3339

A = TypeVar("A")
C = TypeVar("C")
KeptChange = KeptAnswer | DropAnswer


class Answers(Protocol):
    """What a job and a cluster have in common here."""

    @property
    def answers(self) -> KeptAnswers: ...


S = TypeVar("S", bound=Answers)


class AnsweredBefore(TriremeError):
    """No failure: the request was carried out before, and `kept` holds its answer."""

    code = "ANSWERED_BEFORE"
    kept: KeptAnswer

    @classmethod
    def with_answer(cls, kept: KeptAnswer) -> AnsweredBefore:
        error = cls(f"{kept.operation} was carried out before with this Idempotency-Key")
        error.kept = kept
        return error


@dataclass(frozen=True, slots=True)
class Keyed:
    """A request. `key`: a digest of its token, its operation and its Idempotency-Key. `asked`: one of what it
    asks for. `operation`: its operationId. `wall_time`: when it came, seconds since 1970. `older_key`: under
    which the version before kept its answer, whoever had asked; "": it is not looked for."""

    key: str
    asked: str
    operation: str
    wall_time: float
    older_key: str = ""


@dataclass(frozen=True, slots=True)
class Once(Generic[A]):
    """A request with an Idempotency-Key takes effect once and has one answer, also at the next master.

    new key ───► decision ──► its changes and its answer, in one transaction
    same key ──► same request: AnsweredBefore, nothing changes │ another request: IdempotencyKeyReused

    A request that was refused changes nothing, and nothing is kept of it: sent again it is decided anew.
    `view`: the body of the answer, from what the decision answers; it is called before the changes are made.
    """

    request: Keyed
    view: Callable[[A], Record]

    def decide(
        self, decision: Callable[[S, float], Decision[A, C]]
    ) -> Callable[[S, float], Decision[A, C | KeptChange]]:
        """Raises AnsweredBefore, IdempotencyKeyReused, and what the decision raises."""

        def decided(state: S, now: float) -> Decision[A, C | KeptChange]:
            self._known(state.answers)
            first = decision(state, now)
            body = self.view(first.answer).model_dump_json()
            kept: tuple[KeptChange, ...] = (self._kept(body), *state.answers.surplus(self.request.wall_time))
            return Decision(first.answer, (*first.changes, *kept), first.events)

        return decided

    def check(self, state: Answers, _: float) -> Decision[None, KeptChange]:
        """Before anything that precedes the decision. Raises AnsweredBefore, IdempotencyKeyReused."""
        self._known(state.answers)
        return Decision(None)

    def begin(self, job: Job, check: Callable[[], object]) -> Decision[bool]:
        """For an effect that no transaction of the writer can hold: it follows, and then `end`. Answers
        whether it was begun before, by a request whose end is not known. `check` refuses a new request.
        Raises AnsweredBefore, IdempotencyKeyReused."""
        if self._known(job.answers) is not None:
            return Decision(True)
        check()
        return Decision(False, (self._kept(""), *job.answers.surplus(self.request.wall_time)))

    def end(self, job: Job, answer: A) -> Decision[A]:
        """Raises AnsweredBefore if another request with this key has ended meanwhile."""
        self._known(job.answers)
        return Decision(answer, (self._kept(self.view(answer).model_dump_json()),))

    def _known(self, answers: KeptAnswers) -> KeptAnswer | None:
        """One without an answer yet. Raises AnsweredBefore, IdempotencyKeyReused."""
        asked = self.request
        found = answers.find(asked.key, asked.wall_time) or self._kept_by_older(answers)
        if found is None:
            return None
        if found.asked != asked.asked:
            msg = f"this Idempotency-Key asked for {found.operation} with other values before"
            raise IdempotencyKeyReused(msg, hint="use a new key for a new request")
        if found.answer:
            raise AnsweredBefore.with_answer(found)
        return found

    def _kept_by_older(self, answers: KeptAnswers) -> KeptAnswer | None:
        """The version before had carried it out. Another request says nothing here."""
        asked = self.request
        found = answers.find(asked.older_key, asked.wall_time) if asked.older_key else None
        same = found is not None and (found.operation, found.asked) == (asked.operation, asked.asked)
        return found if same else None

    def _kept(self, answer: str) -> KeptAnswer:
        asked = self.request
        stamp = rfc3339(asked.wall_time)
        return KeptAnswer(
            key=asked.key, asked=asked.asked, operation=asked.operation, answer=answer, create_time=stamp
        )


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
    """Versions of what users change in a cluster.

    GET ─► version ─► the request expects it ─► its decision ─► still that version: carried out
                                                             ─► another one: PreconditionFailed

    A version is a digest of what users and the leader have decided, as the leader's transactions keep it in
    etcd: every leader has the same one. Progress, reasons and what members say of themselves are no part of
    it. Each transaction depends on the one before, so what is compared here is what etcd holds when the
    request takes effect.

    `versions`: one of them is expected; None: any. Its methods give decisions that raise NotFound,
    PreconditionFailed, and what the given one raises.
    """

    versions: frozenset[str] | None = None

    def job(self, name: str, decide: Decide[A]) -> Decide[A]:
        return self._checked(f"job {name}", lambda state: version_of_job(state.job(name)), decide)

    def schedule(self, name: str, decide: Decide[A]) -> Decide[A]:
        return self._checked(
            f"schedule {name}", lambda state: version_of_schedule(state.schedule(name)), decide
        )

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
            f"{what} has version {version}, not "
            f"{' or '.join(expected) or 'one that If-Match can name'}: it has changed"
        )
        raise PreconditionFailed(
            msg, hint="read it again, then decide anew", version=version, expected=expected
        )


ANY = Expected()


def _digest(parts: Any) -> str:
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
