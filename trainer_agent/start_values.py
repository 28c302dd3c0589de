"""The values that a model, its optimizer and its scheduler start with: `init_from` and `init_optimizer`.

    FILE ─► checked against the model ─► loaded
        ─► {storage}/initial/<digest>.safetensors, the job's own copy of the whole model
    tables/ beside it ─► checked against the model's tables
        ─► read by the parameter servers, or into the tables of this process
    a trainer that joins later, or a job that resumes: the copy alone

    {"model": ..., "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}, by torch.save
      ─► checked against the script's optimizer ─► optimizer.state
        ─► under plain Python that is all
        ─► cut into blocks, sent to parameter servers with their first values

Parameters that are not trained lie in no parameter server, so every trainer that starts needs them. Files are
safetensors, or what torch.save wrote of a state_dict; no code in them is run.
"""

from __future__ import annotations

import hashlib
import io
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import nn

from trainer_agent.tables.embedding import tables_of
from trireme_shared.checkpoints.start_tables import Fit, StartTable, digest_in, fit_tables, marked
from trireme_shared.platform.runtime import telemetry
from trireme_shared.platform.storage import files
from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.records import JobSpec, Mode
from trireme_shared.serving.optimizers.classes import SCALAR, kinds_of
from trireme_shared.serving.optimizers.several import Several, named_in, parts_of

NESTED = ("state_dict", "model_state_dict", "model")  # where trainers of other frameworks put it
OPTIMIZER = ("optimizer", "optimizer_state_dict", "optimizer_states")
SCHEDULER = ("scheduler", "scheduler_state_dict", "lr_scheduler", "lr_schedulers")
SHOWN = 10
PARTIAL = "--init-partial (init_partial = true) leaves out what does not fit"
NOT_PARTIAL = (
    "--init-optimizer needs a file of the same model; without it --init-partial leaves out what does not fit"
)
NO_TABLES = Fit()
INSPECTED = "-"  # storage of a script that is only tried
V = TypeVar("V")
log = telemetry.logger("start_values")
SHOWN_PROBLEMS = 5
PARALLEL, COMPILED = "module", "_orig_mod"  # what nn.DataParallel and torch.compile call the model in them
PYTORCH = {"format": "pt"}  # of a safetensors file; transformers loads no file that does not say so


@dataclass(frozen=True, slots=True)
class Started:
    """`digest`: Layout.initial, of all values of the model after loading and of the rows of tables; "":
    nothing was loaded. `sentence`: what was left out, for the user. `tables`: whose rows are still to be
    loaded."""

    digest: str = ""
    sentence: str = ""
    tables: tuple[StartTable, ...] = ()


def start_values(model: nn.Module, spec: JobSpec, initial: str = "") -> Started:
    """As a trainer of the job: from its own copy `initial` if it has begun, else from the file, and the copy
    is made. The model may then lie on a host alone. Raises InvalidArgument, OSError."""
    if spec.init_from is None:
        return Started()
    if initial:
        load_state(model, read_tensors(_copy(spec, initial)), spec.script)
        if digest_of(model) != digest_in(initial):
            raise InvalidArgument(
                f"{_copy(spec, initial)} was changed: it is the job's copy of init_from",
                hint="start a new job, or restore the file",
            )
        return Started(initial)
    started = load_start_values(model, spec)
    if started.sentence:
        log.warning("init_partial", init_from=spec.init_from, left_out=started.sentence)
    log.info("start_values_loaded", init_from=spec.init_from, digest=started.digest)
    if spec.storage != INSPECTED and not files.exists(_copy(spec, started.digest)):
        files.write_bytes(_copy(spec, started.digest), save(state_of(model), PYTORCH))
    return started


def load_start_values(model: nn.Module, spec: JobSpec) -> Started:
    """From the file that `init_from` names, if it does; of tables only what there is to load. Raises
    InvalidArgument, OSError."""
    if spec.init_from is None:
        return Started()
    values, hint = read_tensors(spec.init_from), NOT_PARTIAL if spec.init_optimizer else PARTIAL
    tables = fit_tables(tables_of(model, spec.seed), spec.init_from, states=spec.init_optimizer)
    sentence = load_state(model, values, spec.init_from, partial=spec.init_partial, hint=hint, tables=tables)
    if tables.stateless:
        raise InvalidArgument(
            f"init_optimizer: the rows beside {spec.init_from} do not fit the script's tables: "
            f"{'; '.join(tables.stateless[:SHOWN])}",
            hint="use the row optimizers that the tables were trained with, and files of `trireme "
            "export --optimizer`, or leave --init-optimizer out",
        )
    return Started(marked(digest_of(model), tables.mark()), sentence, tables.tables)


def load_state(
    model: nn.Module,
    values: Mapping[str, torch.Tensor],
    where: str,
    *,
    partial: bool = False,
    hint: str = PARTIAL,
    tables: Fit = NO_TABLES,
) -> str:
    """Copy `values` to the model's parameters and buffers of these names, with or without what DataParallel
    and torch.compile put before them; what was left out, also of its `tables`. Raises InvalidArgument if they
    are not those of the model; `partial`: if none of them is."""
    own = _tensors(model)
    values = _with_tied(own, _named_as(own, values))
    fitting = {
        name: value for name, value in values.items() if name in own and _kind(own[name]) == _kind(value)
    }
    problems = [
        ("the file lacks", [*(name for name in own if name not in values), *tables.lacking]),
        ("the model lacks", [*(name for name in values if name not in own), *tables.unknown]),
        (
            "another shape or dtype has",
            [
                *(
                    f"{name} ({_kind(value)}, the model has {_kind(own[name])})"
                    for name, value in values.items()
                    if name in own and name not in fitting
                ),
                *tables.different,
            ],
        ),
        ("more rows than there may be has", list(tables.too_many)),
    ]
    sentence = "; ".join(f"{what} {_named(names)}" for what, names in problems if names)
    if sentence and not (partial and (fitting or tables.tables)):
        if partial:
            hint = "give a file whose names are those of model().state_dict()"
        raise InvalidArgument(f"the parameters in {where} are not those of the model: {sentence}", hint=hint)
    with torch.no_grad():
        for name, value in fitting.items():
            own[name].copy_(value)
    of_tables = f" and {len(tables.tables)} of its tables" if tables != NO_TABLES else ""
    loaded = (
        f"init_from: {len(fitting)} of the model's {len(own)} tensors{of_tables} were loaded from {where}"
    )
    return f"{loaded}; {sentence}" if sentence else ""


def _named_as(own: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`values` with the names that the model has for them, if they differ by the prefixes of wrappers
    alone."""
    names = dict(zip(_unwrapped(list(own)), own, strict=True))
    bare = zip(values, _unwrapped(list(values)), strict=True)
    renamed = {name: name if name in own else names.get(without, name) for name, without in bare}
    taken = Counter(renamed.values())
    return {renamed[name] if taken[renamed[name]] == 1 else name: value for name, value in values.items()}


def _with_tied(own: Mapping[str, torch.Tensor], values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Also the names that the model has for tensors of `values`: of tied parameters, transformers saves
    one."""
    places: dict[tuple[Any, ...], str] = {}
    for name, tensor in own.items():
        if name in values and tensor.numel():
            places[place_of(tensor)] = name
    tied = {name: places[place_of(tensor)] for name, tensor in own.items() if place_of(tensor) in places}
    return {name: values[other] for name, other in tied.items()} | values


def place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The same of tensors that are the same elements of one memory, as tied parameters are."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _unwrapped(names: list[str]) -> list[str]:
    names = [name.replace(f"{COMPILED}.", "") for name in names]
    while names and all(name.startswith(f"{PARALLEL}.") for name in names):
        names = [name.removeprefix(f"{PARALLEL}.") for name in names]
    return names


def digest_of(model: nn.Module) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of model.state_dict()."""
    digest = hashlib.sha256()
    for name, value in sorted(_tensors(model).items()):
        digest.update(f"{name} {_kind(value)}\n".encode())
        digest.update(_bytes(value))
    return digest.hexdigest()


def _bytes(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    values: npt.NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    return values.data if flat.numel() else memoryview(b"")


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}


def without_wrappers(model: nn.Module, state: Mapping[str, V]) -> dict[str, V]:
    """`state`, which has the names of model.state_dict(), with those that it has without DataParallel and
    torch.compile around the model or its modules."""
    wrappers = _wrappers(model)
    return {_bare_name(name, wrappers): value for name, value in state.items()}


def _wrappers(model: nn.Module) -> list[str]:
    """What the names of the modules in a wrapper begin with; those farthest inside come first. A module that
    a script itself calls `module` is none."""
    parallel = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    found = [
        f"{path}.{child}.".lstrip(".")
        for path, module in model.named_modules(remove_duplicate=False)
        for child in dict(module.named_children())
        if child == COMPILED or (child == PARALLEL and isinstance(module, parallel))
    ]
    return sorted(found, key=len, reverse=True)


def _bare_name(name: str, wrappers: list[str]) -> str:
    for wrapper in wrappers:
        if name.startswith(wrapper):
            outside = wrapper.removesuffix(".").rpartition(".")[0]
            name = f"{outside}.{name.removeprefix(wrapper)}".lstrip(".")
    return name


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the tensors of model.state_dict(), in host memory."""
    return {
        name: value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, value in _tensors(model).items()
    }


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _named(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{len(names)}: {', '.join(names[:SHOWN])}{more}"


def _copy(spec: JobSpec, digest: str) -> str:
    return files.join(spec.storage, "initial", f"{digest_in(digest)}.safetensors")


def load_start_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, spec: JobSpec
) -> None:
    """Out of the file that `init_from` names, if `init_optimizer` asks for it. Raises InvalidArgument."""
    if spec.init_optimizer and spec.init_from is not None:
        found, is_sync = read_training_state(spec.init_from), spec.mode is Mode.SYNC
        load_training_state(model, optimizer, scheduler, found, spec.init_from, some=is_sync)


def load_training_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    found: TrainingState,
    where: str,
    *,
    some: bool = False,
) -> None:
    """Give both the state in `found`; tensors are moved to their parameters' device. `some`: parameters
    without any state begin anew, if others have one: they have had no gradient yet. The options of the
    groups (learning rate, ...) stay as the script sets them, but are those of the file if there is a
    scheduler: they follow from its state. Raises InvalidArgument."""
    groups, state = _saved(optimizer, found.optimizer, where)
    own = optimizer.param_groups
    sizes, mine = [len(group["params"]) for group in groups], [len(group["params"]) for group in own]
    if sizes != mine:
        raise _misfit(where, f"its groups have {sizes} parameters, those of the script's optimizer {mine}")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    kinds = kinds_of(optimizer)
    problems: list[str] = []
    taken: dict[int, dict[str, torch.Tensor]] = {}
    order = [(number, p) for number, group in enumerate(own) for p in group["params"]]
    keys = [key for group in groups for key in group["params"]]
    for index, (key, (number, parameter)) in enumerate(zip(keys, order, strict=True)):
        values = {name: value for name, value in state.get(key, {}).items() if value is not None}
        if not values and (not parameter.requires_grad or (some and any(state.values()))):
            continue
        taken[index] = {name: _tensor(name, value, kinds[number]) for name, value in values.items()}
        if problem := _problem(parameter, taken[index], kinds[number]):
            problems.append(f"{names.get(id(parameter), '?')} {problem}")
    if problems:
        more = f" and {len(problems) - SHOWN_PROBLEMS} more" if len(problems) > SHOWN_PROBLEMS else ""
        raise _misfit(where, f"{'; '.join(problems[:SHOWN_PROBLEMS])}{more}")
    if scheduler is not None:
        if not found.scheduler:
            raise InvalidArgument(
                f"init_optimizer: {where} has no state of a scheduler, and the script has scheduler()",
                hint='save it, too: {"model": ..., "optimizer": ..., "scheduler": scheduler.state_dict()}',
            )
        try:
            scheduler.load_state_dict(found.scheduler)
        except Exception as error:  # a scheduler of another class may raise anything
            raise _misfit(where, f"the scheduler refuses its state: {error}") from error
        for mine_now, theirs in zip(own, groups, strict=True):
            mine_now.update(
                {name: value for name, value in theirs.items() if name not in ("params", "param_names")}
            )
    first = 0
    for part in parts_of(optimizer):
        held = part.state_dict()["param_groups"]
        end = first + sum(len(group["params"]) for group in held)
        state_of_part = {index - first: taken[index] for index in range(first, end) if index in taken}
        part.load_state_dict({"state": state_of_part, "param_groups": held})
        first = end


def _saved(
    optimizer: torch.optim.Optimizer, saved: Any, where: str
) -> tuple[list[dict[str, Any]], Mapping[Any, Mapping[str, Any]]]:
    """The groups, and the states by the keys in them; of several optimizers one after the other."""
    if not isinstance(optimizer, Several):
        return _parts(saved, where)
    is_one = isinstance(saved, Mapping) and "param_groups" in saved
    named = {optimizer.names[0]: saved} if is_one else named_in(saved) or {}
    if named.keys() != set(optimizer.names):
        found = f"states of {', '.join(named) or 'none'}, and those of the script are"
        raise _misfit(where, f"it has {found} {', '.join(optimizer.names)}")
    groups: list[dict[str, Any]] = []
    state: dict[Any, Mapping[str, Any]] = {}
    for name in optimizer.names:
        own, states = _parts(named[name], where)
        groups += [{**group, "params": [(name, key) for key in group["params"]]} for group in own]
        state |= {(name, key): values for key, values in states.items()}
    return groups, state


def _parts(saved: Any, where: str) -> tuple[list[dict[str, Any]], Mapping[Any, Mapping[str, Any]]]:
    groups = saved.get("param_groups") if isinstance(saved, Mapping) else None
    state = saved.get("state") if isinstance(saved, Mapping) else None
    whole = isinstance(groups, list) and all(
        isinstance(group, dict) and "params" in group for group in groups
    )
    if not whole or not isinstance(groups, list) or not isinstance(state, Mapping):
        raise _misfit(where, "it is not what optimizer.state_dict() gives")
    return groups, state


def _misfit(where: str, what: str) -> InvalidArgument:
    return InvalidArgument(
        f"init_optimizer: the optimizer in {where} does not fit the script's: {what}",
        hint="use the optimizer that the file was made with, or leave --init-optimizer out: then its "
        "state starts fresh",
    )


def _tensor(name: str, value: Any, kinds: Mapping[str, bool]) -> torch.Tensor:
    """Numbers as torch keeps them now: older versions kept `step` as an int."""
    tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value)
    return tensor.detach().to("cpu", SCALAR) if kinds.get(name) and tensor.dim() == 0 else tensor.detach()


def _problem(parameter: nn.Parameter, values: Mapping[str, torch.Tensor], kinds: Mapping[str, bool]) -> str:
    if values.keys() != kinds.keys():
        return (
            f"has {', '.join(sorted(values)) or 'no state'}, {', '.join(sorted(kinds)) or 'no state'} "
            "is needed"
        )
    for name, scalar in kinds.items():
        shape = [] if scalar else list(parameter.shape)
        if list(values[name].shape) != shape:
            return f"has {name} of shape {list(values[name].shape)}, {shape} is needed"
    return ""


@dataclass(frozen=True, slots=True)
class TrainingState:
    """What optimizer.state_dict() and scheduler.state_dict() gave, of several a list or dict; an empty
    `scheduler`: the file has none; those of a list have the names "0", "1", ..."""

    optimizer: Any
    scheduler: dict[str, Any]


def read_tensors(url: str) -> dict[str, torch.Tensor]:
    """In host memory. Raises InvalidArgument: there is no such file, or it holds something else."""
    content = _content(url)
    if url.endswith(".safetensors"):
        try:
            return load(content)
        except SafetensorError as error:
            raise InvalidArgument(f"init_from: {url} is no safetensors file: {error}") from error
    return _state_dict(url, content)


def read_training_state(url: str) -> TrainingState:
    """Beside the model's values, in host memory. Raises InvalidArgument."""
    found = {} if url.endswith(".safetensors") else _loaded(url, _content(url))
    optimizer = _one(found, OPTIMIZER) if isinstance(found, Mapping) else None
    if optimizer is None:
        raise InvalidArgument(
            f"init_optimizer: {url} has no state of an optimizer",
            hint='give a job (--init-from JOB[@STEP]), or a file of torch.save({"model": '
            'model.state_dict(), "optimizer": optimizer.state_dict()}, path)',
        )
    scheduler = _one(found, SCHEDULER) or {}
    return TrainingState(
        optimizer, dict(scheduler if isinstance(scheduler, Mapping) else named_in(scheduler) or {})
    )


def _content(url: str) -> bytes:
    try:
        return files.read_bytes(url)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
        raise InvalidArgument(
            f"init_from: {url} cannot be read: {error.strerror or error}",
            hint="every member must see the file",
        ) from error


def _one(found: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    """Lightning has lists of them."""
    for name in names:
        if value := found.get(name):
            return value[0] if isinstance(value, list) and len(value) == 1 else value
    return None


def _state_dict(url: str, content: bytes) -> dict[str, torch.Tensor]:
    found = _loaded(url, content)
    for key in NESTED:
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
            break
    if not isinstance(found, dict):
        raise InvalidArgument(
            f"init_from: {url} holds a {type(found).__name__}", hint="a state_dict is needed"
        )
    tensors = {str(name): value for name, value in found.items() if isinstance(value, torch.Tensor)}
    if not tensors:
        raise InvalidArgument(f"init_from: {url} holds no tensors", hint="a state_dict is needed")
    return tensors


def _loaded(url: str, content: bytes) -> Any:
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file may raise anything
        raise InvalidArgument(
            f"init_from: {url} cannot be read as a state_dict: "
            f"{str(error).splitlines()[0] if str(error) else type(error).__name__}",
            hint="save it with torch.save(model.state_dict(), path), or as safetensors; objects that "
            "need code are not loaded",
        ) from error
