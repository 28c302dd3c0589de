"""Layers whose rows lie outside of the model: in tables, which grow by the ids that come.

    ids --grouped--> each id once --source.lookup--> rows: a leaf of autograd --torch.nn.functional.embedding(sparse=True)--> output

So backward gives the sparse gradient that torch.nn.Embedding(sparse=True) has, by the same code; a recording keeps the leaf. Rows are
no parameters: `model.parameters()` and `state_dict()` are without them.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from trainer_agent.tables.ids import check_offsets, integers, on_host, signed
from trainer_agent.tables.settings import Adagrad, spec_of
from trainer_agent.tables.source import Bound
from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.records.layout import RowInit, RowOptimizer
from trireme_shared.tables.grouping import grouped

NO_ROWS = (
    "table {name} has no rows here: the model is called outside of training and evaluation; "
    "for a trained model in plain PyTorch call trireme.nn.load_tables(model, folder) first, with the folder of the export"
)


class TableLayer(nn.Module):
    """What Embedding and EmbeddingBag have in common. `bound`: where rows come from; None: from nowhere. A copy, or a pickle, of the model
    is bound to nothing."""

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
            raise InvalidArgument(f"table {name}: padding_idx is {padding!r:.80}; it is an id, an integer of 64 bits")
        self.embedding_dim, self.padding_idx = dim, None if padding_idx is None else signed(padding_idx)
        self.bound: Bound | None = None

    def extra_repr(self) -> str:
        settings = self.spec.model_dump(exclude={"name", "dim", "seed", "optimizer", "init"}, exclude_defaults=True)
        said = [repr(self.spec.name), str(self.spec.dim), self.spec.optimizer.kind]
        return ", ".join(said + [f"{name}={value}" for name, value in settings.items()])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "bound": None}

    def _rows(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int | None]:
        """Numbers of the ids, int64 in their shape; the rows that these number, float32 (k, dim), on the device of the ids; and the number
        of padding_idx: it has a row also where no id is padding, since torch rounds bags otherwise without. Raises InvalidArgument."""
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
    """As torch.nn.Embedding, without a number of rows: any integer of 64 bits is an id (uint64 by its bits, so -1 and 2**64 - 1 are one), and an id that was never trained has its initial row.

    `name`: of the table; layers with one name share it, and then have the same settings. `optimizer`: one of trireme.nn.SGD, Adagrad, Adam,
    Ftrl; Adagrad(lr=0.05) if left out. `init`: "uniform(x)" in [-x, x), "normal(deviation)", "constant(x)" or "zeros". `max_rows`: then the
    rows that were not trained for longest leave. `admit_after`: so many minibatches must have had an id before it is trained.
    `evict_after_steps`: a row that was not trained for so many steps begins again. `padding_idx`: an id whose output is 0, which is not trained.
    Raises InvalidArgument for settings that cannot be.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  as torch.nn.Embedding
        """int64, int32, uint64 or uint32 of any shape -> float32 (*shape, dim). Raises InvalidArgument."""
        numbers, rows, padding = self._rows(integers(f"table {self.spec.name}", input))
        found = F.embedding(
            numbers.view(-1), rows, padding, sparse=True
        )  # of a single number torch has no sparse gradient with padding
        return found.view(*input.shape, self.spec.dim)


class EmbeddingBag(TableLayer):
    """As torch.nn.EmbeddingBag: the mean or the sum of the rows of each bag of ids. The other arguments: see Embedding; padding_idx is in no
    bag. An empty bag is 0."""

    def __init__(self, name: str, dim: int, mode: Literal["mean", "sum"] = "mean", **settings: Any) -> None:
        super().__init__(name, dim, **settings)
        if mode not in ("mean", "sum"):
            raise InvalidArgument(f'table {name}: mode is {mode!r:.80}; a bag is the "mean" or the "sum" of its rows')
        self.mode = mode

    def forward(
        self,
        input: torch.Tensor,  # noqa: A002  as torch.nn.EmbeddingBag
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """float32 (bags, dim). `input`: as of Embedding, (bags, ids), padded with padding_idx; or (ids,), with `offsets`: where each bag
        begins. `per_sample_weights`: float32 as `input`, for mode "sum". Raises InvalidArgument."""
        what = f"table {self.spec.name}"
        ids = integers(what, input)
        if ids.dim() == 1 and offsets is not None:
            offsets = integers(f"{what}: offsets", offsets)
            check_offsets(what, offsets, len(ids))
        elif ids.dim() != 2 or offsets is not None:
            got = f"{'without' if offsets is None else 'with'} offsets"
            msg = f"{what}: got ids of shape {tuple(ids.shape)} {got}; bags are (bags, ids) without offsets, or (ids,) with them"
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
