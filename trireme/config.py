"""A job's settings as the user writes them: `config = trireme.Config(mode="sync", epochs=5)` in the script.

Every field is a field of trireme_shared.protocol.records.JobSpec, where it is described. The command line,
the environment and trireme.toml win over the script, in this order; fields that are not set get their
default.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, fields
from typing import Any


class ConfigError(ValueError):
    """A setting with an invalid value."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Raises ConfigError, which names the field, its value and what is allowed. Fields that are not set are
    None."""

    job: str | None = None
    mode: str | None = None
    strategy: str | None = None
    dispatch: str | None = None
    epochs: int | None = None
    global_batch_size: int | None = None
    lanes: int | None = None
    seed: int | None = None
    trainers: int | None = None
    pservers: int | str | None = None
    min_members: int | None = None
    exchange: str | None = None
    backend: str | None = None
    reduction: str | None = None
    bucket_bytes: int | None = None
    restart_policy: str | None = None
    restart_delay_s: float | None = None
    records_per_task: int | None = None
    drop_last: bool | None = None
    block_bytes: int | None = None
    slot_count: int | None = None
    push_every: int | None = None
    pull_every: int | None = None
    lr_staleness_modulation: bool | None = None
    max_staleness: int | None = None
    lr_scale: str | None = None
    lr_base_batch_size: int | None = None
    clip_grad_norm: float | None = None
    clip_lane_norm: float | None = None
    grad_norm_every: int | None = None
    on_nonfinite: str | None = None
    precision: str | None = None
    schedule_per: str | None = None
    plateau_metric: str | None = None
    threads_per_trainer: int | None = None
    data_workers: int | None = None
    device: str | None = None
    deterministic: bool | None = None
    shuffle: bool | None = None
    lease_ttl_s: float | None = None
    join_window_s: float | None = None
    stragglers: str | None = None
    rebalance_s: float | None = None
    straggler_factor: float | None = None
    task_timeout_floor_s: float | None = None
    task_timeout_ceiling_s: float | None = None
    max_task_failures: int | None = None
    max_discarded_fraction: float | None = None
    max_user_failures: int | None = None
    changed_files: str | None = None
    checkpoint_every_steps: int | None = None
    checkpoint_every_epochs: int | None = None
    keep_checkpoints: int | None = None
    deltas_per_base: int | None = None
    snapshot_bytes: int | None = None
    evaluate_every: int | str | None = None
    keep_best: str | None = None
    stop_early: str | dict[str, Any] | None = None
    checkpoint_checksum: str | None = None
    checkpoint_every_seconds: float | None = None
    checkpoint_kind: str | None = None
    skip_after_seconds: float | None = None
    gradient_dtype: str | None = None
    parameter_dtype: str | None = None
    error_feedback: bool | None = None
    recovery_timeout_s: float | None = None
    init_from: str | None = None
    init_partial: bool | None = None
    init_optimizer: bool | None = None
    pre_tasks: Sequence[str | dict[str, Any]] | None = None
    post_tasks: Sequence[str | dict[str, Any]] | None = None
    trackers: str | Sequence[str | dict[str, Any]] | None = None
    clip_norm: InitVar[float | None] = None  # refused, with the names that it has now
    grads_to_wait: InitVar[int | None] = None  # refused, with its counterpart

    def __post_init__(self, clip_norm: float | None, grads_to_wait: int | None) -> None:
        # loads pydantic, so only when a Config is made
        from trireme.validation import field_problems  # noqa: PLC0415

        refused = {"clip_norm": clip_norm, "grads_to_wait": grads_to_wait}
        given = self.to_dict() | {name: value for name, value in refused.items() if value is not None}
        problems = field_problems(given)
        if problems:
            msg = "trireme.Config: " + "; ".join(problems)
            raise ConfigError(msg)

    def to_dict(self) -> dict[str, Any]:
        """The fields that are set."""
        return {
            field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None
        }
