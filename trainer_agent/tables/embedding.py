"""Layers whose rows lie outside of the model, in tables, which grow by the ids that come; what a user says of
a table; and the tables that a model's layers name.

    ids --grouped--> each id once --source.lookup--> rows: a leaf of autograd
        --torch.nn.functional.embedding(sparse=True)--> output

So backward gives the sparse gradient that torch.nn.Embedding(sparse=True) has, by the same code; a recording
keeps the leaf. Rows are no parameters: `model.parameters()` and `state_dict()` are without them. Ids are any
integers of 64 bits; texts become some by one hash.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from pydantic import ValidationError
from torch import nn
from torch.nn import functional as F  # noqa: N812

from trainer_agent.tables.recording import Bound, Recording, RowSource
from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.records.layout import MOST_TABLES, RowInit, RowOptimizer, TableSpec
from trireme_shared.protocol.records.record import Record
from trireme_shared.tables.grouping import Grouped, Numbers, grouped
from trireme_shared.tables.hashing import ids_of_texts, table_seed

INTEGERS = torch.int64, torch.int32, torch.uint64, torch.uint32
R = TypeVar("R", bound=Record)
INIT = re.compile(r"(uniform|normal|constant)\(\s*([-+0-9.eE]+)\s*\)")
NO_ROWS = (
    "table {name} has no rows here: the model is called outside of training and evaluation; "
    "for a trained model in plain PyTorch call trireme.nn.load_tables(model, folder) first, with "
    "the folder of the export"
)


class TableLayer(nn.Module):
    """What Embedding and EmbeddingBag have in common. `bound`: where rows come from; None: from nowhere. A
    copy, or a pickle, of the model is bound to nothing."""

    def __init__(
        self,
        name: str,
        dim: int,
        *,
        optimizer: RowOptimizer | None = None,
        init: str | RowInit = "normal(0.01)",
        max_rows: int | None = None,
        admit_after: int = 1,
        evict_after_steps: int | None = None,
        padding_idx: int | None = None,
    ) -> None:
        super().__init__()
        limits = {"max_rows": max_rows, "admit_after": admit_after, "evict_after_steps": evict_after_steps}
        self.spec = spec_of(name, dim, Adagrad(lr=0.05) if optimizer is None else optimizer, init, **limits)
        padding: object = padding_idx
        if padding is not None and (not isinstance(padding, int) or not -(2**63) <= padding < 2**64):
            raise InvalidArgument(
                f"table {name}: padding_idx is {padding!r:.80}; it is an id, an integer of 64 bits"
            )
        self.embedding_dim, self.padding_idx = dim, None if padding_idx is None else signed(padding_idx)
        self.bound: Bound | None = None

    def extra_repr(self) -> str:
        settings = self.spec.model_dump(
            exclude={"name", "dim", "seed", "optimizer", "init"}, exclude_defaults=True
        )
        said = [repr(self.spec.name), str(self.spec.dim), self.spec.optimizer.kind]
        return ", ".join(said + [f"{name}={value}" for name, value in settings.items()])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "bound": None}

    def _rows(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int | None]:
        """Numbers of the ids, int64 in their shape; the rows that these number, float32 (k, dim), on the
        device of the ids; and the number of padding_idx: it has a row also where no id is padding, since
        torch rounds bags otherwise without. Raises InvalidArgument."""
        if self.bound is None:
            raise InvalidArgument(NO_ROWS.format(name=self.spec.name))
        given, recording = on_host(ids), self.bound.recording
        found = grouped(given) if recording is None else recording.grouped(self.bound.table, given)
        padding = self._number_of_padding(found.ids)
        wanted = found.ids if padding in (None, len(found.ids)) else np.delete(found.ids, padding)
        rows = np.empty((0, self.spec.dim), np.float32)
        if len(wanted):
            rows = self.bound.source.lookup(self.bound.table, wanted)
        if padding is not None:
            rows = np.insert(rows, padding, np.float32(0), axis=0)
        leaf = torch.from_numpy(rows).to(ids.device)
        if recording is not None and torch.is_grad_enabled():
            leaf.requires_grad_()
            recording.note(self.bound.table, found, leaf)
        return torch.from_numpy(found.numbers()).to(ids.device).view(ids.shape), leaf, padding

    def _number_of_padding(self, ids: np.ndarray[Any, np.dtype[np.int64]]) -> int | None:
        if self.padding_idx is None:
            return None
        place = int(np.searchsorted(ids, self.padding_idx))
        return place if place < len(ids) and ids[place] == self.padding_idx else len(ids)


class Embedding(TableLayer):
    """As torch.nn.Embedding, without a number of rows: any integer of 64 bits is an id (uint64 by its bits,
    so -1 and 2**64 - 1 are one), and an id that was never trained has its initial row.

    `name`: of the table; layers with one name share it, and then have the same settings. `optimizer`: one of
    trireme.nn.SGD, Adagrad, Adam, Ftrl; Adagrad(lr=0.05) if left out. `init`: "uniform(x)" in [-x, x),
    "normal(deviation)", "constant(x)" or "zeros". `max_rows`: then the rows that were not trained for longest
    leave. `admit_after`: so many minibatches must have had an id before it is trained. `evict_after_steps`: a
    row that was not trained for so many steps begins again. `padding_idx`: an id whose output is 0, which is
    not trained. Raises InvalidArgument for settings that cannot be."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  as torch.nn.Embedding
        """int64, int32, uint64 or uint32 of any shape -> float32 (*shape, dim). Raises InvalidArgument."""
        numbers, rows, padding = self._rows(integers(f"table {self.spec.name}", input))
        found = F.embedding(
            numbers.view(-1), rows, padding, sparse=True
        )  # of a single number torch has no sparse gradient with padding
        return found.view(*input.shape, self.spec.dim)


class EmbeddingBag(TableLayer):
    """As torch.nn.EmbeddingBag: the mean or the sum of the rows of each bag of ids. The other arguments: see
    Embedding; padding_idx is in no bag. An empty bag is 0."""

    def __init__(self, name: str, dim: int, mode: Literal["mean", "sum"] = "mean", **settings: Any) -> None:
        super().__init__(name, dim, **settings)
        if mode not in ("mean", "sum"):
            raise InvalidArgument(
                f'table {name}: mode is {mode!r:.80}; a bag is the "mean" or the "sum" of its rows'
            )
        self.mode = mode

    def forward(
        self,
        input: torch.Tensor,  # noqa: A002  as torch.nn.EmbeddingBag
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """float32 (bags, dim). `input`: as of Embedding, (bags, ids), padded with padding_idx; or (ids,),
        with `offsets`: where each bag begins. `per_sample_weights`: float32 as `input`, for mode "sum".
        Raises InvalidArgument."""
        what = f"table {self.spec.name}"
        ids = integers(what, input)
        if ids.dim() == 1 and offsets is not None:
            offsets = integers(f"{what}: offsets", offsets)
            check_offsets(what, offsets, len(ids))
        elif ids.dim() != 2 or offsets is not None:
            got = f"{'without' if offsets is None else 'with'} offsets"
            msg = (
                f"{what}: got ids of shape {tuple(ids.shape)} {got}; bags are (bags, ids) without "
                "offsets, or (ids,) with them"
            )
            raise InvalidArgument(msg)
        if per_sample_weights is not None:
            self._check_weights(per_sample_weights, ids)
            per_sample_weights = per_sample_weights.reshape(-1)
        if offsets is None:  # torch makes none for bags of no ids
            offsets = torch.arange(ids.shape[0], device=ids.device) * ids.shape[1]
        numbers, rows, padding = self._rows(ids)
        return F.embedding_bag(
            numbers.view(-1),
            rows,
            offsets,
            mode=self.mode,
            sparse=True,
            per_sample_weights=per_sample_weights,
            padding_idx=padding,
        )

    def _check_weights(self, weights: torch.Tensor, ids: torch.Tensor) -> None:
        what = f"table {self.spec.name}: per_sample_weights"
        if self.mode != "sum":
            raise InvalidArgument(f'{what} need mode "sum", the layer has {self.mode!r}')
        if weights.dtype != torch.float32 or weights.shape != ids.shape:
            got = f"{weights.dtype} of shape {tuple(weights.shape)}"
            raise InvalidArgument(f"{what} are {got}; they are float32 of the ids' shape {tuple(ids.shape)}")


class ModelTables:
    """The layers of a model, to be bound. `specs`: see tables_of; layers that come later are not seen."""

    def __init__(self, model: nn.Module, job_seed: int) -> None:
        self.specs = tables_of(model, job_seed)
        places = {spec.name: place for place, spec in enumerate(self.specs)}
        self._layers = [(layer, places[layer.spec.name]) for layer in layers_of(model)]

    def __repr__(self) -> str:
        return f"<ModelTables {', '.join(spec.name for spec in self.specs)}>"

    @property
    def source(self) -> RowSource | None:
        """What rows come from at the moment."""
        bound = self._layers[0][0].bound if self._layers else None
        return None if bound is None else bound.source

    def bind(self, source: RowSource | None) -> None:
        """Until the next call, rows come from there and have no gradients. None: from nowhere."""
        for layer, table in self._layers:
            layer.bound = None if source is None else Bound(source, table)

    @contextmanager
    def reading(self, source: RowSource) -> Iterator[None]:
        """In the block rows come from there and have no gradients."""
        with self._bound(source, None):
            yield

    @contextmanager
    def recording(
        self,
        source: RowSource,
        permit: Callable[[torch.Tensor], None] | None = None,
        named: Sequence[Grouped] = (),
    ) -> Iterator[Recording]:
        """In the block rows come from there, in whatever thread, and those that are looked up are recorded:
        for forward and backward of one minibatch. `permit`, `named`: see Recording."""
        recording = Recording(self.specs, permit, named)
        with self._bound(source, recording):
            yield recording

    @contextmanager
    def _bound(self, source: RowSource, recording: Recording | None) -> Iterator[None]:
        before = [layer.bound for layer, _ in self._layers]
        for layer, table in self._layers:
            layer.bound = Bound(source, table, recording)
        try:
            yield
        finally:
            for (layer, _), bound in zip(self._layers, before, strict=True):
                layer.bound = bound


def layers_of(model: nn.Module) -> list[TableLayer]:
    """Each once."""
    return [module for module in model.modules() if isinstance(module, TableLayer)]


def tables_of(model: nn.Module, job_seed: int) -> tuple[TableSpec, ...]:
    """In the order of their names. Raises InvalidArgument: layers disagree about a table, or there are too
    many."""
    found: dict[str, TableSpec] = {}
    for layer in layers_of(model):
        spec = layer.spec
        other = found.setdefault(spec.name, spec)
        if other != spec:
            settings = "; ".join(f"{name} {one} and {two}" for name, one, two in other.differences(spec))
            msg = f"two layers use the table {spec.name} with different settings: {settings}"
            raise InvalidArgument(msg, hint="give one of them another name, or both the same settings")
    if len(found) > MOST_TABLES:
        raise InvalidArgument(f"the model has {len(found)} tables, at most {MOST_TABLES} are possible")
    return tuple(found[name].with_fields(seed=table_seed(job_seed, name)) for name in sorted(found))


def SGD(lr: float, *, follow_schedule: bool = False) -> RowOptimizer:  # noqa: N802  as in torch.optim
    """As torch.optim.SGD without momentum: no state. `follow_schedule`: what the script's scheduler does to
    the learning rate of the first parameter group, by a factor, it does to `lr` too. Raises
    InvalidArgument."""
    return _record(RowOptimizer, "SGD", {"kind": "sgd", "lr": lr, "follow_schedule": follow_schedule})


def ids_of(texts: Iterable[str]) -> torch.Tensor:
    """An id for each text, int64 (n,): XXH3 of its UTF-8 bytes (64 bits, seed 0) as a signed number. The same
    everywhere. Raises InvalidArgument."""
    if isinstance(texts, str):
        raise InvalidArgument(
            f"ids_of takes a list of texts, got the text {texts!r:.80}; write ids_of([text])"
        )
    given: list[object] = list(texts)
    if strange := [value for value in given if not isinstance(value, str)]:
        raise InvalidArgument(f"ids_of takes texts, got {type(strange[0]).__name__} {strange[0]!r:.80}")
    return torch.from_numpy(ids_of_texts([value for value in given if isinstance(value, str)]))


def integers(what: str, value: object) -> torch.Tensor:
    """A tensor of integers as int64, on its device. Unsigned numbers of 64 bits keep their bits: 2**64 - 1
    becomes -1, so that each has an id of its own. Raises InvalidArgument."""
    if not isinstance(value, torch.Tensor):
        msg = (
            f"{what}: got {type(value).__name__}; give a tensor of integers (torch.tensor(ids), "
            "trireme.nn.ids_of(texts))"
        )
        raise InvalidArgument(msg)
    if value.dtype not in INTEGERS:
        msg = (
            f"{what}: got a tensor of {value.dtype}; ids are int64, int32, uint64 or uint32, and "
            ".long() converts, if it holds whole numbers"
        )
        raise InvalidArgument(msg)
    if value.dtype == torch.uint64:
        return value.detach().view(torch.int64)
    return value.detach().to(torch.int64)


def signed(number: int) -> int:
    """A Python integer of 64 bits, unsigned or not, as `integers` makes it."""
    return number - (1 << 64) if number >= 1 << 63 else number


def on_host(ids: torch.Tensor) -> Numbers:
    """int64 (n,), of a tensor of any shape on any device."""
    found: Numbers = ids.reshape(-1).cpu().contiguous().numpy()
    return found


def check_offsets(what: str, offsets: torch.Tensor, ids: int) -> None:
    """int64, where each bag begins. Raises InvalidArgument."""
    if offsets.dim() != 1:
        msg = (
            f"{what}: offsets have the shape {tuple(offsets.shape)}; they are one number for each bag, "
            "shape (bags,)"
        )
        raise InvalidArgument(msg)
    found = on_host(offsets)
    if not len(found):
        if ids:
            raise InvalidArgument(f"{what}: got {ids} ids and no bag; offsets begin with 0")
        return
    if found[0] != 0:
        raise InvalidArgument(f"{what}: offsets begin with {found[0]}; the first bag begins at 0")
    falls = np.flatnonzero(np.diff(found) < 0)
    if len(falls):
        place = int(falls[0])
        msg = (
            f"{what}: offsets fall from {found[place]} to {found[place + 1]} at place {place + 1}; "
            "each bag begins where the one before ends"
        )
        raise InvalidArgument(msg)
    if found[-1] > ids:
        raise InvalidArgument(f"{what}: the last bag begins at {found[-1]}, and there are {ids} ids")


def named_ids(tables: Sequence[str], found: object) -> list[Grouped]:
    """What a script's `ids(batch)` returned, of each of these tables; without ids for those that it does not
    name. Raises InvalidArgument."""
    if not isinstance(found, Mapping):
        msg = (
            f"ids(batch) returned {type(found).__name__}; it returns a dict: the name of a table -> a "
            "tensor of its ids"
        )
        raise InvalidArgument(msg)
    if strange := [name for name in found if name not in tables]:
        msg = (
            f"ids(batch) names the table {strange[0]!r:.80}, and the model's tables are "
            f"{', '.join(tables):.200}"
        )
        raise InvalidArgument(msg, hint="name them as the layers do, and leave out those that are none")
    nothing = torch.empty(0, dtype=torch.int64)
    return [
        grouped(on_host(integers(f"ids(batch) of table {name}", found.get(name, nothing)))) for name in tables
    ]


def Adagrad(  # noqa: N802
    lr: float,
    *,
    eps: float = 1e-10,
    initial_accumulator_value: float = 0.0,
    per_row: bool = False,
    follow_schedule: bool = False,
) -> RowOptimizer:
    """As torch.optim.Adagrad. `per_row`: one number of state a row, which grows by the mean of the squares,
    instead of one a column. `follow_schedule`: see SGD. Raises InvalidArgument."""
    more = {"eps": eps, "initial_accumulator_value": initial_accumulator_value, "per_row": per_row}
    return _record(
        RowOptimizer, "Adagrad", {"kind": "adagrad", "lr": lr, "follow_schedule": follow_schedule, **more}
    )


def Adam(  # noqa: N802
    lr: float = 0.001,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    follow_schedule: bool = False,
) -> RowOptimizer:
    """As torch.optim.SparseAdam: rows without a gradient stay as they are. `follow_schedule`: see SGD. Raises
    InvalidArgument."""
    more = {"betas": betas, "eps": eps, "follow_schedule": follow_schedule}
    return _record(RowOptimizer, "Adam", {"kind": "adam", "lr": lr, **more})


def Ftrl(  # noqa: N802
    lr: float, *, l1: float = 0.0, l2: float = 0.0, beta: float = 1.0, initial_accumulator_value: float = 0.0
) -> RowOptimizer:
    """FTRL-proximal (McMahan et al. 2013): with `l1` > 0 numbers that matter little are exactly 0. Its
    learning rate follows no schedule: a row is computed anew from sums that were made with one. Raises
    InvalidArgument."""
    more = {"l1": l1, "l2": l2, "beta": beta, "initial_accumulator_value": initial_accumulator_value}
    return _record(RowOptimizer, "Ftrl", {"kind": "ftrl", "lr": lr, **more})


def init_of(init: str | RowInit) -> RowInit:
    """Of "uniform(0.01)", "normal(0.01)", "constant(0.5)" or "zeros". Raises InvalidArgument."""
    if isinstance(init, RowInit):
        return init
    text: object = init
    found = INIT.fullmatch(text.strip()) if isinstance(text, str) else None
    if text == "zeros":
        return RowInit(kind="constant", scale=0.0)
    try:
        if found is not None:
            return RowInit(kind=found[1], scale=float(found[2]))
    except ValueError:
        pass
    raise InvalidArgument(
        f'init is {init!r:.80}; write "uniform(0.01)", "normal(0.01)", "constant(0.5)" or "zeros", '
        "with a finite number"
    )


def spec_of(name: str, dim: int, optimizer: Any, init: str | RowInit, **more: int | None) -> TableSpec:
    """Without the seed, which is the job's. Raises InvalidArgument."""
    if not isinstance(optimizer, RowOptimizer):
        got = optimizer.__name__ if isinstance(optimizer, type) else type(optimizer).__name__
        msg = (
            f"table {name!r:.80} has the optimizer {got}; rows are stepped by trireme.nn.SGD, Adagrad, "
            "Adam or Ftrl, called with their lr"
        )
        raise InvalidArgument(msg)
    given = {"name": name, "dim": dim, "optimizer": optimizer, "init": init_of(init), **more}
    return _record(TableSpec, f"table {name!r:.80}", given)


def _record(kind: type[R], what: str, values: dict[str, Any]) -> R:
    """Numbers only where numbers belong: no texts, no bools, no fractions of rows. Raises InvalidArgument."""
    try:
        return kind.model_validate(values, strict=True)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, problem['loc']))} is {problem['input']!r:.80}: {problem['msg']}"
            for problem in error.errors()
        )
        raise InvalidArgument(f"{what}: {problems}") from error
