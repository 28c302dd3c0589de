"""Train a user's script in this process, without any service. The result is that of a one-lane cluster run,
bit for bit.

    if __name__ == "__main__":
        trireme.train(__name__)

The user's own optimizer steps. Tasks, order of records, evaluations and random numbers are those of a job
with one lane. The script is tried first, in a process of its own, as `trireme run` tries it: what a job
refuses is refused here.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from master_service.core.queue.file_table import FileTable, TaskSizes
from master_service.core.queue.streams import Streams, news_of, plan_of
from master_service.core.state.series import Series, Value
from master_service.storage.job_storage import count_records
from trainer_agent.data import (
    Blaming,
    Minibatch,
    blaming,
    default_collate,
    evaluation_seed,
    minibatch_indices,
    minibatches_in,
    open_dataset,
)
from trainer_agent.data.in_code import reading
from trainer_agent.model import optimizer as optimizer_spec
from trainer_agent.model.averages import averages_of, begin_apart
from trainer_agent.model.buffer_policies import policies_of
from trainer_agent.model.compute import BeforeStep
from trainer_agent.model.devices import (
    autocast,
    check_precision,
    compile_each_shape_alone,
    device_of,
    on_device,
)
from trainer_agent.model.flat import checked_model, plan
from trainer_agent.model.gradient_tree import (
    GradientClipper,
    LeftOutError,
    NonFiniteError,
    check_gradients,
    check_loss,
)
from trainer_agent.model.losses import LossReader
from trainer_agent.model.metric_objects import MetricObjects
from trainer_agent.model.minibatch import BackwardGuard, metrics_of, numbers_of
from trainer_agent.model.schedule import Schedule, made_by
from trainer_agent.model.torch_compute import write_model
from trainer_agent.model.watch.freezing import FrozenParameters, on_gradient
from trainer_agent.model.watch.minibatch_rules import MissingGradients, Modes, evaluating
from trainer_agent.model.watch.own_state import Watch
from trainer_agent.model.watch.unshared_state import UnsharedState
from trainer_agent.own_loop.changes import BUFFERS
from trainer_agent.own_loop.job_steps import JobSteps, telling, training_at
from trainer_agent.own_loop.turns import use_threads
from trainer_agent.script.user_module import UserModule, is_loading
from trainer_agent.start_values import load_start_state, load_start_values
from trainer_agent.tables.files import StoredTable, write_tables
from trainer_agent.tables.trained import OneLane
from trireme import settings
from trireme.preflight import ScriptError
from trireme.script_trial import say, try_script
from trireme.view.chart import show_chart
from trireme.view.report import ProgressLines, failure_lines
from trireme_shared.datasets.random_state import START_SEED, drawing, seed_everything
from trireme_shared.platform.runtime.service import allow_open_files
from trireme_shared.platform.storage import files
from trireme_shared.protocol.errors import InvalidArgument, TriremeError, UserCodeError
from trireme_shared.protocol.evaluations import (
    Evaluation,
    Patience,
    better,
    check_criteria,
    patience_after,
    why_unreported,
)
from trireme_shared.protocol.lanes import step_seed
from trireme_shared.protocol.metrics import LOSS, Logged, add, collected
from trireme_shared.protocol.records import EvaluationSums, JobSpec, TaskKind
from trireme_shared.protocol.records.metric_states import Sum, merged
from trireme_shared.protocol.records.tasks import BestEvaluation
from trireme_shared.protocol.urls import without_passwords
from trireme_shared.serving.optimizers.several import Several, joined, parts_of

ALONE = {
    "mode": "sync", "lanes": 1, "gradient_dtype": "float32", "parameter_dtype": "float32",
    "error_feedback": None, "checkpoint_kind": "coordinated", "skip_after_seconds": None,
    "lr_staleness_modulation": False, "max_staleness": None,
}  # fmt: skip
ONE_LANE = {name: settings.Setting(value, "plain training") for name, value in ALONE.items()}


def train(module: str = "__main__", arguments: Sequence[str] | None = None) -> PlainResult:
    """Train the script that was imported as `module`, with the settings of the command line. Progress goes to
    stderr, metrics to stdout.

    `arguments`: instead of sys.argv. Raises SystemExit(1) after one message about an error in the script or
    its data, SystemExit(2) for invalid settings and for what a job refuses; RuntimeError if it is called
    while a process of a job imports the script.
    """
    script = sys.modules[module]
    if is_loading(script):
        where = 'under `if __name__ == "__main__":`'
        raise RuntimeError(f"{module} calls trireme.train when it is imported; put the call {where}")
    options = _parser().parse_args(arguments)
    allow_open_files()
    try:
        user = UserModule(Path(str(script.__file__)), script)
        # else readers, which find dataset() by name, would run the script again
        sys.modules.setdefault(user.path.stem, script)
        flags = {
            name: getattr(options, name)
            for name in ("epochs", "seed", "global_batch_size", "init_from", "init_partial", "init_optimizer")
        }
        spec = plain_spec(user, flags, options.set)
        outside = settings.outside_script(flags, options.set)
        if options.check:
            _try(user, spec, outside)
        elif told := user.taken_over({name: each.value for name, each in outside.items()}):
            say("\n".join(told))
        result = run(user, spec, report=say)
        for name, value in result.metrics.items():
            print(f"{name} {value:.6g}")  # noqa: T201
        if options.export:
            for path in _write(result.model, result.tables.stored(), options.export):
                print(path)  # noqa: T201
            if result.best is not None:
                print(f"best {result.best.metric} {result.best.value:.6g} at step {result.best.step}")  # noqa: T201
                for path in _write_best(result, files.join(options.export, "best")):
                    print(path)  # noqa: T201
        else:
            say("the model is not kept; --export FOLDER writes it")
        show_chart(LOSS, result.curve)
    except ScriptError as error:
        print(without_passwords("\n".join(failure_lines(error.failure))), file=sys.stderr)  # noqa: T201
        raise SystemExit(1) from error
    except UserCodeError as error:
        print(str(error.details.get("traceback") or error.message).rstrip(), file=sys.stderr)  # noqa: T201
        raise SystemExit(1) from error
    except TriremeError as error:
        why = f"error: {error.message}" + (f"\nhint: {error.hint}" if error.hint else "")
        print(without_passwords(why), file=sys.stderr)  # noqa: T201
        raise SystemExit(2 if isinstance(error, settings.UsageError) else 1) from error
    return result


def _try(user: UserModule, spec: JobSpec, outside: Mapping[str, settings.Setting]) -> None:
    """As a job with these settings does it. Those that a job refuses and one lane allows are told. Raises
    what preflight.inspect raises."""
    given = {name: setting for name, setting in outside.items() if name in settings.SETTINGS}
    try:
        datasets = {"dataset": spec.dataset, "evaluation_dataset": spec.evaluation_dataset}
        _spec_of(user, _merged(user, outside), **datasets)
    except settings.UsageError as error:
        say(f"`trireme run` refuses these settings: {error.message}")
        given |= {name: setting for name, setting in ONE_LANE.items() if setting.value is not None}
    try_script(user.path, given)


def _write(model: nn.Module, tables: Sequence[StoredTable], directory: str) -> list[str]:
    return [*write_model(model, directory).values(), *write_tables(tables, directory).values()]


def _write_best(result: PlainResult, directory: str) -> list[str]:
    best = copy.deepcopy(result.model)
    best.load_state_dict(result.best_state)
    return _write(best, result.best_tables, directory)


def plain_spec(user: UserModule, flags: Mapping[str, Any], assignments: Sequence[str] = ()) -> JobSpec:
    """The spec of a one-lane synchronous job from flags, environment, trireme.toml and the script's config.

    Raises settings.UsageError, InvalidArgument, UserCodeError.
    """
    outside = settings.outside_script(flags, assignments)
    merged = _merged(user, outside)
    seed = merged["seed"].value if "seed" in merged else JobSpec.model_fields["seed"].default
    seed = seed if isinstance(seed, int) else 0  # what is no number is refused below
    dataset = user.dataset(seed=seed)
    held_out = user.dataset("evaluation_dataset", seed) if user.has("evaluation_dataset") else None
    merged = _merged(user, outside)  # with the settings of a DataLoader
    return _spec_of(user, merged | ONE_LANE, dataset=dataset, evaluation_dataset=held_out)


def _merged(user: UserModule, outside: Mapping[str, settings.Setting]) -> dict[str, settings.Setting]:
    named = {"job": settings.Setting(settings.job_name(user.path), "the script")}
    return {**named, **settings.merge([settings.from_script(user.config)]), **outside}


def _spec_of(user: UserModule, merged: Mapping[str, settings.Setting], **datasets: Any) -> JobSpec:
    return settings.job_spec(merged, script=str(user.path), storage=str(user.path.parent), **datasets)


def run(user: UserModule, spec: JobSpec, report: Any = lambda _: None) -> PlainResult:
    """Train and evaluate. Raises DatasetError, InvalidArgument, UserCodeError; InvalidArgument for more than
    one lane."""
    if spec.lanes != 1:
        raise InvalidArgument(f"plain training has one lane, the spec has {spec.lanes}", hint="set lanes=1")
    overruled = use_threads(spec.threads_per_trainer)
    if overruled and user.loop is None:  # else it is told of the thread that the script runs in
        report(overruled)
    counted = count(spec, report)
    with telling(lambda: JobSteps(counted.steps, spec.epochs)):
        return _train(user, spec, counted, report)


def _train(user: UserModule, spec: JobSpec, counted: Counted, report: Any) -> PlainResult:
    device = device_of(spec.device, deterministic=spec.deterministic)
    model = checked_model(drawing(spec.seed, user.call, "model"))
    if spec.deterministic:
        compile_each_shape_alone()
    started = load_start_values(model, spec)
    for sentence in filter(None, (started.sentence, optimizer_spec.rates_sentence(spec))):
        report(sentence)
    check_precision(spec.precision, model, device)
    model = model.to(device)
    made = joined(drawing(spec.seed, user.call, "optimizer", model), "optimizer(model) returned")
    optimizer = optimizer_spec.scaled(made, spec)
    policies, averages = policies_of(model, user.buffers), averages_of(model)
    apart = begin_apart(averages)
    for average in averages:  # as every version that is loaded in a job
        average.follow()
    thaws = user.loop is None
    # refuses what no job can train
    laid_out = plan(model, optimizer, spec.block_bytes, spec.slot_count, policies=policies, thaws=thaws)
    tables = OneLane(model, spec.seed, spec.slot_count, optimizer)
    tables.start_with(started.tables)
    schedule = Schedule(made_by(user, optimizer, spec.seed), spec, user.guard)
    load_start_state(model, optimizer, schedule.scheduler, spec)
    for part in parts_of(optimizer):  # a first step that is left out is no mistake in the order of calls
        vars(part)["_opt_called"] = True
    named = dict(model.named_parameters())
    guard = BackwardGuard(user, several=isinstance(optimizer, Several))
    trained = {place.name: named[place.name] for place in laid_out.parameters}
    parameters, without = list(trained.values()), MissingGradients(laid_out)
    reads = LossReader(user, optimizer, trained, tables=tables.are_there)
    freezing = FrozenParameters(laid_out, parameters, thaws=thaws)
    modes = Modes(model, own_loop=user.loop is not None)
    for told in filter(None, (apart, modes.notice)):
        report(told)
    clipper = None if spec.clip_grad_norm is None else GradientClipper(laid_out, spec.clip_grad_norm, device)
    unshared = UnsharedState(model, laid_out, optimizer, user, steps_elsewhere=False)

    def on_made(parameter: torch.Tensor) -> None:
        guard.permit()
        if parameter.grad is not None and parameter.grad.is_sparse:  # as at a trainer, to clip and step it
            parameter.grad = parameter.grad.to_dense()

    hooks = [on_gradient(parameter, on_made) for parameter in parameters]
    result = PlainResult(model, optimizer, tables)
    reader = user.reader_of(spec.dataset, spec.seed, report if spec.changed_files == "report" else None)
    progress = ProgressLines(spec, counted.table.records, report)
    watch, told_of_buffers, by_columns = Watch(user.path, model), False, not user.has("collate")
    evaluations = Evaluations(user, spec, counted.steps, device, report, reads)
    for epoch in range(spec.epochs):
        loss_sum, records, trained_records = 0.0, 0, 0
        sums: dict[str, Logged] = {}
        for number, minibatch in enumerate(
            epoch_minibatches(spec, counted.table, epoch, reader, by_columns=by_columns)
        ):
            seed_everything(step_seed(spec.seed, result.steps, 0) if result.steps else START_SEED)
            if user.loop is not None:  # it goes on to its next batch
                unshared.begin()
                guard.begin()
                unshared.check(user)
                if user.loop.undone_buffer and not told_of_buffers:
                    told_of_buffers = True
                    report(BUFFERS.format(name=user.loop.undone_buffer))
                if user.loop.threads_notice and result.steps == 0:
                    report(user.loop.threads_notice)
            schedule.before_step(BeforeStep(epoch > 0 and number == 0, evaluations.plateau_value))
            seed_everything(step_seed(spec.seed, result.steps, 0))
            modes.set_training()
            freezing.begin()
            if user.loop is None:  # else the script does it
                optimizer.zero_grad()
            keeps = spec.on_nonfinite == "skip" or user.loop is not None  # the minibatch may be left out
            buffers = [buffer.clone() for buffer in model.buffers()] if keeps else []
            with tables.minibatch(guard.permit) as recorded:
                with collected() as logged:
                    batch = batch_of(user, minibatch, device)
                    unshared.begin(again=user.loop is not None)
                    with autocast(spec.precision, device), training_at((result.steps, epoch)):
                        found = guard.call("loss", model, batch)
                losses = reads.read(found)
                unshared.check(user)
                modes.check(user)
                if modes.left and result.steps == 0:
                    report(modes.left)
                to_report = guard.reported(losses).detach().clone()
                freezing.forward_over(losses)
                stepped = guard.run(losses)
                unshared.check(user)
            rows = recorded.lane_rows(len(minibatch), guard.row_factor)
            error: NonFiniteError | None = None if stepped else LeftOutError()
            error = error or _nonfinite(spec, to_report, trained, tables.gradients(rows))
            if error is None:
                if spec.clip_lane_norm is not None:
                    nn.utils.clip_grad_norm_(parameters, spec.clip_lane_norm)
                had = [parameter.grad is not None for parameter in parameters]
                freezing.backward_over(user, had)
                without.minibatch(had, freezing.indices)
                for told in without.told():
                    report(f"warning: {told}")
                for index in {at for at, it in enumerate(had) if not it} - freezing.indices:
                    parameters[index].grad = torch.zeros_like(parameters[index])  # as a job steps it
                if clipper is not None:
                    clipper.clip([parameter.grad for parameter in parameters])
                user.guard(optimizer.step)
                freezing.next_step()
                tables.step(rows)
                for average in averages:
                    average.follow()
                found_loss = to_report.item()
                loss_sum += found_loss * len(minibatch)
                result.curve.append(result.steps, 0, Value(found_loss, 1, found_loss, found_loss))
                trained_records += len(minibatch)
                user.guard(add, logged, losses.metrics, float(len(minibatch)))
                sums |= {name: sums[name].plus(it) if name in sums else it for name, it in logged.items()}
            elif spec.on_nonfinite == "skip" or not stepped:
                report(f"step {result.steps} is left out: {error}")
                for buffer, before in zip(model.buffers(), buffers, strict=True):
                    buffer.copy_(before)
                tables.step(None)
            else:
                raise user.error_of(error)
            if told := watch.after_minibatch():
                report(f"warning: {told}")
            schedule.after_step()
            records += len(minibatch)
            result.steps += 1
            evaluations.after_step(result)
            progress.update(epoch, result.steps, records, _means(loss_sum, trained_records, sums))
            if evaluations.stopped:
                break
        result.records += trained_records
        result.epochs.append(_means(loss_sum, trained_records, sums))
        result.losses.append(result.epochs[-1][LOSS])
        progress.update(epoch, result.steps, records, result.epochs[-1], final=True)
        if evaluations.stopped:
            break
    unshared.check_at_end(user)
    for hook in hooks:
        hook.remove()  # the model is the caller's now
    evaluations.after_training(result)
    return result


def _means(loss_sum: float, records: int, sums: Mapping[str, Logged]) -> dict[str, float]:
    return {LOSS: loss_sum / max(records, 1)} | {
        name: value.total / value.weight for name, value in sums.items()
    }


def _nonfinite(
    spec: JobSpec, loss: torch.Tensor, trained: Mapping[str, nn.Parameter], rows: Mapping[str, torch.Tensor]
) -> NonFiniteError | None:
    """What is not finite in this minibatch, if the job minds. `rows`: gradients of tables."""
    if spec.on_nonfinite == "ignore":
        return None
    try:
        check_loss(loss.item())
        check_gradients({name: p.grad for name, p in trained.items() if p.grad is not None} | dict(rows))
    except NonFiniteError as error:
        return error
    return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Train this script in one process, without any service.")
    parser.add_argument("--epochs", type=int, metavar="N")
    parser.add_argument("--seed", type=int, metavar="N")
    parser.add_argument("--global-batch-size", type=int, metavar="N")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="any other setting of trireme.Config"
    )
    parser.add_argument("--init-from", metavar="FILE", help="start with the parameters in this file")
    for name, text in (
        ("partial", "leave out what does not fit"),
        ("optimizer", "take its optimizer's state along"),
    ):
        parser.add_argument(f"--init-{name}", action="store_true", default=None, help=text)
    parser.add_argument(
        "--no-check", dest="check", action="store_false", help="do not try the script as a job tries it"
    )
    parser.add_argument(
        "--export", metavar="DIR", help="write the trained model there (safetensors and state_dict)"
    )
    return parser


@dataclass(slots=True)
class PlainResult:
    """`metrics` as the script's `metrics(sums)` gives them; `losses`: mean loss of each epoch; `epochs`:
    means of the loss and of what the script logs, by epoch. `evaluations`: those while it trained; `best`,
    `best_state`, `best_tables`: of the best one, that after training included, as `keep_best` says. `curve`:
    the loss by step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    tables: OneLane
    steps: int = 0
    records: int = 0
    losses: list[float] = field(default_factory=list)
    curve: Series = field(default_factory=Series)
    epochs: list[dict[str, float]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    evaluations: list[Evaluation] = field(default_factory=list)
    best: BestEvaluation | None = None
    best_state: dict[str, torch.Tensor] = field(default_factory=dict)
    best_tables: tuple[StoredTable, ...] = ()


class Counted(NamedTuple):
    """A dataset whose records were counted."""

    table: FileTable
    #: How many steps an epoch has.
    steps: int


def count(spec: JobSpec, report: Callable[[str], object]) -> Counted:
    """Count the dataset of a job with one lane; `report` gets what the user should know of it. Raises
    DatasetError."""
    table = count_records(spec.dataset, TaskSizes.of(spec), seed=spec.seed)
    plan = plan_of(spec, Streams(TaskKind.TRAIN, table, 1, spec.seed, spec.shuffle, spec.minibatch_size))
    for event in news_of(spec, table, plan):
        report(event.message)
    assert plan.steps is not None
    return Counted(table, plan.steps)


def epoch_minibatches(
    spec: JobSpec, table: FileTable, epoch: int, reader: Blaming | None = None, *, by_columns: bool = False
) -> Iterator[Minibatch]:
    """All minibatches of an epoch, in the order in which the only lane trains them. `reader`: of the dataset,
    to use it for several epochs. `by_columns`: nobody asks for records one by one."""
    reader = reader or open_dataset(spec.dataset, spec.seed)
    order = Streams(TaskKind.TRAIN, table, 1, spec.seed, spec.shuffle, spec.minibatch_size).order(epoch)
    for position in range(table.tasks):
        task = order.task_at(position)
        place = table.locate(task)
        with reading(epoch):
            shard = reader.read(place.file, place.first, place.count, place.offset, place.stamp)
        if by_columns:
            shard.keep_columns()
        for number in range(minibatches_in(place.count, spec.minibatch_size)):
            yield shard.minibatch(
                minibatch_indices(
                    spec.seed, epoch, task, place.count, spec.minibatch_size, number, shuffle=spec.shuffle
                )
            )


def batch_of(user: UserModule, minibatch: Minibatch, device: torch.device) -> Any:
    """What the script's loss gets."""
    if user.has("collate"):
        batch = user.call("collate", list(minibatch))
    elif minibatch.collate is not None:
        batch = user.guard(default_collate, minibatch)
    else:
        with blaming("the minibatch:", 0, len(minibatch)):
            batch = default_collate(minibatch)
    return batch if device.type == "cpu" else on_device(batch, device)


class Evaluations:
    """While the model trains, as `evaluate_every`, `keep_best` and `stop_early` say, and after it. `stopped`:
    training ends here. `plateau_value`: see BeforeStep.metric, for the next step. `per_epoch`: steps of an
    epoch. The evaluation dataset is counted here, so that all have the same records. Raises DatasetError."""

    def __init__(
        self,
        user: UserModule,
        spec: JobSpec,
        per_epoch: int,
        device: torch.device,
        report: Any,
        reads: LossReader,
    ) -> None:
        self._user, self._spec, self._device, self._report, self._reads = user, spec, device, report, reads
        self._per_epoch, self._steps = per_epoch, per_epoch * spec.epochs
        self._patience: Patience | None = None
        self.stopped = False
        self.plateau_value: float | None = None
        self._held_out: tuple[Blaming, FileTable] | None = None
        self._objects = MetricObjects(user, device)
        if (dataset := spec.evaluation_dataset) is not None:
            reader = user.reader_of(dataset, spec.seed, report if spec.changed_files == "report" else None)
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
            result.best_state = {
                name: value.detach().clone() for name, value in result.model.state_dict().items()
            }
            result.best_tables = result.tables.stored()
        result.evaluations.append(done)
        result.best = best

    def _evaluate(self, model: nn.Module) -> dict[str, float]:
        """Task by task, as trainers do it, with the same numbers. Each minibatch finds the model's modes and
        buffers as they were, and so does training."""
        assert self._held_out is not None
        user, spec, (reader, table) = self._user, self._spec, self._held_out
        size = spec.minibatch_size
        buffers = [buffer.clone() for buffer in model.buffers()]
        total = EvaluationSums()
        with torch.no_grad():
            for task in range(table.tasks):
                place = table.locate(task)
                shard = reader.read(place.file, place.first, place.count, place.offset, place.stamp)
                if not user.has("collate"):
                    shard.keep_columns()
                sums: dict[str, Sum] = {}
                for number in range(minibatches_in(place.count, size)):
                    seed_everything(evaluation_seed(spec.seed, task, number))
                    minibatch = shard.minibatch(
                        minibatch_indices(spec.seed, 0, task, place.count, size, number, shuffle=False)
                    )
                    with evaluating(model):
                        found = self._sums(model, minibatch)
                    for name, value in found.items():
                        sums[name] = merged(name, sums.get(name), value)
                    for buffer, before in zip(model.buffers(), buffers, strict=True):
                        buffer.copy_(before)
                total = total.plus(sums, task).bounded()
        return metrics_of(user, self._objects, total.sums)

    def _sums(self, model: nn.Module, minibatch: Minibatch) -> dict[str, Sum]:
        user, objects = self._user, self._objects.begin()
        batch = batch_of(user, minibatch, self._device)
        with autocast(self._spec.precision, self._device):
            found = user.call("evaluate" if user.has("evaluate") else "loss", model, batch, *objects)
        if not user.has("evaluate"):
            found = self._reads.sums(found, len(minibatch))
        elif objects and found is None:
            found = {}
        return self._objects.beside(numbers_of(user, "evaluate(model, batch)", found))
