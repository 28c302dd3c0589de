"""Operations of one term: begun by REST or a draining member, advanced by the leader, read by anybody.

ask -> written -> 202
members, checkpoints or state change -> advance
files -> read, one operation at a time
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from master_service.control.events import EventFeed
from master_service.core.changes import Decision
from master_service.core.decisions import evaluation, operations, recovery, resize
from master_service.core.decisions.requests import Once
from master_service.core.state.job import Job
from master_service.storage.job_storage import JobStorage
from master_service.store.writer import Writer, is_due
from trireme_shared.platform.runtime import clock, ids, telemetry
from trireme_shared.platform.runtime.clock import event_within
from trireme_shared.platform.runtime.containment import LongLivedGroup
from trireme_shared.protocol.errors import CheckpointUnusable
from trireme_shared.protocol.records import Phase
from trireme_shared.protocol.records.cluster import Kind
from trireme_shared.protocol.records.operations import Operation, OperationKind, ResizePrediction, Strategy

LIMIT_S = 600.0
TICK_S, IDLE_S = 1.0, 5.0
PAUSE_S = 0.5
STORAGE_TRIES = 4

log = telemetry.logger("operation_runner")


class OperationRunner:
    """`look_again` after each change of the members or the state. `why_fewer`: see TaskService."""

    def __init__(
        self,
        writer: Writer,
        storage: JobStorage,
        events: EventFeed,
        why_fewer: Callable[[Kind], str] = lambda _: "",
    ) -> None:
        self._writer, self._storage, self._events, self._why_fewer = writer, storage, events, why_fewer
        self._changed = asyncio.Event()

    # ---------------------------------------------------------------- asking

    # `once`: of a request with an Idempotency-Key; all raise AnsweredBefore, IdempotencyKeyReused then.

    async def create_checkpoint(
        self, key: str, cause: str, limit_s: float, once: Once[Operation] | None = None
    ) -> Operation:
        """The same `key` is the same operation. Raises Conflict."""
        asked = self._asked(OperationKind.CREATE_CHECKPOINT, key, cause, limit_s=limit_s)
        return await self._begin(asked, key, once)

    async def restore_checkpoint(
        self, key: str, cause: str, checkpoint_id: str, once: Once[Operation] | None = None
    ) -> Operation:
        """Raises Conflict, NotFound. If files are damaged the operation fails before anything is stopped."""
        return await self._begin(
            self._asked(OperationKind.RESTORE_CHECKPOINT, key, cause, checkpoint_id), key, once
        )

    async def verify_checkpoint(
        self, key: str, cause: str, checkpoint_id: str, once: Once[Operation] | None = None
    ) -> Operation:
        """Raises Conflict, NotFound."""
        return await self._begin(
            self._asked(OperationKind.VERIFY_CHECKPOINT, key, cause, checkpoint_id), key, once
        )

    async def create_resize(
        self,
        key: str,
        cause: str,
        trainers: int | None,
        pservers: int | None,
        strategy: Strategy = Strategy.LIVE,
        limit_s: float = LIMIT_S,
        once: Once[Operation] | None = None,
    ) -> Operation:
        """None: as many as now. Raises InvalidArgument, Conflict."""
        asked = self._asked(OperationKind.RESIZE, key, cause, limit_s=limit_s)

        def decide(job: Job, _: float) -> Decision[Operation]:
            known = job.operations.records.get(asked.operation_id)
            if known is not None and resize.is_same(known, trainers, pservers, strategy):
                return Decision(known)
            numbers = resize.wanted(job, trainers, pservers, strategy)
            return operations.ask(job, asked.with_fields(resize=numbers), keyed=bool(key))

        return await self._begun(decide, once)

    def predict_resize(
        self, trainers: int | None, pservers: int | None, strategy: Strategy
    ) -> ResizePrediction:
        """What would move. Raises InvalidArgument, Conflict."""
        job = self._writer.job
        return resize.predict(job, resize.wanted(job, trainers, pservers, strategy))

    async def cancel_resize(self, operation_id: str, once: Once[Operation] | None = None) -> Operation:
        """Raises NotFound, Conflict."""
        stamp = clock.timestamp()
        return await self._begun(
            lambda job, _: resize.cancel(job, job.operations.find(operation_id), stamp), once
        )

    def get(self, operation_id: str) -> Operation:
        """With what it waits for now. Raises NotFound."""
        job = self._writer.job
        found = job.operations.find(operation_id)
        if not found.running:
            return found
        kind = resize.lacking(job, found)
        why = self._why_fewer(kind) if kind else ""
        reason = f"waiting for {operations.waits_for(job, found)}" + (f"; {why}" if why else "")
        return found.with_fields(reason=reason)

    async def wait(self, operation_id: str, wait_s: float) -> Operation:
        """As `get`, once it has ended or after `wait_s`. Raises NotFound."""
        deadline = clock.monotonic() + wait_s
        while (found := self.get(operation_id)).running and (left := deadline - clock.monotonic()) > 0:
            await self._events.next(left)
        return found

    async def _begin(self, asked: Operation, key: str, once: Once[Operation] | None) -> Operation:
        return await self._begun(lambda job, _: operations.ask(job, asked, keyed=bool(key)), once)

    def _asked(
        self, kind: OperationKind, key: str, cause: str, checkpoint_id: str = "", limit_s: float = LIMIT_S
    ) -> Operation:
        named = ids.named_uuid("operation", self._writer.job.spec.job, key) if key else ""
        return Operation(
            operation_id=f"op-{named}" if key else ids.new_id("op"),
            kind=kind,
            cause=cause,
            checkpoint_id=checkpoint_id,
            limit_s=limit_s,
            create_time=clock.timestamp(),
        )

    async def _begun(
        self, decide: Callable[[Job, float], Decision[Operation]], once: Once[Operation] | None
    ) -> Operation:
        begun = await self._writer.decide(once.decide(decide) if once is not None else decide)
        self.look_again()
        return self.get(begun.operation_id)

    # ---------------------------------------------------------------- running

    def look_again(self) -> None:
        self._changed.set()

    async def run(self) -> None:
        """Until cancelled."""
        async with LongLivedGroup() as group:
            group.create_task(self._advance_all())
            group.create_task(self._read_files())

    async def _advance_all(self) -> None:
        """At each change, and once a second for the limits: no operation waits for ever. Without operations
        it looks rarely: a leader has many jobs."""
        while True:
            await event_within(self._changed, TICK_S if self._writer.job.operations.running() else IDLE_S)
            self._changed.clear()
            await self._advance(clock.timestamp())

    async def _advance(self, stamp: str) -> None:
        decisions: tuple[Callable[[Job, float], Decision[None]], ...] = (
            lambda job, _: operations.ask_for_draining(job, stamp),
            lambda job, _: operations.advance(job, stamp),
            lambda job, now: operations.tick(job, now, stamp),
            lambda job, _: operations.begin_next(job),
        )
        for decision in decisions:
            if is_due(self._writer, decision):
                await self._writer.decide(decision)

    async def _read_files(self) -> None:
        while True:
            waiting = [
                operation
                for operation in self._writer.job.operations.running()
                if operation.kind in operations.READS_FILES and not operation.timeline
            ]
            if not waiting or self._writer.job.state.phase is Phase.CHECKPOINTING:
                await self._events.next(TICK_S if waiting else IDLE_S)
                continue
            await self._verify(waiting[0])

    async def _verify(self, operation: Operation) -> None:
        error, stamp = await self._damage(operation), clock.timestamp()
        await self._writer.decide(
            lambda job, _: operations.verified(job, operation.operation_id, error, stamp)
        )

    async def _damage(self, operation: Operation) -> CheckpointUnusable | None:
        """What is wrong with the files."""
        ref = recovery.ref_of(self._writer.job.members.latest, operation.checkpoint_id)
        if ref is None:
            return CheckpointUnusable(f"checkpoint {operation.checkpoint_id} was deleted before it was read")
        failed: OSError | None = None
        for attempt in range(STORAGE_TRIES):
            try:
                await self._storage.verify(ref)
            except CheckpointUnusable as error:
                return error
            except OSError as error:
                failed = error
                log.warning("checkpoint_unread", checkpoint=ref.uuid, cause=str(error))
                await asyncio.sleep(ids.jitter(PAUSE_S * 2**attempt))
            else:
                return None
        return CheckpointUnusable(
            f"checkpoint {ref.uuid} could not be read {STORAGE_TRIES} times: {failed!r}"
        )


class EvaluationRunner:
    """What a leader does for evaluations while the job trains: it begins each once its checkpoint is
    committed.

    checkpoint committed ─► begun
    a later one is the latest, and the result depends on it ─► the job goes back
    trainers wait for one whose checkpoint does not come within `recovery_timeout_s`, or before that of the
        last version ─► left out

    Of one term. `look_again` after each change of the members or the checkpoints. `on_rollback`: the job has
    to go back.
    """

    def __init__(self, writer: Writer, on_rollback: Callable[[], None] = lambda: None) -> None:
        self._writer, self._on_rollback = writer, on_rollback
        self._changed = asyncio.Event()

    def look_again(self) -> None:
        self._changed.set()

    async def run(self) -> None:
        """Until the writer's term ends (raises NotLeader) or cancelled."""
        if self._writer.job.spec.evaluate_every is None:
            return
        while True:
            if recovery.is_evaluation_lost(self._writer.job):
                if await self._writer.decide(lambda job, _: recovery.go_back_for_evaluation(job)):
                    self._writer.job.awaited = None
                    self._on_rollback()
            elif evaluation.next_due(self._writer.job) is not None:
                await self._writer.decide(lambda job, _: evaluation.begin(job))
            await self._leave_out_lost()
            await event_within(self._changed, TICK_S)
            self._changed.clear()

    async def _leave_out_lost(self) -> None:
        awaited, limit_s = self._writer.job.awaited, self._writer.job.spec.recovery_timeout_s
        if awaited is None:
            return
        if _last_is_saved(self._writer.job):
            cause = "its checkpoint was not written, and that of the last version is there"
        elif clock.monotonic() - awaited[1] > limit_s:
            cause = f"its checkpoint was not written within recovery_timeout_s {limit_s:g}"
        else:
            return

        def lost(job: Job, _now: float) -> Decision[None]:
            if job.evaluation.running is not None or evaluation.next_due(job) is not None:
                return Decision(None)
            return evaluation.leave_out(job, awaited[0], cause)

        await self._writer.decide(lost)
        self._writer.job.awaited = None


def _last_is_saved(job: Job) -> bool:
    """Whether no checkpoint of an earlier version can come any more."""
    latest = job.members.latest
    return latest is not None and latest.final and latest.timeline == job.state.timeline
