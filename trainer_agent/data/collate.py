"""Columns of one minibatch -> batch of tensors, where the user's script has no `collate`; and a minibatch
that was collated before its forward pass.

prepare: generators kept ─► seeded ─► collate ─► ReadyBatch ─► generators as they were
backward: ReadyBatch.begin ─► loss(model, batch)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trainer_agent.data.shard import Column, Minibatch, columns_of, named_column
from trireme_shared.datasets.random_state import Generators
from trireme_shared.protocol.errors import DatasetError
from trireme_shared.protocol.metrics import Logged, collected

_HINT = "define collate(records) in your script, or make the values alike in the data"


def default_collate(minibatch: Mapping[str, Column] | Sequence[Mapping[str, Any]]) -> Any:
    """Column -> tensor (n, …), copied; columns of text or bytes stay lists. Takes columns or records. Of the
    items of a DataLoader the batch that it makes itself.

    Python's numbers get the dtype that shared/trireme_shared/datasets/numbers.py says (floats: mostly
    torch.float32, whole numbers torch.int64 or torch.uint64); arrays keep theirs. Raises DatasetError, naming
    the column and both values, if a value is missing, fits into no dtype, or shapes or kinds differ within
    the minibatch.
    """
    if isinstance(minibatch, Minibatch):
        if minibatch.collate is not None:
            return minibatch.collate(list(minibatch))
        columns: Mapping[str, Column] = minibatch.columns
    elif isinstance(minibatch, Mapping):
        columns = minibatch
    else:
        columns = columns_of(minibatch)
    return {name: _collated(name, column) for name, column in columns.items()}


def _collated(name: str, column: Column) -> Any:
    if isinstance(column, np.ndarray):
        return _tensor(name, column)
    of_types = {type(value): value for value in column}
    if type(None) in of_types:
        _refuse_missing(name, column)
    kinds = {_kind(value) for value in of_types.values()}
    if len(kinds) > 1:
        other = next(i for i, value in enumerate(column) if _kind(value) != _kind(column[0]))
        msg = (
            f"column {name!r}: record 0 of the minibatch has {_text(column[0])}, record {other} has "
            f"{_text(column[other])}"
        )
        raise DatasetError(msg, hint=_HINT, column=name)
    if kinds != {"numbers"}:
        return column
    if isinstance(column[0], torch.Tensor):
        _refuse_ragged(name, column)
        return torch.stack(column)
    array = named_column(name, column)
    if isinstance(array, list):
        _refuse_ragged(name, column)
        msg = f"column {name!r}: {_text(column[0])} does not make a tensor"
        raise DatasetError(msg, hint=_HINT, column=name)
    return _tensor(name, array)


def _tensor(name: str, column: Any) -> Any:
    if column.dtype.kind in "US":
        return column.tolist()
    kind = column.dtype
    try:
        array = np.array(column, dtype=kind.newbyteorder("="), order="C")
        # NumPy has two types of 64 bits for each sign (`long`, `long long`); torch takes one
        if kind.kind in "iu":
            array = array.view(f"{kind.kind}{kind.itemsize}")
        return torch.from_numpy(array)
    except TypeError as error:
        msg = f"column {name!r} holds {column.dtype}, which torch has no type for"
        raise DatasetError(msg, hint=_HINT, column=name) from error


def _refuse_missing(name: str, column: list[Any]) -> None:
    for number, value in enumerate(column):
        if value is None:
            present = next((value for value in column if value is not None), None)
            others = f", another has {_text(present)}" if present is not None else ""
            msg = f"column {name!r}: record {number} of the minibatch has no value{others}"
            raise DatasetError(msg, hint=_HINT, column=name)


def _refuse_ragged(name: str, column: list[Any]) -> None:
    shapes = [_shape(value) for value in column]
    for number, shape in enumerate(shapes):
        if shape != shapes[0]:
            msg = (
                f"column {name!r}: record 0 of the minibatch has shape {shapes[0]}, record "
                f"{number} has shape {shape}; "
                "one tensor needs one shape"
            )
            raise DatasetError(msg, hint=_HINT, column=name)


def _shape(value: Any) -> tuple[int, ...] | str:
    try:
        return tuple(np.shape(value))
    except ValueError:
        return "ragged in itself"


def _kind(value: Any) -> str:
    if isinstance(value, int | float | np.generic | np.ndarray | list | tuple | torch.Tensor):
        return "numbers"
    return type(value).__name__


def _text(value: Any) -> str:
    shape = _shape(value) if _kind(value) == "numbers" else ()
    return f"{type(value).__name__} of shape {shape}" if shape else f"{type(value).__name__} {value!r:.40}"


@dataclass(frozen=True, slots=True)
class ReadyBatch:
    """A minibatch that was collated before its forward pass, as if it had been collated in it: the random
    numbers go on where `collate` left them. `generators`: after `collate`; `logged`: in it."""

    batch: Any
    generators: Generators
    logged: Mapping[str, Logged]

    @classmethod
    def made(cls, collate: Callable[[], Any]) -> ReadyBatch:
        """By `collate()`, with generators that are seeded."""
        with collected() as logged:
            batch = collate()
        return cls(batch, Generators.now(), logged)

    def begin(self, logged: dict[str, Logged]) -> Any:
        """The batch, for a forward pass whose metrics go to `logged`."""
        logged.update(self.logged)
        self.generators.restore()
        return self.batch
