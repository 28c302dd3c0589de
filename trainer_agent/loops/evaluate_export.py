"""After training: evaluate the final parameters, task by task, and export them, until the job is over.

acquire ─► EVALUATE: sums over the task's minibatches      EXPORT: files, and metrics out of all sums      end
              └─ complete, whose answer is the next task
"""

from __future__ import annotations

from shared.errors import InvalidArgument, StaleGeneration, StorageUnreachable, UserCodeError
from shared.etcd.reading import must_read
from shared.records import CompleteTask, EvaluationSums, TakeNext, Task, TaskKind
from shared.records.step import StepRecord
from shared.runtime import ids, telemetry
from shared.storage import files
from trainer_agent.loops.context import LoopContext
from trainer_agent.loops.evaluating import Evaluator, TaskSums
from trainer_agent.tasks.source import LoadedTask, TaskFailed
from trainer_agent.waiting.retry import retry

REFRESH_S = 0.5

log = telemetry.logger("evaluate_export")


class EvaluateExportLoop:
    """`run` returns when the master has no more tasks for anybody, or when `stopping` is set."""

    def __init__(self, context: LoopContext, evaluator: Evaluator) -> None:
        self._evaluator, self._spec = evaluator, context.spec
        self._directory, self._etcd, self._compute = context.directory, context.etcd, context.compute
        self._transfer, self._source, self._stopping = context.transfer, context.source, context.stopping
        self._pulled = False
        self._final: StepRecord | None = None
        self.busy = False

    async def run(self, acquired: Task | None = None) -> None:
        """`acquired`: a task that the training loop got already."""
        task, request = acquired, ""
        if self._spec.evaluate_every is not None:
            await self._evaluator.after_training(await self._pull_final())
        while not self._stopping.is_set():
            if task is not None:
                request = ids.new_id("task")
                self.busy = True
                try:
                    task = await self._do(task, request)
                finally:
                    self.busy = False
                continue
            try:
                answer = await self._source.acquire(self._transfer.generation, request=request)
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
            done = await (self._evaluate(task) if task.kind is TaskKind.EVALUATE else self._export(task))
        except (UserCodeError, TaskFailed) as error:
            await self._source.fail(task, error.error if isinstance(error, TaskFailed) else error)
            return None
        more = task.kind is TaskKind.EVALUATE and not self._stopping.is_set()
        following = TakeNext(request=request, generation=self._transfer.generation) if more else None
        return await self._source.complete(task, done, following)

    async def _pull_final(self) -> StepRecord | None:
        if not self._pulled:
            self._final = await self._transfer.pull(None, exact=True)
            self._transfer.swap()
            self._pulled = True
        return self._final

    async def _evaluate(self, task: Task) -> CompleteTask:
        sums = TaskSums.of(LoadedTask(task, await self._source.read(task)), self._spec)
        while not sums.complete:
            await sums.next(self._source, self._compute)
        return self._source.completion(task, sums=sums.sums)

    async def _export(self, task: Task) -> CompleteTask:
        """The metrics are part of the export's report: only a trainer can run the user's `metrics(sums)`."""
        key = self._directory.keys.evaluation
        found = await retry(lambda: self._etcd.get(key), "the sums of the evaluation")
        sums = must_read(EvaluationSums, key, found.value).sums if found else {}
        place = files.join(self._source.spec.storage, "export")
        try:
            exports = await self._compute.export(place)
        except (OSError, InvalidArgument) as error:
            message = f"the model cannot be written to {place}: {error}"
            kind = StorageUnreachable if isinstance(error, OSError) else InvalidArgument
            raise TaskFailed(task, kind(message)) from error
        metrics = await self._compute.metrics(sums) if sums else {}
        await self._compute.finish()
        return self._source.completion(task, exports=exports, sums=metrics)
