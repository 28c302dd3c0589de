"""Evaluations of plain training: while it goes on and after it, as a job with one lane makes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from master_service.core.queue.file_table import FileTable
from master_service.core.queue.task_sizes import TaskSizes
from master_service.storage.counting import count_records
from trainer_agent.data import Blaming, Minibatch, evaluation_seed, minibatch_indices, minibatches_in, open_dataset
from trainer_agent.model.devices import autocast
from trainer_agent.model.minibatch import means_of, sums_of
from trainer_agent.model.watch.modes import evaluating
from trainer_agent.script.user_module import UserModule
from trireme.plain.minibatches import batch_of
from trireme.plain.result import PlainResult
from trireme_shared.datasets.random_state import START_SEED, seed_everything, seeded
from trireme_shared.protocol.evaluations import (
    Evaluation,
    Patience,
    better,
    check_criteria,
    patience_after,
    why_unreported,
)
from trireme_shared.protocol.records import EvaluationSums, JobSpec
from trireme_shared.protocol.records.job_choices import Precision


def _sums(
    user: UserModule, precision: Precision, model: nn.Module, minibatch: Minibatch, device: torch.device
) -> Mapping[str, Any]:
    batch = batch_of(user, minibatch, device)
    with autocast(precision, device):
        found = user.call("evaluate" if user.has("evaluate") else "loss", model, batch)
    sums: Mapping[str, Any] = found if user.has("evaluate") else sums_of(found, len(minibatch), user.guard)
    return sums


class Evaluations:
    """While the model trains, as `evaluate_every`, `keep_best` and `stop_early` say, and after it. `stopped`: training ends here. `plateau_value`: see
    BeforeStep.metric, for the next step. `per_epoch`: steps of an epoch. The evaluation dataset is counted here, so that all evaluations are of the
    same records. Raises DatasetError."""

    def __init__(self, user: UserModule, spec: JobSpec, per_epoch: int, device: torch.device, report: Any) -> None:
        self._user, self._spec, self._device, self._report = user, spec, device, report
        self._per_epoch, self._steps = per_epoch, per_epoch * spec.epochs
        self._patience: Patience | None = None
        self.stopped = False
        self.plateau_value: float | None = None
        self._held_out: tuple[Blaming, FileTable] | None = None
        if (dataset := spec.evaluation_dataset) is not None:
            reader = open_dataset(dataset, spec.seed, report if spec.changed_files == "report" else None)
            self._held_out = reader, count_records(dataset, TaskSizes.evaluated(spec), seed=spec.seed)

    def after_step(self, result: PlainResult) -> None:
        """`result.steps` are done. The last one is evaluated after training."""
        every, step = self._spec.evaluate_every, result.steps
        self.plateau_value = None
        steps = self._per_epoch if every == "epoch" else every
        if steps is None or step % int(steps) or step >= self._steps:
            return
        if self._patience is not None and self._patience.over:
            self.stopped = True
            self._report(f"training ends at step {step}, as stop_early says")
            return
        if self._spec.plateau_metric is not None and result.evaluations:
            self.plateau_value = result.evaluations[-1].metrics.get(self._spec.plateau_metric, math.nan)
        metrics = self._evaluate(result.model)
        check_criteria(self._spec, metrics)
        self._note(result, step // int(steps), metrics)
        self._patience = patience_after(self._patience, result.evaluations[-1].metrics, self._spec.stop_early)
        shown = ", ".join(f"{name} {value:.6g}" for name, value in metrics.items())
        best = " (the best so far)" if result.best is not None and result.best.step == step else ""
        self._report(f"evaluation {step // int(steps)} (step {step}): {shown}{best}")

    def after_training(self, result: PlainResult) -> None:
        """In place: the last evaluation, which may be the best one."""
        if self._held_out is None:
            return
        result.metrics = self._evaluate(result.model)
        if self._spec.keep_best is not None:
            if why := why_unreported(self._spec, result.metrics):
                self._report(f"{why}: the last model alone is kept")
            self._note(result, len(result.evaluations) + 1, result.metrics)
            del result.evaluations[-1]

    def _note(self, result: PlainResult, number: int, metrics: Mapping[str, float]) -> None:
        """In place."""
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        done = Evaluation(number=number, step=result.steps, timeline=0, checkpoint="", metrics=finite)
        best = better(result.best, done, self._spec.keep_best)
        if best is not None and best.step == result.steps:
            result.best_state = {name: value.detach().clone() for name, value in result.model.state_dict().items()}
            result.best_tables = result.tables.stored()
        result.evaluations.append(done)
        result.best = best

    def _evaluate(self, model: nn.Module) -> dict[str, float]:
        """Task by task, as trainers do it, so the numbers are the same. The model's buffers stay as they are."""
        assert self._held_out is not None
        user, spec, (reader, table) = self._user, self._spec, self._held_out
        size = spec.minibatch_size
        buffers = [buffer.clone() for buffer in model.buffers()]
        total = EvaluationSums()
        with evaluating(model), torch.no_grad():
            for task in range(table.tasks):
                place = table.locate(task)
                shard = reader.read(place.file, place.first, place.count, place.offset, place.stamp)
                if not user.has("collate"):
                    shard.keep_columns()
                sums: dict[str, float] = {}
                for number in range(minibatches_in(place.count, size)):
                    seed_everything(evaluation_seed(spec.seed, task, number))
                    minibatch = shard.minibatch(
                        minibatch_indices(spec.seed, 0, task, place.count, size, number, shuffle=False)
                    )
                    for name, value in _sums(user, spec.precision, model, minibatch, self._device).items():
                        sums[name] = sums.get(name, 0.0) + float(value)
                total = total.plus(sums)
            for buffer, before in zip(model.buffers(), buffers, strict=True):
                buffer.copy_(before)
        if user.has("metrics"):
            with seeded(START_SEED):
                return {name: float(value) for name, value in user.call("metrics", dict(total.sums)).items()}
        return dict(total.sums) if user.has("evaluate") else means_of(total.sums)
