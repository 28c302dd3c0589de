"""`trireme.lightning(module, datamodule)`: a LightningModule in place of a script's functions, for the part
of Lightning's Trainer.fit that is one loss and one optimizer.

    model()               the module; self.log, self.trainer, self.current_epoch are the job's
    dataset()             prepare_data, setup("fit"), train_dataloader    evaluation_dataset()  val_dataloader
    loss(model, batch)    on_fit_start, on_train_start, on_train_epoch_start, on_train_batch_start,
                          training_step, on_before_backward
    optimizer, scheduler  configure_optimizers
    evaluate, metrics     on_validation_batch_start, validation_step; means and objects of self.log

They stand in the script's module under names that begin with PREFIX, beside whatever the script itself calls
`model` or `loss`. Lightning is never imported here: the script has done that, as `lightning.pytorch` or
`pytorch_lightning`. What a job would not call as Lightning does is refused, by name.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from trainer_agent.model.schedule import Wanted, want
from trainer_agent.own_loop.job_steps import known_steps, place_in_training, steps_per_epoch, total_steps
from trireme_shared.datasets.random_state import START_SEED, seeded
from trireme_shared.protocol.errors import InvalidArgument

PREFIX = "trireme_"
PACKAGES = ("lightning", "pytorch_lightning")
PAGE = "(docs/lightning.md)"
#: What to do instead of methods that a job would not call, or not when their names say.
REFUSED = {
    "parameter servers step: return the loss, and leave it out":
        "optimizer_step optimizer_zero_grad backward lr_scheduler_step on_before_zero_grad",
    "set clip_grad_norm, or change gradients by hooks of parameters (register_hook)":
        "configure_gradient_clipping on_before_optimizer_step on_after_backward",
    "no trainer sees all batches: log in training_step, and do with the export what follows training":
        "on_train_batch_end on_train_epoch_end on_train_end on_fit_end",
    "no trainer sees the whole evaluation: log numbers and torchmetrics objects in validation_step":
        "on_validation_start on_validation_epoch_start on_validation_batch_end on_validation_epoch_end "
        "on_validation_end",
    "modes are set for each minibatch: call eval() of parts in __init__":
        "on_validation_model_eval on_validation_model_train on_validation_model_zero_grad",
    "settings take their place: keep_best, stop_early, trackers": "configure_callbacks",
    "each trainer has the whole model: make it in configure_model": "configure_sharded_model",
    "the job moves batches: give them a to(device)": "transfer_batch_to_device",
    "keep it in buffers of the module": "on_save_checkpoint on_load_checkpoint",
}  # fmt: skip
STARTS = "on_fit_start", "on_train_start", "on_train_epoch_start"
MEAN, RECORDS, OBJECT = "mean ", "records ", "object "  # what names of sums of an evaluation begin with
_logging: ContextVar[dict[str, Any] | None] = ContextVar("logging", default=None)
_kinds: dict[type, type] = {}
#: The epoch that was begun last with each module, in this process.
_begun: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


def lightning(
    module: Any, train_dataloaders: Any = None, val_dataloaders: Any = None, datamodule: Any = None
) -> None:
    """Train this module when the script is trained, as `Trainer.fit` with these arguments: call it at the top
    level of the script.

    `module`: a LightningModule, with the values that the script has given it; or a class or function that
    makes it, with random numbers of the setting `seed`. `train_dataloaders`, `val_dataloaders`: a DataLoader
    or a function that makes it; or, in place of the first, a LightningDataModule, or its class. Raises
    InvalidArgument for what a job would do otherwise than Lightning, with its name and what to do.
    """
    scope = sys._getframe(1).f_globals  # noqa: SLF001  the script's module
    if f"{PREFIX}model" in scope:
        raise InvalidArgument("trireme.lightning is called twice in one script: a job trains one module")
    if _is_of("LightningDataModule", train_dataloaders):
        train_dataloaders, datamodule = None, train_dataloaders
    kind = _kind_of(module)
    made = _Made(module, datamodule() if isinstance(datamodule, type) else datamodule)
    loaders = {"train_dataloader": train_dataloaders, "val_dataloader": val_dataloaders}

    def dataset() -> Any:
        return made.loader("train_dataloader", train_dataloaders)

    def evaluation_dataset() -> Any:
        return made.loader("val_dataloader", val_dataloaders)

    found = {"model": made.model, "loss": _loss, "optimizer": made.optimizer, "scheduler": made.scheduler}
    source = kind if made.datamodule is None else type(made.datamodule)
    there = {name for name, loader in loaders.items() if loader is not None or _overrides(source, name)}
    if "train_dataloader" in there:
        found["dataset"] = dataset
    if _overrides(kind, "validation_step"):
        found |= {"evaluate": _evaluate, "metrics": _metrics, "evaluation_metrics": made.objects}
        if "val_dataloader" in there:
            found["evaluation_dataset"] = evaluation_dataset
    scope.update({f"{PREFIX}{name}": function for name, function in found.items()})


def _is_of(name: str, found: Any) -> bool:
    """Whether it is an object of Lightning's class `name` or a class below it, from any of its packages."""
    kind = found if isinstance(found, type) else type(found)
    return any(each.__name__ == name and _is_lightnings(each) for each in kind.__mro__)


def _is_lightnings(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in PACKAGES


def _overrides(kind: type, name: str) -> bool:
    owner = next((each for each in kind.__mro__ if name in vars(each)), None)
    return owner is not None and not _is_lightnings(owner)


def _kind_of(module: Any) -> type:
    if callable(module) and not isinstance(module, type | nn.Module):
        module = module()
    if not _is_of("LightningModule", module):
        msg = f"trireme.lightning got {type(module).__name__}; give a LightningModule, or what makes it"
        raise InvalidArgument(f"{msg} {PAGE}")
    kind = module if isinstance(module, type) else type(module)
    for hint, names in REFUSED.items():
        for name in names.split():
            if _overrides(kind, name):
                what = f"{kind.__name__} has {name}, which a job does not call as Lightning's Trainer does"
                raise InvalidArgument(what, hint=f"{hint} {PAGE}")
    return kind


class _Made:
    """What a process of a job has made of the arguments: the datamodule is set up anew for each seed."""

    def __init__(self, given: Any, datamodule: Any) -> None:
        if datamodule is not None and not _is_of("LightningDataModule", datamodule):
            got = f"trireme.lightning got {type(datamodule).__name__} as the datamodule"
            raise InvalidArgument(got, hint=f"give a LightningDataModule, or DataLoaders before it {PAGE}")
        self._given, self.datamodule = given, datamodule
        self._module: Any = None
        self._scheduler: Any = None
        self.seed: int | None = None  # with which the datamodule was set up

    def ready(self) -> Any:
        """The datamodule, set up; None: there is none."""
        if self.datamodule is not None and self.seed != torch.initial_seed():
            self.seed = torch.initial_seed()
            self.datamodule.trainer = View(self)
            self.datamodule.prepare_data()
            self.datamodule.setup("fit")
        return self.datamodule

    def loader(self, name: str, given: Any) -> Any:
        """A DataLoader, or a dataset."""
        found = given() if callable(given) and not hasattr(given, "__iter__") else given
        if found is None:
            found = getattr(self.ready() or self._module or self.model(), name)()
        if isinstance(found, list | tuple) and len(found) == 1:
            found = found[0]
        if isinstance(found, list | tuple | Mapping):
            msg = (
                f"{name} gives {len(found)} DataLoaders in a {type(found).__name__}; a job reads one dataset"
            )
            raise InvalidArgument(msg, hint=f"join them: torch.utils.data.ConcatDataset {PAGE}")
        return found

    def model(self) -> Any:
        module: Any = copy.deepcopy(self._given) if isinstance(self._given, nn.Module) else self._given()
        if not module.automatic_optimization:
            raise InvalidArgument(
                f"{type(module).__name__} has automatic_optimization = False: a job makes one step of one "
                "optimizer from one loss",
                hint=f"return the loss from training_step, or write the loop with trireme.prepare {PAGE}",
            )
        if _overrides(type(module), "setup"):
            self.ready()
        part: Any
        for part in module.modules():
            if _is_of("LightningModule", part):
                part.__class__ = _in_job(type(part))
                part.in_job = View(self)
        module.prepare_data()
        module.setup("fit")
        module.configure_model()
        self._module = module
        return module

    def optimizer(self, model: Any) -> Any:
        optimizer, self._scheduler, wanted = parts_of(_bare(model).configure_optimizers())
        if self._scheduler is not None:
            want(self._scheduler, wanted)
        return optimizer

    def scheduler(self, _: Any) -> Any:
        return self._scheduler

    def objects(self) -> dict[str, Any]:
        """The torchmetrics objects that validation_step may log."""
        return {name: part for name, part in self._module.named_children() if _is_logged_whole(name, part)}


def parts_of(found: Any) -> tuple[Any, Any, Wanted]:
    """The optimizer, the scheduler or None, and when it is stepped, in what configure_optimizers returned.
    Raises InvalidArgument."""
    if isinstance(found, list | tuple) and len(found) == 1 and isinstance(found[0], Mapping):
        found = found[0]
    monitor, schedulers = None, []
    if isinstance(found, Mapping):
        monitor, schedulers = found.get("monitor"), found.get("lr_scheduler", [])
        found = found.get("optimizer")
    elif isinstance(found, list | tuple) and len(found) == 2 and isinstance(found[0], list | tuple):
        found, schedulers = found
    optimizers = list(found) if isinstance(found, list | tuple) else [found]
    schedulers = list(schedulers) if isinstance(schedulers, list | tuple) else [schedulers]
    if len(optimizers) > 1 or len(schedulers) > 1:
        msg = f"configure_optimizers returned {len(optimizers)} optimizers and {len(schedulers)} schedulers"
        raise InvalidArgument(msg, hint=f"make one of each, with a group for each part {PAGE}")
    if not optimizers or not isinstance(optimizers[0], torch.optim.Optimizer):
        kind = type(optimizers[0] if optimizers else found).__name__
        raise InvalidArgument(f"configure_optimizers returned {kind}; return a torch.optim optimizer")
    given = schedulers[0] if schedulers else None
    given = dict(given) if isinstance(given, Mapping) else {"scheduler": given}
    if given.get("frequency", 1) != 1:
        msg = f"configure_optimizers returned a scheduler with frequency {given['frequency']}; it must be 1"
        raise InvalidArgument(msg, hint="let the scheduler itself change less often, as StepLR(step_size=)")
    wanted = Wanted(given.get("interval", "epoch"), _name(given.get("monitor", monitor) or ""))
    return optimizers[0], given["scheduler"], wanted


class View:
    """`self.trainer` of module and datamodule: what a job can say."""

    is_global_zero, sanity_checking, logger, loggers = True, False, None, ()
    world_size = num_devices = num_nodes = accumulate_grad_batches = 1
    global_rank = local_rank = node_rank = 0

    def __init__(self, made: _Made) -> None:
        self.made = made
        self._per_epoch: int | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError(f"self.trainer.{name}: a job of Trireme has no Trainer of Lightning {PAGE}")

    @property
    def datamodule(self) -> Any:
        return self.made.ready() if self.made.seed is None else self.made.datamodule

    def number_of(self, place: tuple[int, int] | None) -> int:
        """Of the step in its epoch; -1: not known."""
        if place is None or (self._per_epoch is None and known_steps() is None):
            return -1
        self._per_epoch = self._per_epoch or steps_per_epoch()
        return max(place[0] - place[1] * self._per_epoch, 0)

    @property
    def current_epoch(self) -> int:
        return _place()[1]

    @property
    def global_step(self) -> int:
        return _place()[0]

    @property
    def max_epochs(self) -> int | None:
        return None if (steps := known_steps()) is None else steps.epochs

    @property
    def estimated_stepping_batches(self) -> int:
        return total_steps()

    @property
    def num_training_batches(self) -> int:
        return steps_per_epoch()


class _InJob:
    """Comes before the class of a LightningModule: what that has of its Trainer."""

    in_job: View
    logger, loggers, global_rank, local_rank = None, (), 0, 0
    current_epoch = property(lambda self: self.in_job.current_epoch)
    global_step = property(lambda self: self.in_job.global_step)

    @property
    def trainer(self) -> Any:
        return self.in_job

    def log(self, name: str, value: Any, *_: Any, **options: Any) -> None:
        if (reduce := options.get("reduce_fx", "mean")) not in ("mean", torch.mean):
            msg = f"self.log({name!r}) has reduce_fx={reduce!r}; a job keeps means"
            raise InvalidArgument(msg, hint=f"log what a mean is to be made of {PAGE}")
        if (logged := _logging.get()) is None:
            raise InvalidArgument(
                f"self.log({name!r}) is called outside of training_step and validation_step"
            )
        if _is_metric(value):
            logged[f"{OBJECT}{_place_of(self, name, value)} {_name(name)}"] = 1.0, 1
        else:
            logged[_name(name)] = value, options.get("batch_size")

    def log_dict(self, dictionary: Any, *_: Any, **options: Any) -> None:
        for name, value in dictionary.items():
            self.log(name, value, **options)

    def print(self, *arguments: Any, **options: Any) -> None:
        print(*arguments, **options)  # noqa: T201

    def _refused(self, *_: Any, **__: Any) -> None:
        msg = "self.manual_backward, optimizers, lr_schedulers and all_gather are not there: the job makes"
        raise RuntimeError(f"{msg} steps, and trainers do not wait for each other in a minibatch {PAGE}")

    manual_backward = optimizers = lr_schedulers = all_gather = _refused


def _in_job(kind: type) -> type:
    if kind not in _kinds:
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        _kinds[kind] = type(kind.__name__, (_InJob, kind), names)
    return _kinds[kind]


def _is_metric(value: Any) -> bool:
    return all(callable(getattr(value, name, None)) for name in ("update", "compute", "reset"))


def _is_logged_whole(name: str, value: Any) -> bool:
    of_evaluation = not name.startswith(("train", "test")) and not isinstance(value, nn.ModuleDict)
    return of_evaluation and _is_metric(value)


def _place_of(module: Any, logged: str, metric: Any) -> str:
    for name, part in module.named_children():
        if part is metric and not module.training and _is_logged_whole(name, part):
            return str(name)
    raise InvalidArgument(
        f"self.log({logged!r}) got a {type(metric).__name__} object: a job keeps those of an evaluation, "
        "which are attributes of the module and not called train... or test...",
        hint=f"log the number that it gives for the batch, as metric(found, wanted) {PAGE}",
    )


def _name(logged: str) -> str:
    return logged.replace("/", ".")  # names of metrics in a job have no slash


def _place() -> tuple[int, int]:
    """Step and epoch of the minibatch under way. Raises RuntimeError."""
    if (found := place_in_training()) is None:
        msg = "self.current_epoch and self.global_step are known in training_step of synchronous jobs alone"
        raise RuntimeError(f"{msg} {PAGE}")
    return found


def _bare(model: Any) -> Any:
    return getattr(model, "_orig_mod", model)


@contextmanager
def _logged() -> Iterator[dict[str, Any]]:
    found: dict[str, Any] = {}
    token = _logging.set(found)
    try:
        yield found
    finally:
        _logging.reset(token)


def _loss(model: Any, batch: Any) -> dict[str, Any]:
    module, place = _bare(model), place_in_training()
    if place is None and (held := [name for name in STARTS if _overrides(type(module), name)]):
        raise RuntimeError(f"{held[0]}: when an epoch starts is known in synchronous jobs alone {PAGE}")
    if place is not None and _begun.get(module) != place[1]:
        with seeded(START_SEED, alone=False):
            if module not in _begun:
                module.on_fit_start()
                module.on_train_start()
            module.on_train_epoch_start()
        _begun[module] = place[1]
    batch, number = _transferred(module, batch), module.in_job.number_of(place)
    with _logged() as found:
        if module.on_train_batch_start(batch, number) == -1:
            raise RuntimeError("on_train_batch_start returned -1: a job leaves out no rest of an epoch")
        made = module.training_step(*_arguments(module.training_step, batch, number))
    loss = made["loss"] if isinstance(made, Mapping) else made
    if loss is None:
        raise RuntimeError("training_step returned None; minibatches are left out by on_nonfinite alone")
    module.on_before_backward(loss)
    return {"loss": loss, **{name: value for name, (value, _) in found.items()}}


def _evaluate(model: Any, batch: Any, _: Any) -> dict[str, Any]:
    """Sums of what was logged, with the records that each counts, and what objects were logged as."""
    module = _bare(model)
    batch = _transferred(module, batch)
    with _logged() as found:
        module.on_validation_batch_start(batch, -1)
        made = module.validation_step(*_arguments(module.validation_step, batch, -1))
    if not found and made is not None:
        found["loss"] = (made["loss"] if isinstance(made, Mapping) else made), None
    sums: dict[str, Any] = {}
    for name, (value, given) in found.items():
        if name.startswith(OBJECT):
            sums[name] = value
        else:
            size = given or _size_of(batch)
            sums |= {f"{MEAN}{name}": float(value) * size, f"{RECORDS}{name}": size}
    return sums


def _metrics(sums: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for key, value in sums.items():
        if key.startswith(MEAN):
            found[key.removeprefix(MEAN)] = value / sums[RECORDS + key.removeprefix(MEAN)]
        elif key.startswith(OBJECT):
            held, name = key.removeprefix(OBJECT).split(" ", 1)
            found[name] = sums[held]
    return found


def _arguments(step: Callable[..., Any], batch: Any, number: int) -> tuple[Any, ...]:
    """As Lightning: the number of the batch, if the method takes it."""
    return (batch, number) if len(inspect.signature(step).parameters) > 1 else (batch,)


def _transferred(module: Any, batch: Any) -> Any:
    """The job has moved it to the device before."""
    data = module.in_job.made.datamodule
    for name in ("on_before_batch_transfer", "on_after_batch_transfer"):
        owner = data if data is not None and _overrides(type(data), name) else module
        batch = getattr(owner, name)(batch, 0)
    return batch


def _size_of(batch: Any) -> int:
    """The length of the first tensor in the batch, as Lightning takes it."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.ndim else 1
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    for part in parts:
        if isinstance(part, torch.Tensor | Mapping | list | tuple):
            return _size_of(part)
    hint = "say it: self.log(name, value, batch_size=n)"
    raise InvalidArgument(f"self.log: the batch is {type(batch).__name__}, of no known size", hint=hint)
