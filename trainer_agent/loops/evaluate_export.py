"""After training: evaluate the final parameters, task by task, and export them, until the job is over.

acquire ─► EVALUATE: sums over the task's minibatches      EXPORT: files, and metrics out of all sums      end
              └─ complete, whose answer is the next task
"""

from __future__ import annotations

import math
from collections.abc import Awaitable
from functools import partial

from trainer_agent.loops.context import LoopContext, timeline_of
from trainer_agent.loops.evaluating import Evaluator, TaskSums, read_again, read_checkpoint
from trainer_agent.tables.whole_tables import export_tables, write_checkpoint_tables
from trainer_agent.tasks.activity import Held
from trainer_agent.tasks.source import TaskFailed
from trainer_agent.waiting import retry, to_its_end
from trireme_shared.platform.etcd.reading import must_read, read_record
from trireme_shared.platform.runtime import clock, ids, telemetry
from trireme_shared.platform.storage import files
from trireme_shared.protocol.errors import (
    CheckpointUnusable,
    InvalidArgument,
    StaleGeneration,
    StorageUnreachable,
    TriremeError,
    UserCodeError,
)
from trireme_shared.protocol.evaluations import Evaluation, better, evaluations_before
from trireme_shared.protocol.records import CompleteTask, EvaluationSums, Mode, TakeNext, Task, TaskKind
from trireme_shared.protocol.records.checkpoints import CheckpointLatest, CheckpointRef, Manifest
from trireme_shared.protocol.records.step import StepRecord, StepResult
from trireme_shared.protocol.records.tasks import BestEvaluation

REFRESH_S = 0.5

log = telemetry.logger("evaluate_export")


class EvaluateExportLoop:
    """`run` returns when the master has no more tasks for anybody, or when `stopping` is set."""

    def __init__(self, context: LoopContext, evaluator: Evaluator) -> None:
        self._evaluator, self._spec = evaluator, context.spec
        self._directory, self._etcd, self._compute = context.directory, context.etcd, context.compute
        self._exchange, self._source, self._stopping = context.exchange, context.source, context.stopping
        self._reports = context.reports
        self._pulled = False
        self._final: StepRecord | None = None
        self._settled = False  # the evaluations before the last version are over
        self.busy = False
        self._task: Task | None = None
        self._since = 0.0  # when it began
        # of it that are done; None: it has come to none yet, or is an export
        self._minibatches: int | None = None

    def held(self) -> list[Held]:
        """The task under way. Nothing can be counted of an export, nor of getting the parameters: the time
        is."""
        if self._task is None:
            return []
        if self._minibatches is not None:
            return [Held(self._task, self._minibatches)]
        return [Held(self._task, 0, work=round(1000 * (clock.monotonic() - self._since)))]

    async def run(self, acquired: Task | None = None) -> None:
        """`acquired`: a task that the training loop got already."""
        task, request = acquired, ""
        self._settled = self._spec.evaluate_every is None
        while not self._stopping.is_set():
            if task is None and not self._settled:
                await self._evaluator.after_training(await self._pull_final())
                self._settled = True
            if task is not None:
                request = ids.new_id("task")
                self.busy, self._task, self._since, self._minibatches = True, task, clock.monotonic(), None
                try:
                    task = await self._do(task, request)
                finally:
                    self.busy, self._task = False, None
                continue
            try:
                answer = await self._source.acquire(self._exchange.fleet.generation, request=request)
            except StaleGeneration:
                await self._directory.changed(self._directory.revision, REFRESH_S)
                continue
            if answer.answer == "end":
                return
            task, request = answer.task, ""

    async def _do(self, task: Task, request: str) -> Task | None:
        """The next task, if the master gave one when this one was completed."""
        log.info("task_started", task=task.task_id, attempt=task.attempt)
        try:
            await self._pull_final()
            if task.kind is TaskKind.EXPORT and self._source.spec.mode is Mode.SYNC:
                await self._store_metrics()
            done = await (self._evaluate(task) if task.kind is TaskKind.EVALUATE else self._export(task))
        except (UserCodeError, TaskFailed) as error:
            await self._source.fail(task, error.error if isinstance(error, TaskFailed) else error)
            return None
        more = task.kind is TaskKind.EVALUATE and self._settled and not self._stopping.is_set()
        following = TakeNext(request=request, generation=self._exchange.fleet.generation) if more else None
        return await self._source.complete(task, done, following)

    async def _pull_final(self) -> StepRecord | None:
        if not self._pulled:
            self._final = await self._exchange.pull(None, exact=True)
            await self._exchange.use_next()
            self._pulled = True
            if self._compute.layout.tables:
                self._compute.read_rows(partial(self._exchange.rows.lookup, self._version, exact=True))
        return self._final

    @property
    def _version(self) -> int | None:
        """That was pulled; None: of an asynchronous job, which has none."""
        return None if self._final is None else self._final.version

    async def _store_metrics(self) -> None:
        """Of the last steps: whoever owned lane 0 may be dead. The job is not over before they are stored, or
        the limit has passed."""
        timeline = timeline_of(self._directory)
        version = max(info.highest for info in await self._exchange.fleet.infos(timeline))
        await self._reports.settle(version, timeline, self._results)

    async def _results(self, wanted: int) -> tuple[StepResult, ...]:
        await self._exchange.pull(None, exact=True, results_from=wanted)
        return self._exchange.results

    async def _evaluate(self, task: Task) -> CompleteTask:
        self._minibatches = 0
        sums = TaskSums.of(await self._source.load(task), self._spec)
        while not sums.complete:
            await sums.next(self._source, self._compute)
            self._minibatches = sums.done
        return self._source.completion(task, sums=sums.sums)

    async def _export(self, task: Task) -> CompleteTask:
        """The metrics are part of the export's report: only a trainer can run the user's `metrics(sums)`."""
        key = self._directory.keys.evaluation
        found = await retry(lambda: self._etcd.get(key), "the sums of the evaluation")
        sums = must_read(EvaluationSums, key, found.value).sums if found else {}
        place = files.join(self._source.spec.storage, "export")
        try:
            exports = await self._compute.export(place)
            exports |= await self._export_tables(place)
        except (OSError, InvalidArgument) as error:
            message = f"the model cannot be written to {place}: {error}"
            kind = StorageUnreachable if isinstance(error, OSError) else InvalidArgument
            raise TaskFailed(task, kind(message)) from error
        metrics = await self._compute.metrics(sums) if sums else {}
        await self._compute.finish()
        best = await self._export_best(files.join(place, "best"), exports, metrics)
        return self._source.completion(task, exports=exports, sums=metrics, best=best)

    async def _export_tables(self, place: str) -> dict[str, str]:
        tables = self._compute.layout.tables
        return (
            await export_tables(self._exchange.rows, tables, self._version, place, self._source.offload)
            if tables
            else {}
        )

    async def _export_best(
        self, place: str, exports: dict[str, str], metrics: dict[str, float]
    ) -> BestEvaluation | None:
        """The parameters of the best evaluation, perhaps of the one after training; `exports` gets its files.
        If they cannot be read or written, the model itself is exported all the same."""
        final = self._final
        if self._spec.keep_best is None:
            return None
        status, step = self._evaluator.status, final.version if final is not None else 0
        before = evaluations_before(final, self._spec.evaluate_every) if final is not None else status.settled
        number = before + 1
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        last = Evaluation(number=number, step=step, timeline=status.timeline, checkpoint="", metrics=finite)
        best = better(status.best, last, self._spec.keep_best)
        if best is None:
            return None
        try:
            if best.number == number:
                found = await self._compute.export(place)
                found |= await self._export_tables(place)
            else:
                async with self._exchange.other_values():
                    loaded = await self._load(best)
                    found = await self._compute.export(place)
                found |= await self._source.offload(
                    write_checkpoint_tables, self._spec.storage, *loaded, place
                )
        except (OSError, TriremeError) as error:
            log.warning("best_not_exported", step=best.step, checkpoint=best.checkpoint, cause=str(error))
            return None
        exports.update({f"best_{kind}": path for kind, path in found.items()})
        return best

    async def _load(self, best: BestEvaluation) -> tuple[CheckpointRef, Manifest]:
        """Its parameters are those in use then, see StepExchange.other_values. Raises CheckpointUnusable,
        OSError."""
        key = self._directory.keys.latest
        found = await retry(lambda: self._etcd.get(key), "the checkpoints that are kept")
        latest = read_record(CheckpointLatest, key, found.value if found else None)
        ref = next((ref for ref in (latest.kept if latest else ()) if ref.uuid == best.checkpoint), None)
        if ref is None:
            raise CheckpointUnusable(f"checkpoint {best.checkpoint} (step {best.step}) is not kept any more")
        self._pulled = False

        def read() -> Awaitable[Manifest]:
            reading = self._source.offload(read_checkpoint, self._spec, ref, self._compute.staging)
            return to_its_end(reading)  # its thread writes to the staging vectors

        manifest = await read_again(read, ref)
        self._compute.swap()
        return ref, manifest
