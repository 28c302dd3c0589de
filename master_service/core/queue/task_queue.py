"""The tasks of one kind in one epoch. Each is in exactly one state. What is stored is O(tasks in flight),
never O(dataset).

    TODO --dispatch--> PENDING --finish--> DONE (no record: before a cursor and in no other state)
      ^                 |   |
      +---- REQUEUED <--+   +--> DISCARDED (failures spent)

fail, expire: failures + 1;  lost trainer: not

Attempt numbers fence reports: only the trainer of a pending attempt may report. A late task has two: the
first end counts. When no task is left the epoch advances, however the last task ended. Decisions change
nothing; `apply` is the only mutation. Streams: one that all trainers share, or one per lane (`by_lane`),
where the trainer says which task it needs.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from master_service.core.changes import (
    Change,
    DropDiscarded,
    DropPending,
    DropRequeued,
    NextEpoch,
    PutCursor,
    PutDiscarded,
    PutPending,
    PutRequeued,
    RestartQueue,
)
from master_service.core.queue.open_tasks import (
    Deadlines,
    LateTasks,
    OpenOfStreams,
    Pending,
    Repeats,
    RequeuedTasks,
    requeued_task,
)
from master_service.core.queue.streams import Streams
from trireme_shared.protocol.errors import Conflict, StaleAttempt
from trireme_shared.protocol.records import (
    AcquireTask,
    Attempt,
    DiscardedTask,
    PendingTask,
    Task,
    TaskAnswer,
    TaskKind,
)

WAIT_S = 0.2
MOST_OTHERS = 1


@dataclass(frozen=True, slots=True)
class Closing:
    """What the end of an attempt changes. `last`: no task of the epoch is left after it."""

    changes: tuple[Change, ...]
    last: bool = False
    discarded: DiscardedTask | None = None


@dataclass
class TaskQueue:
    """`epoch` == `epochs` when a training queue is over."""

    streams: Streams
    deadlines: Deadlines
    by_lane: bool = False
    epochs: int = 1
    max_failures: int = 3
    epoch: int = 0
    cursors: dict[str, int] = field(default_factory=dict)
    pending: dict[str, Pending] = field(default_factory=dict)
    requeued: RequeuedTasks = field(default_factory=RequeuedTasks)
    discarded: dict[tuple[int, str], PutDiscarded] = field(default_factory=dict)
    repeats: Repeats = field(default_factory=Repeats)
    open_of: OpenOfStreams = field(default_factory=OpenOfStreams)  # of lanes only
    late: LateTasks = field(default_factory=LateTasks)
    dispatched: int = 0

    @property
    def kind(self) -> TaskKind:
        return self.streams.kind

    @property
    def total(self) -> int:
        return self.streams.total

    def state_of(self, task_id: str) -> str:
        """ "PENDING", "REQUEUED", "DISCARDED", "DONE" or "TODO"."""
        stream, index = self.streams.place(self.current, task_id)
        if task_id in self.pending:
            return "PENDING"
        if task_id in self.requeued:
            return "REQUEUED"
        if (self.current, task_id) in self.discarded:
            return "DISCARDED"
        done = self.epoch >= self.epochs or index < self.cursors.get(self.streams.name(stream), 0)
        return "DONE" if done else "TODO"

    # ---------------------------------------------------------------- progress

    @property
    def current(self) -> int:
        """The current epoch; the last one when the queue is over."""
        return min(self.epoch, self.epochs - 1)

    @property
    def closed(self) -> bool:
        """No task of this epoch is left to do, pending or requeued."""
        return self.dispatched == self.total and not self.pending and not self.requeued

    @property
    def finished(self) -> bool:
        return self.epoch >= self.epochs or (self.epoch == self.epochs - 1 and self.closed)

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """(todo, pending, done, discarded) of the current (or last) epoch."""
        if self.epoch >= self.epochs:
            lost = sum(epoch == self.epochs - 1 for epoch, _ in self.discarded)
            return 0, 0, self.total - lost, lost
        gone = [put.task for (epoch, _), put in self.discarded.items() if epoch == self.epoch]
        ahead = sum(task.index >= self.cursors.get(task.stream, 0) for task in gone)  # after a rollback
        todo = self.total - self.dispatched + len(self.requeued) - ahead
        return todo, len(self.pending), self.total - todo - len(self.pending) - len(gone), len(gone)

    # ---------------------------------------------------------------- dispatch

    def dispatch(self, ask: AcquireTask) -> tuple[TaskAnswer, tuple[Change, ...]]:
        """The next task of the shared stream: requeued ones first, then the one at the cursor, then one that
        is late at another trainer."""
        if again := self._asked_before(ask):
            return again, ()
        if self.finished:
            return TaskAnswer(answer="end", reason=f"all {self.epochs} epochs of {self.kind} are done"), ()
        if self.requeued:
            task_id, back = self.requeued.first()
            given, put = self._give(ask, task_id, 0, back.index, back.attempts, back.failures)
            return given, (DropRequeued(task_id), put)
        name = self.streams.name(0)
        index = self.cursors.get(name, 0)
        if index == self.total:
            if late := self.late.first_for(self.pending, ask.trainer):
                held = self.pending[late].record
                others = held.attempts[:MOST_OTHERS]
                given, put = self._give(ask, late, 0, held.index, held.attempt, held.failures, others)
                return given, (put,)
            reason = f"the last {len(self.pending)} tasks of epoch {self.epoch} are under way"
            return TaskAnswer(answer="wait", reason=reason, retry_after_s=WAIT_S), ()
        given, put = self._give(ask, self.streams.at(self.epoch, 0, index), 0, index, 0, 0)
        return given, (PutCursor(name, index + 1), put)

    def dispatch_lane(self, ask: AcquireTask, lane: int) -> tuple[TaskAnswer, tuple[Change, ...]]:
        """Task `ask.index` of the lane. The request proves that the lane's earlier tasks are committed.

        `ask.epoch` is not beyond the queue's epoch: the caller closes epochs first (`close_before`). A task
        that is done already is answered without a change: a trainer that joined one version behind computes
        it once more, and the parameter servers recognise its pushes as duplicates.
        """
        length, name = self.streams.length(lane), self.streams.name(lane)
        if ask.epoch >= self.epochs:
            return TaskAnswer(answer="end", reason=f"all {self.epochs} epochs are done"), ()
        if again := self._asked_before(ask):
            return again, ()
        committed = self._committed(lane, ask.index) if ask.epoch == self.epoch else ()
        cursor = length if ask.epoch < self.epoch else self.cursors.get(name, 0)
        if ask.index >= length:
            return TaskAnswer(answer="exhausted", stream_length=length), self._and_close(committed)
        task_id = self.streams.at(ask.epoch, lane, ask.index)
        if (ask.epoch, task_id) in self.discarded:
            skip = TaskAnswer(answer="skip", reason=f"task {task_id} is discarded", stream_length=length)
            passed = (
                (PutCursor(name, ask.index + 1),) if (ask.epoch, ask.index) == (self.epoch, cursor) else ()
            )
            return skip, self._and_close(committed, passed)
        if ask.epoch == self.epoch and task_id in self.pending:
            held = self.pending[task_id].record
            given, put = self._give(ask, task_id, lane, ask.index, held.attempt, held.failures)
            return given, (*committed, put)
        if ask.epoch == self.epoch and task_id in self.requeued:
            back = self.requeued[task_id]
            given, put = self._give(ask, task_id, lane, ask.index, back.attempts, back.failures)
            return given, (*committed, DropRequeued(task_id), put)
        if ask.index < cursor:
            return self._given(task_id, ask.epoch, lane, ask.index, 1), committed
        if ask.index > cursor:
            msg = (
                f"lane {lane} asks for task {ask.index} of epoch {ask.epoch}, but only {cursor} were "
                "ever given; ask in order"
            )
            raise Conflict(msg)
        given, put = self._give(ask, task_id, lane, ask.index, 0, 0)
        return given, (*committed, PutCursor(name, cursor + 1), put)

    def behind(self, task: Task) -> Task | None:
        """The task of its lane behind `task`, in this epoch or the next one, as `dispatch_lane` will give it
        unless something happens to it (attempt 0: nobody has it). None: there is none."""
        epoch, index = task.epoch, task.index + 1
        if index >= self.streams.length(task.stream):
            epoch, index = epoch + 1, 0
        if epoch >= self.epochs:
            return None
        task_id = self.streams.at(epoch, task.stream, index)
        if (epoch, task_id) in self.discarded:
            return None
        return self.streams.task(task_id, 0, epoch, task.stream, index)

    def close_before(self, ask: AcquireTask) -> tuple[Change, ...]:
        """Asking for the next epoch proves that all lanes have committed this one: it closes, even with tasks
        pending."""
        if ask.epoch > self.epoch + 1:
            msg = f"epoch {ask.epoch} is asked for, but epoch {self.epoch} is under way; ask in order"
            raise Conflict(msg)
        return (NextEpoch(ask.epoch),) if ask.epoch == self.epoch + 1 and self.epoch < self.epochs else ()

    # ---------------------------------------------------------------- ends of attempts

    def finish(self, task_id: str, attempt: int, trainer: str, epoch: int | None = None) -> Closing:
        """Raises StaleAttempt. A repeated report changes nothing; nor does one about a lane's task that is
        committed already."""
        committed = self.by_lane and task_id not in self.pending and self.state_of(task_id) == "DONE"
        if committed or self._reported(task_id, attempt, trainer, epoch):
            return Closing(())
        self.check_attempt(task_id, attempt, trainer, epoch)
        by = next((each for each in self.pending[task_id].record.others if each.attempt == attempt), None)
        return self._closing(task_id, (DropPending(task_id, reported=True, by=by),))

    def fail(self, task_id: str, attempt: int, trainer: str, cause: str, epoch: int | None = None) -> Closing:
        """The trainer reported an error. Raises StaleAttempt, also for a lane's task that is done: else its
        trainer tries for ever."""
        done = self.by_lane and epoch in (None, self.epoch) and self.state_of(task_id) == "DONE"
        if not done and self._reported(task_id, attempt, trainer, epoch):
            return Closing(())
        self.check_attempt(task_id, attempt, trainer, epoch)
        held = self.pending[task_id].record
        ended = held.find(attempt, trainer)
        if ended not in held.others or held.failures + 1 >= self.max_failures:
            return self.give_up(task_id, cause, reported=True)
        left = tuple(each for each in held.others if each != ended)
        rest = held.with_fields(failures=held.failures + 1, others=left)
        return Closing((PutPending(task_id, rest, ended),))

    def give_up(self, task_id: str, cause: str, *, reported: bool = False, spent: bool = False) -> Closing:
        """One more failure: the task is requeued, or discarded for this epoch when its failures are spent
        (`spent`: in any case)."""
        held = self.pending[task_id].record
        failures = held.failures + (not spent)
        if failures < self.max_failures and not spent:
            return Closing(
                (DropPending(task_id, reported), PutRequeued(task_id, requeued_task(held, failures, cause)))
            )
        lost = DiscardedTask(
            attempts=held.attempt,
            failures=failures,
            cause=cause,
            epoch=self.epoch,
            stream=held.stream,
            index=held.index,
        )
        put = PutDiscarded(task_id, lost, self.streams.records_of(task_id))
        closing = self._closing(task_id, (DropPending(task_id, reported), put))
        return Closing(closing.changes, closing.last, lost)

    def put_back(self, task_id: str, cause: str, lost: Collection[str] | None = None) -> tuple[Change, ...]:
        """The trainer is gone or has handed the task back: this is no failure of the task. `lost`: only
        attempts of these trainers end."""
        held = self.pending[task_id].record
        if lost is not None and (rest := held.without(lost)) is not None:
            return (PutPending(task_id, rest),)
        return DropPending(task_id), PutRequeued(task_id, requeued_task(held, held.failures, cause))

    def overdue(self, now: float) -> list[str]:
        """Pending tasks past their deadline; the one that is silent longest comes first."""
        late = [
            (held.last_sign, each) for each, held in self.pending.items() if self.deadlines.is_over(held, now)
        ]
        return [task_id for _, task_id in sorted(late)]

    def held_by(self, trainer: str) -> list[str]:
        return [task_id for task_id, held in self.pending.items() if held.record.is_at(trainer)]

    def check_attempt(self, task_id: str, attempt: int, trainer: str, epoch: int | None = None) -> None:
        """The fence of every report. Raises StaleAttempt unless this attempt is pending."""
        if (held := self.pending.get(task_id)) is None:
            msg = (
                f"task {task_id} attempt {attempt} of {trainer} is stale: the task is "
                f"{self.state_of(task_id)}; fetch a new task"
            )
            raise StaleAttempt(msg)
        record = held.record
        if record.find(attempt, trainer) is None or (epoch is not None and epoch != record.epoch):
            msg = (
                f"task {task_id} attempt {attempt} of {trainer} is stale: attempt {record.attempt} of epoch "
                f"{record.epoch} is pending at {record.trainer}; fetch a new task"
            )
            raise StaleAttempt(msg)

    # ---------------------------------------------------------------- apply

    def sign_of_life(
        self, task_id: str, minibatches: int, now: float, work: int = 0, waits_for: str = ""
    ) -> bool:
        """In place. Whether more is done than before; a trainer whose model hangs answers the same again. If
        that of a lane waits, no lane is late."""
        held = self.pending[task_id]
        held.waits_for = waits_for
        if minibatches > held.minibatches:
            self.deadlines.heard(held, now, by_lane=self.by_lane)
        if more := held.does_more(minibatches, work):
            held.last_sign, held.deadline = now, now + self.deadlines.allowed_s(held.record.trainer)
        elif self.by_lane and waits_for:
            self.grant_again(now)
        return more

    def grant_again(self, now: float) -> None:
        """In place. Every pending task gets a new full deadline: under a new master, or after a long wait
        that was not its fault."""
        for held in self.pending.values():
            held.deadline = now + self.deadlines.allowed_s(held.record.trainer)

    def extend(self, seconds: float) -> None:
        """In place. So much more time: training stood still. With a new full deadline in each pause a hung
        task might never run over its time."""
        for held in self.pending.values():
            held.deadline += seconds

    def apply(self, change: Change, now: float) -> None:
        """In place. Takes only changes of this queue."""
        match change:
            case PutCursor(stream, position):
                self.dispatched += position - self.cursors.get(stream, 0)
                self.cursors[stream] = position
            case PutPending(task_id, record, ended):
                if before := self.pending.get(task_id):
                    self.repeats.drop_ask(before.record)
                if ended is not None:
                    self.repeats.remember(task_id, record, ended)
                self.pending[task_id] = Pending(
                    record, now + self.deadlines.allowed_s(record.trainer), now, now
                )
                self.repeats.add_ask(task_id, record)
                self._note(record.stream, task_id)
            case DropPending(task_id, reported, by):
                held = self.pending.pop(task_id)
                self.repeats.drop_ask(held.record)
                self._note(held.record.stream, task_id)
                if reported:
                    self.repeats.remember(task_id, held.record, by)
            case PutRequeued(task_id, back):
                self.requeued[task_id] = back
                self._note(back.stream, task_id)
            case DropRequeued(task_id):
                back = self.requeued.pop(task_id)
                self._note(back.stream, task_id)
            case PutDiscarded(task_id, lost, _):
                self.discarded[lost.epoch, task_id] = change
            case DropDiscarded(task_id, epoch):
                del self.discarded[epoch, task_id]
            case NextEpoch(epoch):
                if epoch <= self.epoch:
                    self.repeats.reports.clear()  # back to a checkpoint: attempts are counted from 1 again
                for task_id, held in self.pending.items():
                    self.repeats.remember(task_id, held.record)
                self.repeats.asks.clear()
                self.epoch, self.dispatched = epoch, 0
                self.cursors, self.pending, self.requeued, self.open_of = (
                    {},
                    {},
                    RequeuedTasks(),
                    OpenOfStreams(),
                )
            case RestartQueue():
                self.repeats, self.dispatched = Repeats(requests=self.repeats.requests), 0
                self.cursors, self.pending, self.requeued, self.discarded = {}, {}, RequeuedTasks(), {}
                self.open_of = OpenOfStreams()
            case _:
                msg = f"{change!r} is no change of a task queue"
                raise TypeError(msg)

    def __repr__(self) -> str:
        todo, pending, done, discarded = self.counts
        return (
            f"<TaskQueue {self.kind} epoch {self.epoch}: {todo} todo, {pending} pending, {done} done, "
            f"{discarded} discarded>"
        )

    # ---------------------------------------------------------------- parts

    def _asked_before(self, ask: AcquireTask) -> TaskAnswer | None:
        """The same request gets the same task: the answer may have been lost."""
        if task_id := self.repeats.asks.get((ask.trainer, ask.request)):
            record = self.pending[task_id].record
            stream = int(record.stream) if record.stream.isdigit() else 0
            mine = next(
                each for each in record.attempts if (each.trainer, each.request) == (ask.trainer, ask.request)
            )
            return self._given(task_id, record.epoch, stream, record.index, mine.attempt)
        if ask.request and ask.request in self.repeats.requests:
            msg = (
                f"request {ask.request} of {ask.trainer} was answered and its task reported; use a new "
                "request id"
            )
            raise Conflict(msg)
        return None

    def _given(self, task_id: str, epoch: int, stream: int, index: int, attempt: int) -> TaskAnswer:
        task = self.streams.task(task_id, attempt, epoch, stream, index)
        return TaskAnswer(answer="task", task=task, stream_length=task.stream_length)

    def _give(
        self,
        ask: AcquireTask,
        task_id: str,
        stream: int,
        index: int,
        attempts: int,
        failures: int,
        others: tuple[Attempt, ...] = (),
    ) -> tuple[TaskAnswer, PutPending]:
        record = PendingTask(
            attempt=attempts + 1,
            trainer=ask.trainer,
            stream=self.streams.name(stream),
            epoch=self.epoch,
            index=index,
            remaining_s=round(self.deadlines.allowed_s(ask.trainer), 3),
            failures=failures,
            request=ask.request,
            others=others,
        )
        return self._given(task_id, self.epoch, stream, index, attempts + 1), PutPending(task_id, record)

    def _committed(self, lane: int, index: int) -> tuple[Change, ...]:
        """Drops earlier tasks of the lane that are still pending or requeued: the request proves them
        done."""
        name = self.streams.name(lane)
        open_tasks = self.open_of.get(name, ())
        held = [t for t in open_tasks if t in self.pending and self.pending[t].record.index < index]
        back = [t for t in open_tasks if t in self.requeued and self.requeued[t].index < index]
        return (*(DropPending(t, reported=True) for t in held), *map(DropRequeued, back))

    def _note(self, stream: str, task_id: str) -> None:
        if self.by_lane:
            self.open_of.note(stream, task_id, is_open=task_id in self.pending or task_id in self.requeued)

    def _and_close(
        self, committed: tuple[Change, ...], passed: tuple[PutCursor, ...] = ()
    ) -> tuple[Change, ...]:
        """`committed` and `passed`, and the next epoch if they leave no task of this one."""
        left = len(self.pending) + len(self.requeued) - len(committed)
        closed = bool(committed or passed) and not left and self.dispatched + len(passed) == self.total
        return (*committed, *passed, NextEpoch(self.epoch + 1)) if closed else (*committed, *passed)

    def _closing(self, task_id: str, changes: tuple[Change, ...]) -> Closing:
        last = self.dispatched == self.total and not self.requeued and self.pending.keys() == {task_id}
        ended = (NextEpoch(self.epoch + 1),) if last and self.kind is TaskKind.TRAIN else ()
        return Closing((*changes, *ended), last)

    def _reported(self, task_id: str, attempt: int, trainer: str, epoch: int | None) -> bool:
        """Whether this very report was taken before, and its answer got lost. Bounded memory, empty in a new
        master."""
        if (held := self.pending.get(task_id)) and held.record.find(attempt, trainer):
            return False
        epochs = (self.epoch, self.epoch - 1) if epoch is None else (epoch,)
        return any((e, task_id, attempt, trainer) in self.repeats.reports for e in epochs)
