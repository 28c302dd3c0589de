"""A model's tables in training with one lane, without any service; nothing for a model that has none.

with tables.minibatch() as recorded: forward, backward
tables.step(recorded.lane_rows(records))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from trainer_agent.tables.files import StoredTable
from trainer_agent.tables.of_model import ModelTables
from trainer_agent.tables.recording import Recording
from trireme_shared.checkpoints.start_tables import StartTable
from trireme_shared.protocol.records.layout import schedule_factor

if TYPE_CHECKING:
    from trainer_agent.tables.local import LocalTables
    from trireme_shared.tables.lanes import LaneRows


class OneLane:
    """The model's layers read the tables from now on; in `minibatch` their rows have gradients. `slot_count`: see LocalTables. `optimizer`: of the
    parameters. Raises InvalidArgument."""

    def __init__(self, model: nn.Module, seed: int, slot_count: int, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._first_options = [{"lr": group.get("initial_lr", group["lr"])} for group in optimizer.param_groups]
        self._layers = ModelTables(model, seed)
        self._tables: LocalTables | None = None
        if self._layers.specs:
            from trainer_agent.tables.local import LocalTables  # noqa: PLC0415  only where there are tables: it loads numba

            self._tables = LocalTables(self._layers.specs, slot_count)
            self._layers.bind(self._tables)

    def start_with(self, starts: Sequence[StartTable]) -> None:
        """See LocalTables.start_with."""
        if self._tables is not None:
            self._tables.start_with(starts)

    @contextmanager
    def minibatch(self, permit: Callable[[torch.Tensor], None]) -> Iterator[Recording]:
        """For forward and backward. `permit`: see Recording."""
        if self._tables is None:
            yield Recording(())
            return
        with self._layers.recording(self._tables, permit) as recording:
            yield recording

    def gradients(self, lane: Sequence[LaneRows]) -> dict[str, torch.Tensor]:
        """As errors name them."""
        named = zip(self._layers.specs, lane, strict=True)
        return {f"table {spec.name}": torch.from_numpy(rows.gradients) for spec, rows in named}

    def step(self, lane: Sequence[LaneRows] | None) -> None:
        """See LocalTables.step. The optimizer has the options of this step."""
        if self._tables is not None:
            self._tables.step(lane, schedule_factor(self._first_options, self._optimizer.param_groups))

    def stored(self) -> tuple[StoredTable, ...]:
        """Copies of all rows."""
        return () if self._tables is None else self._tables.stored()
