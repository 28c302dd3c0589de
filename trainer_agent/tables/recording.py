"""Where a layer's rows come from for the time of a minibatch, which rows it looked up, and after backward
their gradients.

forward:  each call's leaf --note--> Recording
backward: leaf.grad (sparse) --lane_rows--> per table: ids and sums
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.records.layout import TableSpec
from trireme_shared.tables.grouping import Grouped, Numbers, grouped

if TYPE_CHECKING:
    import numpy.typing as npt

    from trireme_shared.tables.lanes import LaneRows


class RowSource(Protocol):
    """All tables of a model, at one version."""

    def lookup(self, table: int, ids: Numbers) -> npt.NDArray[np.float32]:
        """The rows of the ids: float32 (n, dim), a new array that nobody else writes. `table`: its place in
        `tables_of`; `ids`: int64 (n,), n > 0, ascending, each once. Blocks until they are there; called in
        the thread of the forward pass."""
        ...


@dataclass(frozen=True, slots=True)
class Bound:
    """What a layer looks up in. `recording`: what the rows' gradients will be told to; None: they have
    none."""

    source: RowSource
    table: int
    recording: Recording | None = None


@dataclass(frozen=True, slots=True)
class _Call:
    occurrences: Grouped
    leaf: torch.Tensor


class Recording:
    """`permit`: called whenever a gradient of rows was made; see BackwardGuard.permit. `named`: of each table
    ids that are grouped already; they may be others than those that are looked up."""

    def __init__(
        self,
        specs: tuple[TableSpec, ...],
        permit: Callable[[torch.Tensor], None] | None = None,
        named: Sequence[Grouped] = (),
    ) -> None:
        self._specs, self._permit, self._named_ids = specs, permit, named
        self._calls: list[list[_Call]] = [[] for _ in specs]

    def __repr__(self) -> str:
        return f"<Recording {', '.join(f'{spec.name}: {len(calls)}' for spec, calls in self._named())}>"

    def grouped(self, table: int, ids: Numbers) -> Grouped:
        """int64 (n,); they are not sorted a second time."""
        if self._named_ids and np.array_equal(self._named_ids[table].given, ids):
            return self._named_ids[table]
        return grouped(ids)

    def note(self, table: int, occurrences: Grouped, leaf: torch.Tensor) -> None:
        """A layer has looked up the ids of `occurrences`: their rows are `leaf`, float32 (k, dim)."""
        if self._permit is not None:
            leaf.register_post_accumulate_grad_hook(self._permit)  # type: ignore[no-untyped-call]
        self._calls[table].append(_Call(occurrences, leaf))

    def lane_rows(self, records: int, factor: float = 1.0) -> tuple[LaneRows, ...]:
        """Of each table: the ids that got a gradient, and their sums over all occurrences in all calls, added
        as torch adds those of one call; each gradient is multiplied by `factor` before. `records`: of the
        minibatch. Raises InvalidArgument for a minibatch that does not fit a table."""
        if not self._specs:
            return ()
        # only where there are tables: it loads numba
        from trireme_shared.tables.lanes import LaneRows, sums_of  # noqa: PLC0415

        found = []
        for spec, calls in self._named():
            occurrences, gradients = _joined(calls, spec.dim)
            if factor != 1.0:
                gradients = gradients * np.float32(factor)
            if spec.max_rows is not None and len(occurrences.ids) > spec.max_rows:
                msg = (
                    f"a minibatch has {len(occurrences.ids)} ids of table {spec.name}, whose max_rows "
                    f"is {spec.max_rows}"
                )
                raise InvalidArgument(msg, hint="raise max_rows, or take smaller minibatches")
            found.append(LaneRows(occurrences.ids, sums_of(occurrences, gradients), records))
        return tuple(found)

    def _named(self) -> zip[tuple[TableSpec, list[_Call]]]:
        return zip(self._specs, self._calls, strict=True)


def _joined(calls: list[_Call], dim: int) -> tuple[Grouped, npt.NDArray[np.float32]]:
    """The occurrences of all calls that got a gradient, and those: float32 (n, dim), in the order of the
    calls. (torch merges the sparse gradients of several calls by looking which index is smaller, also where
    they are not sorted: an order that nobody could state.)"""
    made = [(call.occurrences, *_parts(call.leaf.grad)) for call in calls if call.leaf.grad is not None]
    if not made:
        return grouped(np.empty(0, np.int64)), np.empty((0, dim), np.float32)
    gradients = np.ascontiguousarray(np.concatenate([values for _, _, values in made]))
    occurrences, numbers, _ = made[0]
    if len(made) == 1 and len(numbers) == len(occurrences.order):
        return occurrences, gradients  # each occurrence has its gradient, in the order of the forward pass
    return grouped(np.concatenate([each.ids[chosen] for each, chosen, _ in made])), gradients


def _parts(gradient: torch.Tensor) -> tuple[Numbers, npt.NDArray[np.float32]]:
    """Of a sparse gradient that is not coalesced: numbers of rows, and values."""
    # the others are for coalesced ones
    numbers, values = gradient._indices(), gradient._values()  # noqa: SLF001
    return numbers[0].cpu().numpy(), values.cpu().numpy()
