"""What settings of a job may be: choices by name, and the values of settings that have parts."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from trireme_shared.protocol.criteria import Criterion
from trireme_shared.protocol.records.record import Record

Narrow = Literal["bfloat16", "float16"]
Precision = Literal["fp32", "bf16"]
Nonfinite = Literal["fail", "skip", "ignore"]
ChangedFiles = Annotated[
    Literal["fail", "report"],
    Field(description="A file of the dataset that is not the counted one: the job fails, or it is trained and told."),
]
Transported = Literal["float32", "bfloat16", "float16"]
Backend = Literal["auto", "gloo", "nccl"]
RateScale = Literal["none", "linear", "sqrt"]
RestartPolicy = Literal["always", "on_failure", "never"]
EvaluateEvery = Annotated[int, Field(ge=1, lt=2**63)] | Literal["epoch"]

MAX_MEMBERS = 100_000  # of each kind
MAX_TASKS = 8  # of each stage
_FUNCTION = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*")
SNAPSHOT_BYTES = 1 << 30
INITIAL_FILES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")  # of `init_from`
TRAINING_FILE = "training.pt"  # of an export with the state of the optimizer
RENAMED = {
    "clip_norm": "clip_norm is no setting any more: clip_grad_norm limits the norm of the whole step's gradient, as clip_grad_norm_ does "
    "in plain PyTorch; clip_lane_norm limits the gradient of each lane by itself, as clip_norm did",
    "grads_to_wait": "grads_to_wait is no setting: a parameter server steps with every push, so that each minibatch counts exactly once. "
    "push_every=N is the counterpart: each trainer pushes the mean gradient of N minibatches",
}
LANES_ARE_FIXED = (
    "lanes cannot follow the members: a job has the same lanes whoever trains, and its bits depend on them; "
    "give a power of two, for example 8, which up to 8 trainers share"
)
JOB_NAME = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"


class Mode(StrEnum):
    """SYNC: every step is the same, whoever computes it. ASYNC: each trainer pushes when it is ready."""

    SYNC = "sync"
    ASYNC = "async"


class JobStrategy(StrEnum):
    """Where parameters are stepped: on parameter servers, or (COLLECTIVE) by every trainer, with gradients that the trainers exchange."""

    PARAMETER_SERVER = "parameter_server"
    COLLECTIVE = "collective"


Strategy = JobStrategy  # the REST document has one schema of each name, and Strategy is that of a resize


class Dispatch(StrEnum):
    """Who keeps the task queues: a master, or (`etcd`) the trainers themselves, by compare-and-set."""

    MASTER = "master"
    ETCD = "etcd"


class JobTask(Record):
    """`command`: for /bin/sh, or `function`: `pkg.mod:function`, called without arguments. A text alone is either, by its form.
    `timeout_s`: of one attempt. `retries`: how often it may fail before that counts. `when`: a post-task runs once the job is
    COMPLETED, or (always) also once it is FAILED or CANCELLED."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    command: str = Field(default="", max_length=2000)
    function: str = Field(default="", max_length=500)
    timeout_s: float = Field(default=600.0, gt=0, le=7 * 86_400)
    retries: int = Field(default=0, ge=0, le=100)
    when: Literal["completed", "always"] = "completed"

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        return {"function": value} if _FUNCTION.fullmatch(value) else {"command": value}

    @field_validator("command")
    @classmethod
    def _is_text(cls, value: str) -> str:
        if "\0" in value:
            raise ValueError("a command cannot have a null character")
        return value

    @model_validator(mode="after")
    def _one_of_both(self) -> JobTask:
        if bool(self.command.strip()) is bool(self.function):
            raise ValueError("give either command (for /bin/sh) or function (pkg.mod:function)")
        if self.function and not _FUNCTION.fullmatch(self.function):
            msg = f"function {self.function!r} is not of the form pkg.mod:function"
            raise ValueError(msg)
        return self

    @property
    def text(self) -> str:
        """What it runs."""
        return self.command or self.function


class StopEarly(Record):
    """Training ends when `metric` (`loss:min`, `accuracy:max`) has not become better by more than `min_delta` in the last `patience`
    evaluations. As a text: `loss:min:patience=3:min_delta=0.01`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    metric: str
    patience: int = Field(default=3, ge=1, lt=2**31)
    min_delta: float = Field(default=0.0, ge=0, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        name, *rest = value.split(":")
        options = [part for part in rest if "=" in part]
        metric = ":".join([name, *(part for part in rest if "=" not in part)])
        return {"metric": metric} | dict(part.split("=", 1) for part in options)

    @field_validator("metric")
    @classmethod
    def _is_criterion(cls, value: str) -> str:
        Criterion.parse(value)
        return value
