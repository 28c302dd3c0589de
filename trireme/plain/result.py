"""What plain training gives."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from master_service.core.state.series import Series
from trainer_agent.tables.files import StoredTable
from trainer_agent.tables.trained import OneLane
from trireme_shared.protocol.evaluations import Evaluation
from trireme_shared.protocol.records.tasks import BestEvaluation


@dataclass(slots=True)
class PlainResult:
    """`metrics` as the script's `metrics(sums)` gives them; `losses`: mean loss of each epoch; `epochs`: means of the loss and of what
    the script logs, by epoch. `evaluations`: those while it trained; `best`, `best_state`, `best_tables`: of the best one, that after training
    included, as `keep_best` says. `curve`: the loss by step."""

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
