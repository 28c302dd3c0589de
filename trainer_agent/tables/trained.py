"""The embedding tables of a model that a trainer trains: rows come from parameter servers, gradients go there.

with tables.minibatch(permit): forward, backward ─► tables.end_lane(records) ─► tables.lane: pushed
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from trainer_agent.tables.ids import named_ids
from trainer_agent.tables.of_model import ModelTables
from trainer_agent.tables.recording import Recording
from trainer_agent.tables.remote import AtHand, RemoteRows
from trainer_agent.tables.source import RowSource
from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.records import JobSpec, Mode, Strategy
from trireme_shared.tables.grouping import Grouped

if TYPE_CHECKING:
    from trireme_shared.tables.lanes import LaneRows


class TrainedTables:
    """`lane`: of the last lane, see Compute.lane_rows. `pinned`: see Compute.pin_rows. Raises InvalidArgument."""

    def __init__(self, model: nn.Module, spec: JobSpec) -> None:
        self._layers = ModelTables(model, spec.seed)
        self.specs = self._layers.specs
        self.rows = RemoteRows([table.name for table in self.specs])
        self.lane: tuple[LaneRows, ...] = ()
        self.pinned: RowSource | None = None
        self._recording: Recording | None = None
        self._named: Sequence[Grouped] = ()
        if self.specs:
            _check(spec, [table.name for table in self.specs])

    def named(self, found: object) -> list[Grouped]:
        """Of what the script's `ids(batch)` returned: ids of each table. Raises InvalidArgument."""
        return named_ids([table.name for table in self.specs], found)

    def begin_lane(self, at_hand: AtHand = ()) -> None:
        """Nothing is known of its rows but what is at hand."""
        if self.specs:
            from trireme_shared.tables.lanes import LaneRows  # noqa: PLC0415  only where there are tables: it loads numba

            none = np.empty(0, np.int64)
            self.lane = tuple(LaneRows(none, np.empty((0, table.dim), np.float32), 0) for table in self.specs)
            self.rows.at_hand = at_hand
            self._named = [named for named, _ in at_hand]

    @contextmanager
    def minibatch(self, permit: Callable[[torch.Tensor | None], None]) -> Iterator[None]:
        """For forward and backward. `permit`: see Recording."""
        if not self.specs:
            yield
            return
        with self._layers.recording(self.rows, permit, self._named) as self._recording:
            yield

    def end_lane(self, records: int, factor: float = 1.0) -> dict[str, torch.Tensor]:
        """`lane` is of the last minibatch. Its gradients times `factor`, as errors name them."""
        if self._recording is None:
            return {}
        self.lane, self._recording = self._recording.lane_rows(records, factor), None
        named = zip(self.specs, self.lane, strict=True)
        return {f"table {table.name}": torch.from_numpy(rows.gradients) for table, rows in named}

    @contextmanager
    def reading(self) -> Iterator[None]:
        """For an evaluation."""
        if not self.specs:
            yield
            return
        self.rows.at_hand = ()
        with self._layers.reading(self.rows):
            yield

    @contextmanager
    def reading_pinned(self) -> Iterator[None]:
        """For an evaluation while the job trains."""
        if not self.specs:
            yield
            return
        assert self.pinned is not None, "evaluated without the tables of a checkpoint"
        with self._layers.reading(self.pinned):
            yield


def _check(spec: JobSpec, names: list[str]) -> None:
    if spec.strategy is Strategy.COLLECTIVE and spec.exchange == "native":
        msg = f"the model has embedding tables ({', '.join(names):.200}), and exchange is native, which carries gradients of parameters alone"
        hint = "use exchange direct: each trainer has all rows then, and their gradients are exchanged, too"
        raise InvalidArgument(msg, hint=hint)
    if spec.mode is Mode.ASYNC and spec.skip_after_seconds is not None:
        what = f"skip_after_seconds = {spec.skip_after_seconds}"
        msg = f"the model has embedding tables ({', '.join(names):.200}), which do not go together with {what} yet"
        hint = "leave it out: the rows of a silent parameter server can be read from nobody else, so its trainers have to wait"
        raise InvalidArgument(msg, hint=hint)
