"""After training: evaluate on the final parameters, export them, until the job is over.

acquire ─► EVALUATE: sums over the task's minibatches      EXPORT: files, and metrics out of all sums      end
"""

from __future__ import annotations

import asyncio

from shared import storage, telemetry
from shared.directory import Directory
from shared.errors import InvalidArgument, StaleAttempt, StaleGeneration, UserCodeError
from shared.etcd import Etcd
from shared.records import CompleteTask, EvaluationSums, Task, TaskKind
from trainer_agent.compute import Compute
from trainer_agent.data import minibatches_in
from trainer_agent.groups import single_error
from trainer_agent.lanes import Holding, TaskFailed, TaskSource, described
from trainer_agent.master import MasterPort
from trainer_agent.retry import persist
from trainer_agent.transfer import Transfer
from trainer_agent.user_module import failure_of

REFRESH_S = 0.5

log = telemetry.logger("finishing")


class Finishing:
    """`run` returns when the master has no more tasks for anybody, or when `stopping` is set."""

    def __init__(
        self,
        directory: Directory,
        etcd: Etcd,
        compute: Compute,
        transfer: Transfer,
        source: TaskSource,
        master: MasterPort,
        stopping: asyncio.Event,
    ) -> None:
        self._directory, self._etcd, self._compute = directory, etcd, compute
        self._transfer, self._source, self._master, self._stopping = transfer, source, master, stopping
        self._pulled = False
        self.busy = False

    async def run(self, first: Task | None = None) -> None:
        """`first`: a task that was acquired already."""
        if first is not None:
            await self._do(first)
        while not self._stopping.is_set():
            try:
                answer = await self._source.acquire(self._transfer.generation)
            except StaleGeneration:
                await self._directory.changed(self._directory.revision, REFRESH_S)
                continue
            if answer.answer == "end":
                return
            if answer.task is not None:
                await self._do(answer.task)

    async def _do(self, task: Task) -> None:
        self.busy = True
        try:
            await self._work(task)
        finally:
            self.busy = False

    async def _work(self, task: Task) -> None:
        log.info("task_started", task=task.task_id, attempt=task.attempt)
        try:
            await self._pull_final()
            done = await (self._evaluate(task) if task.kind is TaskKind.EVALUATE else self._export(task))
        except UserCodeError as error:
            await self._source.fail(task, failure_of(error, task=described(task), trainer=self._source.trainer))
            return
        except TaskFailed as failed:
            await self._source.fail(task, failure_of(failed.error, task=described(task), trainer=self._source.trainer))
            return
        try:
            await persist(lambda: self._master.complete_task(task.task_id, done), f"completing task {task.task_id}")
        except StaleAttempt as error:
            log.info("report_refused", task=task.task_id, cause=error.message)

    async def _pull_final(self) -> None:
        if not self._pulled:
            with single_error():
                await self._transfer.pull(None)
            self._compute.swap()
            self._pulled = True

    async def _evaluate(self, task: Task) -> CompleteTask:
        held = Holding(task, await self._source.read(task))
        sums: dict[str, float] = {}
        for number in range(minibatches_in(len(held.shard), self._source.spec.minibatch_size)):
            for name, value in (await self._compute.evaluate(self._source.minibatch(held, number))).items():
                sums[name] = sums.get(name, 0.0) + value
        return self._report(task, sums=sums)

    async def _export(self, task: Task) -> CompleteTask:
        """The metrics travel in the export's own report: only a trainer can run the user's `metrics(sums)`."""
        key = self._directory.keys.evaluation
        found = await persist(lambda: self._etcd.get(key), "the sums of the evaluation")
        sums = EvaluationSums.model_validate_json(found.value).sums if found else {}
        place = storage.join(self._source.spec.storage, "export")
        try:
            exports = await self._compute.export(place)
        except (OSError, InvalidArgument) as error:
            message = f"the model cannot be written to {place}: {error}"
            raise TaskFailed(task, InvalidArgument(message)) from error
        return self._report(task, exports=exports, sums=await self._compute.metrics(sums) if sums else {})

    def _report(
        self, task: Task, *, sums: dict[str, float] | None = None, exports: dict[str, str] | None = None
    ) -> CompleteTask:
        return CompleteTask(
            trainer=self._source.trainer,
            attempt=task.attempt,
            records=task.count,
            sums=sums or {},
            exports=exports or {},
            epoch=task.epoch,
        )
