"""What trainers report of their steps."""

from __future__ import annotations

from shared.records.record import Record


class StepMetrics(Record):
    """One trainer's share of a step (sync) or of some minibatches (async): sum of loss x records."""

    step: int
    epoch: int
    loss_sum: float
    records: int


class MetricBatch(Record):
    trainer: str
    steps: tuple[StepMetrics, ...]
