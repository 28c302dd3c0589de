"""The job's spec: the user's settings, validated once, the same for every process. JSON in etcd and on REST."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from shared.records.datasets import Dataset
from shared.records.record import Record

Narrow = Literal["bfloat16", "float16"]
Transported = Literal["float32", "bfloat16", "float16"]

JOB_NAME = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"


class Mode(StrEnum):
    SYNC = "sync"
    ASYNC = "async"


class Dispatch(StrEnum):
    """Who keeps the task queues: a master, or (`etcd`) the trainers themselves, by compare-and-set."""

    MASTER = "master"
    ETCD = "etcd"


class JobSettings(Record):
    """What users choose of a job. Durations in seconds, sizes in bytes.

    `gradient_dtype`, `parameter_dtype`: dtypes in which float32 gradients and parameters are sent. `error_feedback` (asynchronous
    only; None: on whenever gradients are cast): the rounding error of a cast is added to the next push. `on_nonfinite`: what
    a loss or gradient that is NaN or infinite does: the job fails, the minibatch is left out, or it is trained all the same.
    `device` auto: that of the trainer that initialises the parameters. `join_window_s`: members that join a running job within
    it after a change make one generation. `stragglers`: on: lanes follow measured speed, a look every `rebalance_s`, and work that takes
    longer than `straggler_factor` times the usual is done by another trainer too; bits do not depend on it. `deterministic`: synchronous trainers on GPUs use kernels that give the same bits
    each time."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dataset: Dataset
    evaluation_dataset: Dataset | None = None
    mode: Mode = Mode.SYNC
    dispatch: Dispatch = Dispatch.MASTER
    epochs: int = Field(default=1, ge=1)
    global_batch_size: int = Field(default=256, ge=1)
    lanes: int = Field(default=8, ge=1, le=1024)
    seed: int = Field(default=0, ge=0, lt=2**63)
    trainers: int = Field(default=2, ge=1)
    pservers: int = Field(default=1, ge=1, le=128)
    records_per_task: int | None = Field(default=None, ge=1)
    block_bytes: int = Field(default=1 << 20, ge=256, le=64 << 20)
    slot_count: int = Field(default=1024, ge=128, le=1024)
    push_every: int = Field(default=1, ge=1)
    pull_every: int = Field(default=1, ge=1)
    clip_norm: float | None = Field(default=None, gt=0)
    on_nonfinite: Literal["fail", "skip", "ignore"] = "fail"
    threads_per_trainer: int = Field(default=1, ge=1)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    deterministic: bool = True
    shuffle: bool = True
    lease_ttl_s: float = Field(default=5.0, ge=2.0)
    join_window_s: float = Field(default=0.2, ge=0, le=10)
    stragglers: Literal["on", "off"] = "on"
    rebalance_s: float = Field(default=30.0, ge=0.5, le=3600)
    straggler_factor: float = Field(default=2.0, ge=1.1, le=1000)
    task_timeout_floor_s: float = Field(default=30.0, gt=0)
    task_timeout_ceiling_s: float = Field(default=1200.0, gt=0)
    max_task_failures: int = Field(default=3, ge=1)
    max_discarded_fraction: float = Field(default=0.01, ge=0, le=1)
    max_user_failures: int = Field(default=3, ge=1)
    checkpoint_every_steps: int | None = Field(default=None, ge=1)
    checkpoint_every_epochs: int | None = Field(default=1, ge=1)
    keep_checkpoints: int = Field(default=2, ge=1, le=100)
    checkpoint_checksum: Literal["xxh3-128", "md5", "sha256"] = "xxh3-128"
    checkpoint_every_seconds: float | None = Field(default=60.0, gt=0)
    checkpoint_kind: Literal["coordinated", "independent"] = "coordinated"
    skip_after_seconds: float | None = Field(default=None, ge=0)
    gradient_dtype: Transported = "float32"
    parameter_dtype: Transported = "float32"
    error_feedback: bool | None = None
    recovery_timeout_s: float = Field(default=600.0, gt=0)

    @field_validator("checkpoint_every_steps", "checkpoint_every_epochs", "checkpoint_every_seconds", mode="before")
    @classmethod
    def _off(cls, value: object) -> object:
        """`off` or 0 mean null, which flags and TOML cannot express."""
        return None if value in ("off", "0", 0) else value

    def to_bytes(self) -> bytes:
        """With nulls: for some fields null is not the default."""
        return self.model_dump_json().encode()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.lanes & (self.lanes - 1):
            below = 1 << (self.lanes.bit_length() - 1)
            msg = f"lanes must be a power of two, got {self.lanes}; use {below} or {below * 2}"
            raise ValueError(msg)
        if self.mode is Mode.SYNC and self.global_batch_size < self.lanes:
            msg = f"global_batch_size {self.global_batch_size} is less than lanes {self.lanes}: every lane needs a record; lower lanes"
            raise ValueError(msg)
        if self.mode is Mode.SYNC and self.global_batch_size % self.lanes:
            msg = f"global_batch_size {self.global_batch_size} is not a multiple of lanes {self.lanes}: lanes take equal shares"
            raise ValueError(msg)
        for name, value, default in (
            ("checkpoint_kind", self.checkpoint_kind, "coordinated"),
            ("skip_after_seconds", self.skip_after_seconds, None),
            ("error_feedback", self.error_feedback or None, None),
        ):
            if self.mode is Mode.SYNC and value != default:
                msg = f"{name} is {value}, which only asynchronous jobs can have; use mode async or leave it out"
                raise ValueError(msg)
        if self.block_bytes % 64:
            msg = f"block_bytes must be a multiple of 64, got {self.block_bytes}"
            raise ValueError(msg)
        return self

    @property
    def minibatch_size(self) -> int:
        """Records of one forward/backward: a lane's share of a step (sync), the whole batch (async)."""
        return self.global_batch_size // self.lanes if self.mode is Mode.SYNC else self.global_batch_size

    @property
    def feeds_errors_back(self) -> bool:
        return self.mode is Mode.ASYNC and self.gradient_dtype != "float32" and self.error_feedback is not False

    @property
    def streams(self) -> int:
        return self.lanes if self.mode is Mode.SYNC else 1

    @property
    def task_records(self) -> int:
        """Records per task: as given, else 16 minibatches."""
        return self.records_per_task or 16 * self.minibatch_size


class JobSpec(JobSettings):
    """A job's settings, its name, its script (a path, or `source:<digest>/<file name>`) and where its files go; written once."""

    job: str = Field(pattern=JOB_NAME)
    script: str
    storage: str
