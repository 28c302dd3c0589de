"""What a master knows of one job: everything it decides from. Only `Job.apply` changes it, by changes that
etcd holds.

Members are who is registered in etcd, and what they have written there. Operations are the requests that take
long.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from master_service.core.changes import (
    Change,
    Decision,
    DesirePservers,
    DropAnswer,
    DropCut,
    DropEvaluation,
    DropEvaluationsAfter,
    DropEvents,
    DropMigration,
    DropOperation,
    DropPause,
    DropPending,
    Event,
    Fields,
    ForgetParameters,
    NextEpoch,
    PutCursor,
    PutCut,
    PutEvents,
    PutPause,
    PutPending,
    RequireLatest,
    RestartQueue,
)
from master_service.core.queue.file_table import FileTable
from master_service.core.queue.open_tasks import Deadlines
from master_service.core.queue.streams import Streams, plan_of
from master_service.core.queue.task_queue import TaskQueue
from master_service.core.state.kept import EventLog, KeptAnswers
from master_service.core.state.metrics import Speeds
from trireme_shared.protocol.errors import NotFound
from trireme_shared.protocol.evaluations import Evaluation, EvaluationStatus
from trireme_shared.protocol.records import (
    EpochPlan,
    EvaluationSums,
    Holding,
    JobSpec,
    JobState,
    Mode,
    PserverMember,
    SlotMap,
    Stage,
    Strategy,
    TaskKind,
    TaskMeta,
    TaskSummary,
    TrainerList,
    TrainerMember,
    UserFailure,
    ValidationSums,
)
from trireme_shared.protocol.records.assignments import GivenNumbers, Migration
from trireme_shared.protocol.records.checkpoints import CheckpointLatest, OwnCheckpoints
from trireme_shared.protocol.records.job import Losses, Paused
from trireme_shared.protocol.records.layout import Layout
from trireme_shared.protocol.records.operations import (
    KeptAnswer,
    Operation,
    OperationKind,
    OperationState,
    ResizePhase,
)
from trireme_shared.protocol.records.queue import FailureCounts
from trireme_shared.protocol.records.record import MESSAGE_CHARACTERS, shortened


@dataclass
class Operations:
    """Checkpoints, verifications, restorations, resizes: those that run, and the last ones that ended.

    `since`: when this master first saw each one, by its own clock; `requested`: when it first saw it in
    `making`.
    """

    records: dict[str, Operation] = field(default_factory=dict)
    since: dict[str, float] = field(default_factory=dict)
    requested: dict[str, float] = field(default_factory=dict)

    def apply(self, change: Operation | DropOperation, now: float) -> None:
        """In place."""
        match change:
            case Operation():
                self.records[change.operation_id] = change
                self.since.setdefault(change.operation_id, now)
                if not (change.after or change.joined):
                    self.requested.setdefault(change.operation_id, now)
            case DropOperation(operation_id):
                self.records.pop(operation_id, None)
                self.since.pop(operation_id, None)
                self.requested.pop(operation_id, None)

    def running(self, kind: OperationKind | None = None) -> list[Operation]:
        """Oldest first."""
        found = [operation for operation in self.records.values() if operation.running]
        found.sort(key=lambda operation: self.since[operation.operation_id])
        return [operation for operation in found if kind in (None, operation.kind)]

    def making(self) -> list[Operation]:
        """Those that checkpoints are made for, without those that wait for the next one or share it. Oldest
        first."""
        creating = self.running(OperationKind.CREATE_CHECKPOINT)
        return [operation for operation in creating if not (operation.after or operation.joined)]

    def number_of_trainers_asked(self) -> bool:
        """Whether a resize to a number of trainers is in force, or is being carried out."""
        return self.resize_in_force() is not None

    def resize_in_force(self) -> Operation | None:
        """The newest one that gave the job its number of trainers, or is about to."""
        found = [
            each
            for each in self.records.values()
            if each.resize is not None
            and each.resize.trainers_asked
            and each.resize.phase is not ResizePhase.PLANNED
            and not each.error_code
        ]
        return max(found, key=lambda each: self.since[each.operation_id], default=None)

    def find(self, operation_id: str) -> Operation:
        """Raises NotFound."""
        found = self.records.get(operation_id)
        if found is None:
            msg = (
                f"operation {operation_id} does not exist (any more: the last {KEPT_OPERATIONS} that "
                "ended are kept)"
            )
            raise NotFound(msg)
        return found


def end_operation(
    operation: Operation, state: OperationState, reason: str, stamp: str, *, code: str = ""
) -> Decision[None]:
    reason = shortened(reason, MESSAGE_CHARACTERS)
    ended = operation.with_fields(state=state, reason=reason, error_code=code, end_time=stamp)
    name = "operation_done" if state is OperationState.DONE else "operation_failed"
    message = f"{operation.kind.value.lower().replace('_', ' ')}: {reason}"
    return Decision(None, (ended,), (Event(name, message, operation_fields(ended)),))


def operation_fields(operation: Operation) -> Fields:
    fields: Fields = {
        "operation": operation.operation_id,
        "kind": operation.kind.value,
        "attempt": operation.attempt,
    }
    if operation.checkpoint_id:
        fields |= {"checkpoint": operation.checkpoint_id, "step": operation.step or 0}
    return fields


BESIDE = (TaskKind.VALIDATE, TaskKind.METRICS)

KIND_OF = {Stage.TRAIN: TaskKind.TRAIN, Stage.EVALUATE: TaskKind.EVALUATE, Stage.EXPORT: TaskKind.EXPORT}

KEPT_OPERATIONS = 50  # of those that ended
LISTED_METRICS = 4  # of a job in a list of jobs

LEFT_KEPT = 4096  # names; those that left earlier are no news any more


def started_by(member: TrainerMember | PserverMember) -> str:
    """The name that its process was started with. In a cluster that is the pool member whose place it has."""
    return member.incarnation.rpartition("-")[0]


def holds_parameters(holds: Holding | None, timeline: int, checkpoint: str) -> bool:
    """Collective: whether a trainer that says so has the parameters of that timeline."""
    return (
        holds is not None and not holds.error and (holds.timeline, holds.checkpoint) == (timeline, checkpoint)
    )


@dataclass(frozen=True, slots=True)
class Members:
    """Trainers in order of arrival. The revisions are those at which etcd created each `ps/<index>` and
    `layout` (0: not there). `latest`: the newest checkpoint, written at `latest_revision`; `own`: independent
    checkpoints, by pserver. `initialiser`: the trainer that gave the parameters their first values, once they
    have them. `left`: trainers and pservers (`pserver-0`) that gave their keys up because they were told to,
    the latest LEFT_KEPT."""

    trainers: Mapping[str, TrainerMember] = field(default_factory=dict)
    pservers: Mapping[int, PserverMember] = field(default_factory=dict)
    pserver_revisions: Mapping[int, int] = field(default_factory=dict)
    layout_revision: int = 0
    layout: Layout | None = None
    init_done: bool = False
    initialiser: str = ""
    latest: CheckpointLatest | None = None
    latest_revision: int = 0
    own: Mapping[int, OwnCheckpoints] = field(default_factory=dict)
    left: tuple[str, ...] = ()

    def starters(self) -> frozenset[str]:
        """`started_by` of each trainer and parameter server."""
        trainers, pservers = map(started_by, self.trainers.values()), map(started_by, self.pservers.values())
        return frozenset((*trainers, *pservers))

    def holding(self, timeline: int, checkpoint: str) -> tuple[str, ...]:
        """Collective: the trainers that have the parameters of that timeline, in order of arrival."""
        return tuple(
            name
            for name, member in self.trainers.items()
            if holds_parameters(member.holds, timeline, checkpoint)
        )

    def absence(self, name: str) -> str:
        """For people: `trainer-0 left, as asked` or `trainer-0 is gone`."""
        return f"{name} left, as asked" if name in self.left else f"{name} is gone"

    def __repr__(self) -> str:
        done = "initialised" if self.init_done else "not initialised"
        return f"<Members: {len(self.pservers)} pservers, {len(self.trainers)} trainers, {done}>"


@dataclass
class FailureBudget:
    """How many errors of the user's code a job may have, and `counts`, how many it has had: what etcd holds,
    so a new master goes on counting. `started`: a step is known to be done."""

    allowed: int
    started: bool = False
    counts: FailureCounts = field(default_factory=FailureCounts)


@dataclass
class Job:
    """`speeds` are measured, not decided: no change is about them, and etcd does not hold them.
    `evaluations`: by number, those that were done while the job trained. `awaited`: the evaluation that
    trainers wait for, and since when; it is not stored either."""

    spec: JobSpec
    meta: TaskMeta
    queues: dict[TaskKind, TaskQueue]
    budget: FailureBudget
    plan: EpochPlan
    state: JobState = field(default_factory=JobState)
    trainers: TrainerList = field(default_factory=TrainerList)
    slots: SlotMap | None = None
    migration: Migration | None = None
    given: GivenNumbers | None = None
    sums: EvaluationSums = field(default_factory=EvaluationSums)
    validation: ValidationSums = field(default_factory=ValidationSums)
    evaluation: EvaluationStatus = field(default_factory=EvaluationStatus)
    evaluations: dict[int, Evaluation] = field(default_factory=dict)
    awaited: tuple[int, float] | None = None
    losses: Losses = field(default_factory=Losses)
    members: Members = field(default_factory=Members)
    operations: Operations = field(default_factory=Operations)
    answers: KeptAnswers = field(default_factory=KeptAnswers)
    events: EventLog = field(default_factory=EventLog)
    # also of the stage and the timeline; None: they are those of the beginning
    phase_since: float | None = None
    speeds: Speeds = field(default_factory=Speeds)

    @classmethod
    def open(
        cls, spec: JobSpec, table: FileTable, evaluation: FileTable | None, known: TaskMeta | None = None
    ) -> Job:
        """A job that has not begun; `known`: of one that has."""

        def deadlines() -> Deadlines:
            return Deadlines(spec.task_timeout_floor_s, spec.task_timeout_ceiling_s)

        allowed, balanced = spec.max_task_failures, known.balanced if known else True
        chosen = (spec.streams, spec.seed, spec.shuffle, spec.minibatch_size, balanced)
        streams = Streams(TaskKind.TRAIN, table, *chosen)
        queues = {
            TaskKind.TRAIN: TaskQueue(
                streams, deadlines(), spec.mode is Mode.SYNC, spec.epochs, max_failures=allowed
            ),
            TaskKind.EXPORT: TaskQueue(Streams(TaskKind.EXPORT), deadlines(), max_failures=allowed),
        }
        if evaluation is not None:
            queues[TaskKind.EVALUATE] = TaskQueue(
                Streams(TaskKind.EVALUATE, evaluation), deadlines(), max_failures=allowed
            )
        if evaluation is not None and spec.evaluate_every is not None:
            for streams in (Streams(TaskKind.VALIDATE, evaluation), Streams(TaskKind.METRICS)):
                queues[streams.kind] = TaskQueue(streams, deadlines(), max_failures=allowed)
        meta = TaskMeta(
            epoch=0,
            digest=table.digest,
            seed=spec.seed,
            tasks=table.tasks,
            evaluation_tasks=evaluation.tasks if evaluation else 0,
            evaluation_digest=evaluation.digest if evaluation else "",
            task_records=table.task_records,
            evaluation_task_records=evaluation.task_records if evaluation else 0,
            balanced=balanced,
        )
        return cls(
            spec,
            meta,
            queues,
            FailureBudget(spec.max_user_failures),
            plan_of(spec, queues[TaskKind.TRAIN].streams),
        )

    @property
    def training(self) -> TaskQueue:
        return self.queues[TaskKind.TRAIN]

    @property
    def due(self) -> TaskQueue | None:
        """The queue of the current stage; None when the job is done."""
        kind = KIND_OF.get(self.state.stage)
        return self.queues.get(kind) if kind else None

    @property
    def open_queues(self) -> tuple[TaskQueue, ...]:
        """Those whose tasks are given out now."""
        due = (self.due,) if self.due is not None else ()
        return (*due, *self.beside) if self.evaluation.running is not None else due

    @property
    def beside(self) -> tuple[TaskQueue, ...]:
        """Of an evaluation while the job trains, in the order in which their tasks are given."""
        return tuple(self.queues[kind] for kind in BESIDE if kind in self.queues)

    @property
    def pservers_needed(self) -> int:
        """While a resize takes some away, those that leave count until their slots have moved."""
        if self.spec.strategy is Strategy.COLLECTIVE:
            return 0  # a slot map may be left of a run with parameter servers
        return max(self.spec.pservers, max(self.slots.serving, default=-1) + 1 if self.slots else 0)

    @property
    def known_budget(self) -> FailureBudget:
        """`budget`, started as well if a checkpoint, the parameters of a trainer or a trainer's report of its
        task prove a step: a new leader knows them before it hears of any metrics."""
        return replace(self.budget, started=self.budget.started or self._has_trained())

    def _has_trained(self) -> bool:
        latest = self.members.latest
        if self.spec.mode is Mode.SYNC:  # reports of tasks count minibatches that are only begun
            held = (member.holds for member in self.members.trainers.values())
            return (latest is not None and latest.step > 0) or any(
                each is not None and each.version > 0 for each in held
            )
        return any(held.minibatches for held in self.training.pending.values()) or (
            latest is not None and any(ref.minibatches for ref in latest.kept)
        )

    @property
    def records_done(self) -> int:
        """Trained or discarded in all epochs, with the minibatches of tasks under way."""
        queue, spec = self.training, self.spec
        per_epoch = queue.streams.records
        open_records = sum(
            min(held.minibatches * spec.minibatch_size, queue.streams.records_of(task_id))
            for task_id, held in queue.pending.items()
        )
        return self._done(per_epoch, open_records)

    @property
    def records_total(self) -> int:
        """Over all epochs."""
        return self.spec.epochs * self.training.streams.records

    @property
    def newest_metrics(self) -> dict[str, float]:
        """Of the evaluation after training, else of the last one while training that has a result; as many as
        lists show."""
        metrics = self.state.result.metrics or next(
            (each.metrics for each in reversed(self.evaluation.recent) if each.metrics), {}
        )
        return dict([item for item in metrics.items() if math.isfinite(item[1])][:LISTED_METRICS])

    @property
    def listed_failure(self) -> UserFailure | None:
        """As lists show it."""
        return self.state.failure.in_list() if self.state.failure is not None else None

    def _done(self, per_epoch: int, begun: int) -> int:
        """Of records, or minibatches, `per_epoch` of which are in an epoch: in tasks that are over, about,
        and `begun` in those under way."""
        queue = self.training
        _, _, done, discarded = queue.counts
        closed = round(per_epoch * (done + discarded) / queue.total) if queue.total else 0
        return min(queue.current * per_epoch + closed + begun, self.spec.epochs * per_epoch)

    @property
    def epoch_minibatches(self) -> int:
        """Of one epoch."""
        queue, size = self.training, self.spec.minibatch_size
        return queue.streams.sum(0, 0, queue.total, lambda records: -(-records // size))

    @property
    def minibatches_done(self) -> int:
        """Trained or discarded in all epochs, as far as trainers have told: in tasks that are over, about,
        and in those under way."""
        queue = self.training
        begun = {task_id: held.minibatches for task_id, held in queue.pending.items()}
        for member in self.members.trainers.values():
            at = member.paused or Paused(uuid="")
            held = queue.pending.get(at.task_id)
            if (
                held is not None
                and held.record.epoch == at.epoch
                and held.record.find(at.attempt, member.trainer)
            ):
                begun[at.task_id] = max(begun[at.task_id], at.minibatch)
        return self._done(self.epoch_minibatches, sum(begun.values()))

    def queue_of(self, task_id: str) -> TaskQueue:
        """Raises NotFound if no queue can hold that id."""
        kind = TaskKind.TRAIN if task_id.isdigit() else _kind_of(task_id)
        if kind is None or kind not in self.queues:
            msg = f"task {task_id} does not exist"
            raise NotFound(msg)
        self.queues[kind].streams.number(task_id)
        return self.queues[kind]

    def summary(self) -> TaskSummary:
        queue = self.due or self.queues[TaskKind.EXPORT]
        todo, pending, done, discarded = queue.counts
        total, plan = queue.streams.records, self.plan
        return TaskSummary(
            epoch=self.training.current,
            epochs=self.spec.epochs,
            stage=self.state.stage,
            total=queue.total,
            todo=todo,
            pending=pending,
            done=done,
            discarded=discarded,
            records_total=total,
            records_done=round(total * done / queue.total) if queue.total else 0,
            task_records=plan.task_records,
            steps_per_epoch=plan.steps,
            total_steps=plan.steps * self.spec.epochs if plan.steps is not None else None,
            records_left_out=plan.left_out,
        )

    def apply(self, change: Change, now: float) -> None:
        """In place."""
        match change:
            case DropPending(task_id) | PutPending(task_id):
                self.queue_of(task_id).apply(change, now)
            case PutCursor(stream, _):
                kind = TaskKind.TRAIN if stream.isdigit() else TaskKind(stream.upper())
                self.queues[kind].apply(change, now)
            case JobState():
                before = self.state
                if (change.phase, change.stage, change.timeline) != (
                    before.phase,
                    before.stage,
                    before.timeline,
                ):
                    self.phase_since = now
                self.state = change
            case TrainerList():
                self.trainers = self.training.deadlines.trainers = change
            case SlotMap():
                self.slots = change
            case JobSpec():
                self.spec = change
            case Migration():
                self.migration = change
            case DropMigration():
                self.migration = None
            case GivenNumbers():
                self.given = change
            case ValidationSums():
                self.validation = change
            case EvaluationSums():
                self.sums = change
            case EvaluationStatus():
                self.evaluation = change
                if (running := change.running) is not None:
                    for queue in self.beside:  # reports name the number as their epoch
                        queue.epoch, queue.epochs = running.number, running.number + 1
            case Evaluation():
                self.evaluations[change.number] = change
            case DropEvaluation(number):
                self.evaluations.pop(number, None)
            case DropEvaluationsAfter(last):
                self.evaluations = {
                    number: each for number, each in self.evaluations.items() if number <= last
                }
            case FailureCounts():
                self.budget.counts = change
            case Losses():
                self.losses = change
            case PutPause() | DropPause() | PutCut() | DropCut() | RequireLatest() | DesirePservers():
                pass
            case Operation() | DropOperation():
                self.operations.apply(change, now)
            case KeptAnswer() | DropAnswer():
                self.answers.apply(change)
            case PutEvents() | DropEvents():
                self.events.apply(change)
            case ForgetParameters():
                self.members = replace(self.members, layout_revision=0, init_done=False, initialiser="")
            case RestartQueue(kind):
                self.queues[kind].apply(change, now)
            case NextEpoch(epoch):
                self.meta = self.meta.with_fields(epoch=epoch)
                self.training.apply(change, now)
            case _:
                self.queue_of(change.task_id).apply(change, now)

    def __repr__(self) -> str:
        return (
            f"<Job {self.state.phase} {self.state.stage} generation {self.state.generation}: "
            f"{self.due}, {self.members}>"
        )


def _kind_of(task_id: str) -> TaskKind | None:
    kind = task_id.rpartition("-")[0]
    known = not kind or (kind == kind.lower() and kind.upper() in TaskKind.__members__ and kind != "train")
    return TaskKind(kind.upper() or "TRAIN") if known else None
