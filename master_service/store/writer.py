"""The master's only writer: decide -> compare-and-set -> answer. No answer is given before etcd has the
changes.

    waiting decisions --taken together--> one txn --landed--> answers, events
                                            |  refused: LockLost; a new term reads everything again
                                            +- no answer: read back; landed, or send the very same txn again

Two compares fence each txn: the lock's create_revision (the term), and the value of `tasks/commit`. Every txn
writes its own name there, so the commits of a master form a chain: each lands right after the one that it was
decided on. An attempt that lands late, after it was given up, is refused; so repeating a txn after the
read-back cannot apply it twice. This allows a second txn while the first is under way (`MAX_UNDER_WAY`), once
it carries as much as the first. Answers come in order.

The leader's own decisions (LeaderWriter) are taken also when too many requests wait, and the irreversible
ones on what etcd has:
decide --reversible--> written
   `-- ends the job, or starts it over --> checkpoints read from etcd --> decided again
                                               --> written only if none became the newest since

The first writes of a term (`write_first`) land once each, right after the last write of the term before.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeVar

from master_service.core.changes import (
    Change,
    Decision,
    Event,
    Fields,
    ForgetParameters,
    NextEpoch,
    RequireLatest,
    RestartQueue,
)
from master_service.core.decisions.lifecycle import with_counts
from master_service.core.state.job import Job
from master_service.store.schema import Batch, check_fits, compares, operations
from trireme_shared.platform.etcd import (
    Compare,
    Delete,
    Etcd,
    Get,
    Lease,
    LeaseLost,
    NoSpace,
    Put,
    TxnResult,
)
from trireme_shared.platform.etcd.errors import UNUSABLE
from trireme_shared.platform.etcd.fenced import FencedWrite
from trireme_shared.platform.etcd.reading import read_record
from trireme_shared.platform.runtime import clock, ids, telemetry
from trireme_shared.platform.runtime.clock import Notices
from trireme_shared.platform.runtime.containment import LongLivedGroup
from trireme_shared.protocol.errors import (
    NotLeader,
    NotReady,
    PeerError,
    TriremeError,
)
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import JobState, Phase
from trireme_shared.protocol.records.checkpoints import CheckpointLatest, OwnCheckpoints

MAX_WAITING = 10_000
ATTEMPT_S = 2.0
PAUSE_S = 0.1
MAX_UNDER_WAY = 2
MAX_EVENTS = 100  # of one transaction: with MOST_BYTES each they fit beside the changes
MAX_TOLD = 1000

A = TypeVar("A")

log = telemetry.logger("writer")


class LockLost(NotLeader):
    """Another process holds the lock, or the lease ran out: this term is over."""


#: Errors by which a term of a leader ends. No other error of one of its tasks ends it.
TERM_OVER = (NotLeader, LeaseLost, *UNUSABLE)


@dataclass(frozen=True, slots=True, eq=False)
class HeldLock:
    """A lock that this process holds. Writes that depend on it compare its create_revision, the `term`."""

    key: str
    term: int
    lease: Lease

    def compare(self) -> Compare:
        return Compare.create(self.key, "==", self.term)


class Writer(Protocol):
    """Decides and writes. `job` may be read at any time."""

    @property
    def job(self) -> Job: ...

    async def decide(self, decision: Callable[[Job, float], Decision[A]]) -> A:
        """The decision's answer, once its changes are in etcd. Raises PeerError, and what the decision
        raises."""
        ...


def is_due(writer: Writer, decision: Callable[[Job, float], Decision[object]]) -> bool:
    """Whether the decision would change or tell something now. Whoever decides again and again, for many jobs
    that stand as they stood, asks this first: a turn of the writer costs many times as much."""
    decided = decision(writer.job, clock.monotonic())
    return bool(decided.changes or decided.events)


@dataclass(slots=True, eq=False)
class _Waiting:
    decide: Callable[[Job, float], Decision[Any]]
    future: asyncio.Future[Any]
    lock: HeldLock | None
    told: tuple[tuple[str, Event], ...] = ()


@dataclass(slots=True)
class Group:
    """Decisions taken together: one transaction. `events`: of the decisions; `told`: these and others, each
    with its time."""

    writes: Sequence[Put | Delete] = ()
    fence: list[Compare] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    told: list[tuple[str, Event]] = field(default_factory=list)
    outcomes: list[tuple[asyncio.Future[Any], Any, Exception | None]] = field(default_factory=list)


class GroupCommit(ABC):
    """Waiting decisions are taken together and committed in one transaction. Run `run()` in a TaskGroup."""

    def __init__(self, keys: Keys, on_events: Callable[[Sequence[Event]], None]) -> None:
        self.commits = 0
        self._keys, self._on_events = keys, on_events
        self._waiting: deque[_Waiting] = deque()
        self._told = 0
        self._taken: list[_Waiting] = []
        self._wake = asyncio.Event()
        self._over: TriremeError | None = None

    @property
    @abstractmethod
    def job(self) -> Job:
        """To read."""

    async def decide(self, decision: Callable[[Job, float], Decision[A]]) -> A:
        """For requests. The decision's answer, once its changes are in etcd.

        Raises what the decision raises; TooLarge if no transaction takes its changes; NotLeader if the term
        ends before (the outcome is then unknown); NotReady if too many wait. The decision may be called again
        after a lost race, so it must not have side effects.
        """
        if self._over is None and len(self._waiting) >= MAX_WAITING:
            msg = f"{MAX_WAITING} requests wait for etcd already; ask again later"
            raise NotReady(msg)
        return await self.decide_as_leader(decision)

    async def decide_as_leader(
        self, decision: Callable[[Job, float], Decision[A]], lock: HeldLock | None = None
    ) -> A:
        """As `decide`, however many requests wait. `lock`: commit only while that lock is held."""
        if self._over is not None:
            raise self._over
        future: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(decision, future, lock))
        self._wake.set()
        return await future

    def tell(self, events: Sequence[Event]) -> None:
        """Write events that no decision of this writer tells, with the next transaction. They are lost with
        the term, or if MAX_TOLD wait for an etcd that does not answer."""
        if self._over is not None or self._told >= MAX_TOLD:
            return
        stamp = clock.timestamp()
        written: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        written.add_done_callback(self._note_told)
        told = tuple((stamp, event) for event in events)
        self._waiting.append(_Waiting(lambda _job, _now: Decision(None), written, None, told))
        self._told += 1
        self._wake.set()

    def _note_told(self, written: asyncio.Future[Any]) -> None:
        self._told -= 1
        if not written.cancelled():
            written.exception()  # it is nobody's: the term is over

    async def run(self) -> None:
        """Commit waiting decisions until the term ends; those that still wait then get NotLeader. Raises
        LockLost."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._waiting:
                    self._taken.clear()
                    await self._turn()
        finally:
            self._over = NotLeader("this process decides no more: its term has ended; ask its successor")
            for entry in (*self._taken, *self._waiting):
                if not entry.future.done():
                    entry.future.set_exception(self._over)
            self._waiting.clear()

    @abstractmethod
    async def _turn(self) -> None:
        """Take the waiting decisions (`_decide_waiting`), commit them together, answer (`_answer`)."""

    def _decide_waiting(self, job: Job) -> Group:
        """In place: waiting decisions that fit into one transaction are taken on `job` and applied to it."""
        now, stamp, group, batch = clock.monotonic(), clock.timestamp(), Group(), Batch()
        sealed, lock = False, self._waiting[0].lock
        while self._waiting and not sealed and self._waiting[0].lock is lock:
            entry = self._waiting[0]
            if entry.future.done():  # the caller has gone
                self._waiting.popleft()
                continue
            decision, writes, error = self._decided(entry, job, now)
            told = [*entry.told, *((stamp, event) for event in decision.events)]
            if not batch.takes(writes) or (group.told and len(group.told) + len(told) > MAX_EVENTS):
                break
            self._taken.append(self._waiting.popleft())
            group.outcomes.append((entry.future, decision.answer, error))
            batch.add(writes)
            group.fence += compares(self._keys, decision.changes)
            group.changes += decision.changes
            group.events += decision.events
            group.told += told
            sealed = any(isinstance(change, NextEpoch | RestartQueue) for change in decision.changes)
            for change in decision.changes:
                job.apply(change, now)
        batch.add(self.tell_all(job, group.told, now))
        group.writes = batch.writes
        return group

    def tell_all(self, job: Job, told: Sequence[tuple[str, Event]], now: float) -> Sequence[Put | Delete]:
        """In place: the job's events of this transaction, and what writes them."""
        changes = job.events.told(told) if told else ()
        for change in changes:
            job.apply(change, now)
        return operations(self._keys, job, changes)

    def _decided(
        self, entry: _Waiting, job: Job, now: float
    ) -> tuple[Decision[Any], Sequence[Put | Delete], Exception | None]:
        """The decision and what it writes. One that fails, or that no transaction takes, changes nothing."""
        try:
            decision = with_counts(job, entry.decide(job, now))
            writes = operations(self._keys, job, decision.changes) if decision.changes else ()
            check_fits(writes)
        except TriremeError as error:
            return Decision(None), (), error
        except Exception as error:  # a bug in one decision must not end the term; its caller gets INTERNAL
            log.exception("decision_failed", job=repr(job))
            return Decision(None), (), error
        return decision, writes, None

    def _answer(self, group: Group) -> None:
        if group.told:
            self._on_events(group.events)
        for future, answer, error in group.outcomes:
            if future.done():
                continue
            if error is None:
                future.set_result(answer)
            else:
                future.set_exception(error)


@dataclass(slots=True, eq=False)
class _Commit:
    """A group whose transaction is under way: `name` is what it writes to `tasks/commit`, `fence` what it
    compares. `followed` by those who read what it decided, and want to know that etcd has it."""

    name: bytes
    fence: Sequence[Compare]
    group: Group
    landed: asyncio.Event = field(default_factory=asyncio.Event)
    followed: list[asyncio.Future[None]] = field(default_factory=list)


class MasterWriter(GroupCommit):
    """The only writer of one term: its job is the truth. `commit_revision` comes from
    leadership/master.py."""

    def __init__(
        self,
        etcd: Etcd,
        keys: Keys,
        job: Job,
        lock: HeldLock,
        *,
        commit_revision: int,
        on_events: Callable[[Sequence[Event]], None],
        on_changes: Callable[[Sequence[Change]], None],
    ) -> None:
        super().__init__(keys, on_events)
        self._on_changes = on_changes
        self._job = job
        self._etcd, self._lock, self._commit_revision = etcd, lock, commit_revision
        self._under_way: deque[_Commit] = deque()
        self._last = b""
        self._no_space: NoSpace | None = None
        self._away = Notices()

    @property
    def job(self) -> Job:
        return self._job

    @property
    def under_way(self) -> int:
        """Transactions that were sent and are not answered yet."""
        return len(self._under_way)

    async def settled(self) -> None:
        """Until etcd has all that `job` shows now. Raises NotLeader if the term ends before, NoSpace while
        etcd takes no writes."""
        if self._over is not None:
            raise self._over
        if self._no_space is not None:
            raise self._no_space
        if self._under_way:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._under_way[-1].followed.append(future)
            await future

    def fence(self, after: bytes) -> list[Compare]:
        """What a write of this master depends on; `after`: the name of its write before, if there was one."""
        commit = self._keys.commit
        chain = (
            Compare.value(commit, "==", after) if after else Compare.mod(commit, "==", self._commit_revision)
        )
        return [self._lock.compare(), chain]

    async def run(self) -> None:
        try:
            async with LongLivedGroup() as self._sending:
                await super().run()
        finally:
            for commit in self._under_way:
                for future in (*(future for future, _, _ in commit.group.outcomes), *commit.followed):
                    if not future.done() and self._over is not None:
                        future.set_exception(self._over)

    async def _turn(self) -> None:
        if self._under_way and not self._is_worth_another():
            self._wake.clear()
            await self._wake.wait()
            return
        group = self._decide_waiting(self._job)
        if not group.writes and not self._under_way:  # etcd has all that it was decided on
            self._check_lease()
            self._conclude(group)
            self._taken.clear()
            return
        self._taken.clear()
        fence = [*self.fence(self._last), *group.fence]
        commit = _Commit(ids.new_id("commit").encode(), fence, group)
        if group.writes:
            self._last = commit.name
        before = self._under_way[-1] if self._under_way else None
        self._under_way.append(commit)
        self._sending.create_task(self._finish(commit, before))

    def _is_worth_another(self) -> bool:
        """A transaction costs the same whatever it carries: the next one waits until it carries as much as
        the last."""
        carried = len(self._under_way[-1].group.outcomes)
        return len(self._under_way) < MAX_UNDER_WAY and len(self._waiting) >= carried

    async def _finish(self, commit: _Commit, before: _Commit | None) -> None:
        """Raises LockLost. A group without writes sends nothing, but what it was decided on must have landed,
        too."""
        if commit.group.writes:
            await self._land(commit, before)
            self.commits += 1
        if before is not None:
            await before.landed.wait()
        if not self._lock.lease.alive:
            raise LockLost("the master's lease ran out before the answer; ask its successor")
        self._under_way.popleft()
        commit.landed.set()
        self._wake.set()
        self._conclude(commit.group)
        for future in commit.followed:
            if not future.done():
                future.set_result(None)

    def _conclude(self, group: Group) -> None:
        self._answer(group)
        self._on_changes(group.changes)

    async def _land(self, commit: _Commit, before: _Commit | None) -> None:
        """Until it has landed, once. Raises LockLost."""
        write = FencedWrite(
            self._etcd,
            commit.fence,
            [*commit.group.writes, Put(self._keys.commit, commit.name)],
            [Get(self._lock.key), Get(self._keys.commit)],
            partial(self._landed_at, commit),
            ATTEMPT_S,
            read_apart=True,
            on_error=self._unanswered,
        )
        while not isinstance(outcome := await write.until_answered(self._check_lease, PAUSE_S), int):
            self._answered()
            holder = outcome.range(0).first
            if holder is None or holder.create_revision != self._lock.term:
                who = holder.value.decode() if holder else "nobody"
                raise LockLost(f"the master lock of term {self._lock.term} is lost; {who} holds it now")
            if before is None:
                raise LockLost(
                    f"what term {self._lock.term} decided on has changed in etcd; the next term decides anew"
                )
            await before.landed.wait()  # this one arrived first, and was refused only for that
            before = None
        self._answered()

    def _unanswered(self, error: PeerError) -> None:
        """An etcd that is out of space is an event: nothing that is decided can be written, whoever leads."""
        if not isinstance(error, NoSpace):
            if self._away.due(clock.monotonic()):
                log.warning("write_unanswered", cause=str(error), under_way=len(self._under_way))
            return
        if self._no_space is None:
            fields: Fields = {"hint": error.hint}
            self._notice(Event("etcd_out_of_space", f"{error.message}; {error.hint}", fields))
        self._no_space = error
        for future in (
            future for commit in self._under_way for future in commit.followed if not future.done()
        ):
            future.set_exception(error)

    def _answered(self) -> None:
        if self._away.over():
            log.info("write_answered")
        if self._no_space is not None:
            self._no_space = None
            self._notice(Event("etcd_has_space_again", "etcd takes writes again"))

    def _notice(self, event: Event) -> None:
        self._on_events([event])
        self.tell([event])

    def _check_lease(self) -> None:
        if not self._lock.lease.alive:
            raise LockLost("the master's lease ran out before a write; ask its successor")

    async def _landed_at(self, commit: _Commit, found: TxnResult) -> int:
        """It has landed if `tasks/commit` has its name, or the name of a later one of this master."""
        marker = found.range(1).first
        later = list(self._under_way)[self._under_way.index(commit) :]
        landed = marker is not None and any(marker.value == each.name for each in later)
        return marker.mod_revision if marker is not None and landed else 0


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
    return Checkpoints(
        latest, {each.pserver: each for each in own if each}, newest.mod_revision if newest else 0
    )


class LeaderWriter:
    """A Writer. With `lock` its decisions are written only while that lock is held."""

    def __init__(self, etcd: Etcd, keys: Keys, writer: GroupCommit, lock: HeldLock | None = None) -> None:
        self._etcd, self._keys, self._writer, self._lock = etcd, keys, writer, lock

    @property
    def job(self) -> Job:
        return self._writer.job

    async def decide(self, decision: Callable[[Job, float], Decision[A]]) -> A:
        """The decision sees the newest checkpoints if it cannot be taken back: the watches may be late.
        Raises PeerError."""
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
            seen = (
                replace(job.members, latest=there.latest, latest_revision=there.revision)
                if newer
                else job.members
            )
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


async def write_first(etcd: Etcd, lock: HeldLock, commit: str, writes: Sequence[Put]) -> int:
    """Write under the lock, exactly once; the revision. `commit`: the key where each write of the lock's
    holders leaves its name. Raises LockLost.

    An attempt without an answer may land long after the term has begun. So each attempt compares `commit` and
    writes it: of several attempts one lands, and none after a later write. The last write of the term before
    may come in between: then the next attempt compares what that one wrote.
    """
    name = ids.new_id("takeover").encode()
    reads = [Get(lock.key), Get(commit)]

    def check() -> None:
        if not lock.lease.alive:
            raise LockLost(f"{lock.key} of term {lock.term} was lost during the takeover")

    async def landed(found: TxnResult) -> int:
        holder, marker = found.range(0).first, found.range(1).first
        if holder is None or holder.create_revision != lock.term:
            raise LockLost(f"{lock.key} of term {lock.term} was lost during the takeover")
        return marker.mod_revision if marker is not None and marker.value == name else 0

    found_at = await _revision_of(etcd, commit, check)
    while True:
        fence = [lock.compare(), Compare.mod(commit, "==", found_at)]
        write = FencedWrite(etcd, fence, [*writes, Put(commit, name)], reads, landed)
        outcome = await write.until_answered(check, PAUSE_S)
        if isinstance(outcome, int):
            return outcome
        marker = outcome.range(1).first
        found_at = marker.mod_revision if marker else 0


async def _revision_of(etcd: Etcd, commit: str, check: Callable[[], None]) -> int:
    """0 if the key does not exist. Repeated until etcd answers; `check` raises when it is too late."""
    while True:
        check()
        try:
            marker = await etcd.get(commit)
        except PeerError as error:
            log.warning("takeover_unanswered", cause=str(error))
            await asyncio.sleep(ids.jitter(PAUSE_S))
        else:
            return marker.mod_revision if marker else 0
