"""What a trainer of a masterless job tells the others of itself; with a master the same goes there by REST."""

from __future__ import annotations

from shared.records.record import Record


class HeldTask(Record):
    """An attempt under way and the minibatches done of it: more than before is a sign of life."""

    task_id: str
    attempt: int
    epoch: int
    minibatches: int


class TrainerProgress(Record):
    """`loss_sum` (of loss x records) and `records`: of `epoch`, this trainer's share; `step`: the last one reported."""

    trainer: str
    tasks: tuple[HeldTask, ...] = ()
    epoch: int = 0
    step: int | None = None
    loss_sum: float = 0.0
    records: int = 0
