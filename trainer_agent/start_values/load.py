"""`init_from`: the values that a model starts with, instead of those that model() gave it.

FILE ─► checked against the model ─► loaded ─► {storage}/initial/<digest>.safetensors, the job's own copy of the whole model
tables/ beside it ─► checked against the model's tables ─► read by the parameter servers, or into the tables of this process
a trainer that joins later, or a job that resumes: the copy alone

Parameters that are not trained lie in no parameter server, so every trainer that starts needs them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save
from torch import nn

from trainer_agent.start_values.read import read_tensors
from trainer_agent.tables.of_model import tables_of
from trireme_shared.checkpoints.start_tables import Fit, StartTable, digest_in, fit_tables, marked
from trireme_shared.platform.runtime import telemetry
from trireme_shared.platform.storage import files
from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.records import JobSpec

SHOWN = 10
PARTIAL = "--init-partial (init_partial = true) leaves out what does not fit"
NOT_PARTIAL = "--init-optimizer needs a file of the same model; without it --init-partial leaves out what does not fit"
NO_TABLES = Fit()
INSPECTED = "-"  # storage of a script that is only tried

log = telemetry.logger("start_values")


@dataclass(frozen=True, slots=True)
class Started:
    """`digest`: Layout.initial, of all values of the model after loading and of the rows of tables; "": nothing was loaded. `sentence`: what was left
    out, for the user. `tables`: whose rows are still to be loaded."""

    digest: str = ""
    sentence: str = ""
    tables: tuple[StartTable, ...] = ()


def start_values(model: nn.Module, spec: JobSpec, initial: str = "") -> Started:
    """As a trainer of the job: from its own copy `initial` if it has begun, else from the file, and the copy is made. The model may then
    lie on a host alone. Raises InvalidArgument, OSError."""
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
        files.write_bytes(_copy(spec, started.digest), save(_state(model)))
    return started


def load_start_values(model: nn.Module, spec: JobSpec) -> Started:
    """From the file that `init_from` names, if it does; of tables only what there is to load. Raises InvalidArgument, OSError."""
    if spec.init_from is None:
        return Started()
    values, hint = read_tensors(spec.init_from), NOT_PARTIAL if spec.init_optimizer else PARTIAL
    tables = fit_tables(tables_of(model, spec.seed), spec.init_from, states=spec.init_optimizer)
    sentence = load_state(model, values, spec.init_from, partial=spec.init_partial, hint=hint, tables=tables)
    if tables.stateless:
        raise InvalidArgument(
            f"init_optimizer: the rows beside {spec.init_from} do not fit the script's tables: {'; '.join(tables.stateless[:SHOWN])}",
            hint="use the row optimizers that the tables were trained with, and files of `trireme export --optimizer`, or leave --init-optimizer out",
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
    """Copy `values` to the model's parameters and buffers of these names; what was left out, also of its `tables`. Raises InvalidArgument if they are not
    those of the model; `partial`: if none of them is."""
    own = _tensors(model)
    fitting = {name: value for name, value in values.items() if name in own and _kind(own[name]) == _kind(value)}
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
    loaded = f"init_from: {len(fitting)} of the model's {len(own)} tensors{of_tables} were loaded from {where}"
    return f"{loaded}; {sentence}" if sentence else ""


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


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
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
