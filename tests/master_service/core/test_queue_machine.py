"""Random histories of the queue, with the job written to keys and read back by new masters at any point.

The model is a set of (epoch, task) that were finished or discarded; the machine is the product's job, store
and keys.
"""

from __future__ import annotations

from hypothesis import Phase as HypothesisPhase
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from master_service.core.changes import Decision, DropDiscarded, DropPending, PutDiscarded
from master_service.core.decisions import discarded_tasks, tasks
from master_service.core.queue.open_tasks import ENOUGH_DURATIONS, LEAST_S
from master_service.core.state.job import Job
from master_service.store import schema
from tests.equipment.queue_violations import violations
from tests.master_service.cluster import KEYS, spec_of, table_of
from trireme_shared.platform.etcd import KeyValue, Put
from trireme_shared.protocol.errors import Conflict, StaleAttempt, StaleGeneration
from trireme_shared.protocol.records import (
    AcquireTask,
    CompleteTask,
    FailTask,
    JobSpec,
    Mode,
    Phase,
    TakeNext,
    Task,
    TrainerList,
    UserFailure,
)

TRAINERS = ("t1", "t2", "t3")
EPOCHS = 3
FAILURE = UserFailure(error_type="ValueError", message="no")


class Machine(RuleBasedStateMachine):
    """Rules both modes share."""

    mode = Mode.ASYNC

    @initialize(tasks=st.integers(1, 9), seed=st.integers(0, 1000))
    def begin(self, tasks: int, seed: int) -> None:
        self.spec: JobSpec = spec_of(mode=self.mode, epochs=EPOCHS, seed=seed, lanes=2, max_task_failures=2)
        self.table = table_of(tasks)
        self.job = Job.open(self.spec, self.table, None)
        self.job.budget.started = True  # a failure is the affair of its task alone
        self.keys: dict[str, bytes] = {}
        self.now = 0.0
        self.requests = 0
        self.held: list[tuple[str, Task]] = []
        self.closed: dict[tuple[int, str], str] = {}
        self.put_state(TRAINERS)

    def put_state(self, trainers: tuple[str, ...]) -> None:
        self.job.state = state = self.job.state.model_copy(update={"phase": Phase.RUNNING, "generation": 1})
        lanes = self.mode is Mode.SYNC
        self.job.trainers = TrainerList(
            generation=1, lanes=2 * lanes, names=trainers[:1] if lanes else trainers
        )
        self.keys[KEYS.state] = state.to_bytes()
        self.keys[KEYS.task_meta] = self.job.meta.to_bytes()
        self.keys[KEYS.trainer_list] = self.job.trainers.to_bytes()

    def commit(self, decision: Decision[object]) -> None:
        for change in decision.changes:
            if isinstance(change, DropDiscarded):
                assert self.closed.pop((change.epoch, change.task_id)) == "discarded"
            if isinstance(change, PutDiscarded):
                self.close(change.task.epoch, change.task_id, "discarded")
        for operation in schema.operations(KEYS, self.job, decision.changes):
            if isinstance(operation, Put):
                self.keys[operation.key] = operation.value
            elif operation.end is None:
                self.keys.pop(operation.key, None)
            else:
                self.keys = {k: v for k, v in self.keys.items() if not operation.key <= k < operation.end}
        for change in decision.changes:
            self.job.apply(change, self.now)

    def close(self, epoch: int, task_id: str, how: str) -> None:
        if not task_id.isdigit():
            return
        assert (epoch, task_id) not in self.closed, (
            f"{task_id} of epoch {epoch} is {self.closed[epoch, task_id]} already"
        )
        self.closed[epoch, task_id] = how

    def ask(self, trainer: str, **values: object) -> AcquireTask:
        self.requests += 1
        return AcquireTask.model_validate(
            {"trainer": trainer, "request": f"r{self.requests}", "generation": 1, **values}
        )

    @rule(data=st.data())
    @precondition(lambda self: self.held)
    def fail(self, data: st.DataObject) -> None:
        trainer, task = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        try:
            report = FailTask(trainer=trainer, attempt=task.attempt, failure=FAILURE, epoch=task.epoch)
            self.commit(tasks.fail_task(self.job, task.task_id, report))
        except StaleAttempt:
            pass

    @rule(data=st.data(), of=st.sampled_from(("discarded", "open", "any")))
    def a_user_asks_for_another_attempt_or_for_none(self, data: st.DataObject, of: str) -> None:
        queue = self.job.training
        known = {
            "discarded": sorted(task_id for _, task_id in queue.discarded),
            "open": sorted(queue.pending.keys() | queue.requeued.keys()),
            "any": [str(number) for number in range(self.table.tasks)],
        }[of]
        if not known:
            return
        task_id = data.draw(st.sampled_from(known))
        asks = data.draw(st.sampled_from((discarded_tasks.retry, discarded_tasks.skip)))
        try:
            asked = asks(self.job, task_id, "asked by a test")
        except Conflict:
            return
        epoch = queue.epoch
        self.commit(asked)
        if queue.epoch == epoch:  # else it was the last one
            assert queue.state_of(task_id) == asked.answer.state
            assert asked.answer.record in (None, queue.requeued.get(task_id), *self.lost(task_id))

    def lost(self, task_id: str) -> list[object]:
        return [put.task for (_, name), put in self.job.training.discarded.items() if name == task_id]

    @rule(seconds=st.sampled_from((1.0, 2000.0)))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.commit(tasks.expire(self.job, self.now))

    @rule(trainer=st.sampled_from(TRAINERS))
    def a_trainer_dies_and_comes_back(self, trainer: str) -> None:
        self.put_state(tuple(t for t in TRAINERS if t != trainer))
        while True:
            decision = tasks.put_back_lost(self.job)
            self.commit(decision)
            if not decision.answer:
                break
        self.put_state(TRAINERS)

    @rule()
    def a_new_master_takes_over(self) -> None:
        before = self.job
        self.job = Job.open(self.spec, self.table, None)
        self.job.budget.started = True  # a failure is the affair of its task alone
        found = {key: KeyValue(key, value, 1, 1, 1, 0) for key, value in self.keys.items()}
        schema.restore(self.job, KEYS, found, self.now)
        old, new = before.training, self.job.training
        assert (repr(new), new.cursors, new.requeued, new.discarded) == (
            repr(old),
            old.cursors,
            old.requeued,
            old.discarded,
        )
        assert {k: p.record for k, p in new.pending.items()} == {k: p.record for k, p in old.pending.items()}
        assert self.job.state == before.state

    @invariant()
    def the_books_are_in_order(self) -> None:
        if hasattr(self, "job"):
            assert list(violations(self.job.training)) == []

    @invariant()
    def keys_are_few(self) -> None:
        if hasattr(self, "job"):
            busy = len(self.job.training.pending) + len(self.job.training.requeued)
            assert len(self.keys) <= 5 + len(self.job.training.discarded) + 2 + busy

    def every_epoch_is_whole(self) -> None:
        for epoch in range(self.job.training.epoch):
            tasks = {task_id for of, task_id in self.closed if of == epoch}
            assert tasks == {str(n) for n in range(self.table.tasks)}


class SharedStream(Machine):
    """Asynchronous training: every task of an epoch is reported finished exactly once, or is discarded, also
    if it was given twice."""

    @rule()
    def what_is_under_way_is_late(self) -> None:
        for _ in range(ENOUGH_DURATIONS):
            self.job.training.late.observe(0.0)
        self.now += 2 * LEAST_S
        tasks.find_late(self.job, self.now)

    @rule(trainer=st.sampled_from(TRAINERS), repeat=st.booleans())
    def acquire(self, trainer: str, repeat: bool) -> None:
        ask = self.ask(trainer)
        decision = tasks.acquire(self.job, ask)
        self.commit(decision)
        answer = decision.answer
        if repeat and answer.answer == "task":
            again = tasks.acquire(self.job, ask)
            assert (again.answer, again.changes) == (answer, ())
        if answer.task is not None:
            self.held.append((trainer, answer.task))

    @rule(data=st.data(), doubled=st.booleans())
    @precondition(lambda self: self.held)
    def finish_and_take(self, data: st.DataObject, doubled: bool) -> None:
        trainer, task = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        following = TakeNext(request=self.ask(trainer).request, generation=1)
        report = CompleteTask(trainer=trainer, attempt=task.attempt, epoch=task.epoch, next=following)
        try:
            decision = tasks.complete_and_take(self.job, task.task_id, report)
        except StaleAttempt:
            return
        if any(isinstance(change, DropPending) for change in decision.changes):
            self.close(task.epoch, task.task_id, "finished")
        self.commit(decision)
        if (given := decision.answer.next) is not None:
            self.held.append((trainer, given))
            if doubled:
                again = tasks.complete_and_take(self.job, task.task_id, report)
                assert (again.answer, again.changes) == (decision.answer, ())

    @rule(data=st.data(), doubled=st.booleans())
    @precondition(lambda self: self.held)
    def finish(self, data: st.DataObject, doubled: bool) -> None:
        trainer, task = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        report = CompleteTask(trainer=trainer, attempt=task.attempt, epoch=task.epoch)
        try:
            decision = tasks.complete(self.job, task.task_id, report)
        except StaleAttempt:
            return
        if decision.changes:
            self.close(task.epoch, task.task_id, "finished")
        self.commit(decision)
        if doubled:
            assert tasks.complete(self.job, task.task_id, report).changes == ()

    @invariant()
    def epochs_close_only_when_whole(self) -> None:
        if hasattr(self, "job"):
            self.every_epoch_is_whole()

    def teardown(self) -> None:
        """Whatever happened, the epochs come to their end."""
        if not hasattr(self, "job"):
            return
        for _ in range(EPOCHS * self.table.tasks * 4):
            self.now += 2000.0
            self.commit(tasks.expire(self.job, self.now))
            self.acquire("t1", repeat=False)
            while self.held:
                trainer, task = self.held.pop()
                report = CompleteTask(trainer=trainer, attempt=task.attempt, epoch=task.epoch)
                try:
                    decision = tasks.complete(self.job, task.task_id, report)
                except StaleAttempt:
                    continue
                if decision.changes:
                    self.close(task.epoch, task.task_id, "finished")
                self.commit(decision)
            if self.job.training.finished:
                break
        assert self.job.training.finished
        self.every_epoch_is_whole()


class Lanes(Machine):
    """Synchronous training: each lane walks its stream; reports may be lost, the walk itself proves what is
    committed."""

    mode = Mode.SYNC

    @initialize()
    def positions(self) -> None:
        self.at = [(0, 0), (0, 0)]
        self.walked: set[tuple[int, str]] = set()

    def step(self, lane: int, report: bool) -> None:
        epoch, index = self.at[lane]
        ask = self.ask("t1", stream=lane, epoch=epoch, index=index)
        if epoch > self.job.training.epoch:
            self.commit(tasks.close_epoch(self.job, ask))
        decision = tasks.acquire(self.job, ask)
        self.commit(decision)
        match decision.answer.answer:
            case "task":
                assert decision.answer.task is not None
                task = decision.answer.task
                assert (epoch, task.task_id) not in self.walked
                if report:
                    done = CompleteTask(trainer="t1", attempt=task.attempt, epoch=epoch)
                    self.commit(tasks.complete(self.job, task.task_id, done))
                    assert tasks.complete(self.job, task.task_id, done).changes == ()
                else:
                    self.held.append(("t1", task))
                self.walked.add((epoch, task.task_id))
                self.at[lane] = (epoch, index + 1)
            case "skip":
                self.at[lane] = (epoch, index + 1)
            case "exhausted":
                others = [at for other, at in enumerate(self.at) if other != lane]
                lengths = [self.job.training.streams.length(other) for other in range(2) if other != lane]
                if all(
                    e > epoch or (e == epoch and i >= length)
                    for (e, i), length in zip(others, lengths, strict=True)
                ):
                    self.at[lane] = (epoch + 1, 0)
            case answer:
                assert answer == "end", decision.answer

    @rule(lane=st.integers(0, 1), report=st.booleans())
    def walk(self, lane: int, report: bool) -> None:
        self.held.clear() if report else None
        self.step(lane, report)

    @rule(lane=st.integers(0, 1))
    def a_stranger_asks(self, lane: int) -> None:
        before = repr(self.job)
        try:
            tasks.acquire(self.job, self.ask("t2", stream=lane, epoch=0, index=0))
        except StaleGeneration:
            assert repr(self.job) == before
        else:
            assert self.job.state.stage != "TRAIN"

    @rule(lane=st.integers(0, 1))
    def somebody_behind_asks_for_what_is_done(self, lane: int) -> None:
        epoch, index = self.at[lane]
        if index == 0 or self.job.state.stage != "TRAIN" or epoch >= EPOCHS:
            return
        number = self.job.training.streams.at(epoch, lane, index - 1)
        if self.job.training.state_of(number) != "DONE" or epoch != self.job.training.epoch:
            return
        decision = tasks.acquire(self.job, self.ask("t1", stream=lane, epoch=epoch, index=index - 1))
        assert (decision.answer.answer, decision.changes) == ("task", ())

    def teardown(self) -> None:
        if not (hasattr(self, "at") and hasattr(self, "job")):
            return
        for _ in range(EPOCHS * (self.table.tasks + 3) * 3):
            if self.job.training.finished:
                break
            for lane in range(2):
                self.step(lane, report=False)
        assert self.job.training.finished
        every = {(epoch, str(n)) for epoch in range(EPOCHS) for n in range(self.table.tasks)}
        assert self.walked | set(self.job.training.discarded) == every


SETTINGS = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    database=None,
    phases=(HypothesisPhase.generate, HypothesisPhase.shrink),
)
SharedStream.TestCase.settings = SETTINGS
Lanes.TestCase.settings = SETTINGS
TestSharedStream = SharedStream.TestCase
TestLanes = Lanes.TestCase
