"""How a job ended, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class RunResult:
    """What `trireme run --json` prints, under the same names. `phase`: COMPLETED or FAILED (then with `reason`, `cause` and perhaps the
    script's `failure`). `metrics`: of the evaluation after training. `loss`: mean of the last epoch that was begun, `loss_by_epoch`: {"epoch", "loss"}
    of each. `exports`: kind (`safetensors`, `state_dict`, with keep_best also `best_...`) -> path or URL of the model. `best`: the best evaluation,
    `stopped_step`: where stop_early ended training. `discarded`, `losses`: what was not trained. `seconds`, `restarts` (by member): of all runs that resumed each
    other. `logs`: their folder."""

    job: str
    phase: str
    reason: str
    cause: str | None
    resumable: bool
    mode: str
    epochs: int
    epochs_done: int
    seconds: float
    metrics: dict[str, float]
    loss: float | None
    loss_by_epoch: list[dict[str, Any]]
    steps: int | None
    records: int
    discarded: dict[str, Any]
    losses: dict[str, dict[str, int]]
    generation: int
    restarts: dict[str, int]
    exports: dict[str, str]
    best: dict[str, Any] | None
    stopped_step: int | None
    failure: dict[str, Any] | None
    logs: str

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Self:
        """One of another version may have more, and lack what came later."""
        return cls(**{field.name: document.get(field.name) for field in fields(cls)})  # type: ignore[arg-type]
