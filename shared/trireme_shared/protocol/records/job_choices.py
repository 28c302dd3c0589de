"""What settings of a job may be: choices by name, and the values of settings that have parts: criteria
(`accuracy:max`), tasks, and trackers, where metrics go beside the storage ("csv",
"mlflow?experiment=digits&run=first", "my_module:Tracker")."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import parse_qsl

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from trireme_shared.protocol.records.record import Record, UrlText

METRIC_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
_TEXT = re.compile(rf"({METRIC_NAME.pattern}):(min|max)")


class Criterion(NamedTuple):
    """The smaller value of `metric` (`lowest`), or the larger one, is better."""

    metric: str
    lowest: bool

    @classmethod
    def parse(cls, text: str) -> Criterion:
        """Of `accuracy:max`. Raises ValueError."""
        found = _TEXT.fullmatch(text)
        if found is None:
            msg = f"{text!r} is not of the form metric:min or metric:max, for example accuracy:max"
            raise ValueError(msg)
        return cls(found[1], found[2] == "min")

    def is_better(self, value: float, than: float, by: float = 0.0) -> bool:
        """By more than `by`. Equal values: the earlier evaluation stays the best one."""
        return value < than - by if self.lowest else value > than + by


Narrow = Literal["bfloat16", "float16"]
Precision = Literal["fp32", "bf16"]
Nonfinite = Literal["fail", "skip", "ignore"]
ChangedFiles = Annotated[
    Literal["fail", "report"],
    Field(
        description="A file of the dataset that is not the counted one: the job fails, or it is trained and "
        "told."
    ),
]
Transported = Literal["float32", "bfloat16", "float16"]
Backend = Literal["auto", "gloo", "nccl"]
RateScale = Literal["none", "linear", "sqrt"]
RestartPolicy = Literal["always", "on_failure", "never"]
EvaluateEvery = Annotated[int, Field(ge=1, lt=2**63)] | Literal["epoch"]

MAX_MEMBERS = 100_000  # of each kind
MAX_CHANGES = 32  # that a spec remembers; CHANGES_CHARACTERS of each
CHANGES_CHARACTERS = 1000
MAX_TASKS = 8  # of each stage
_FUNCTION = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*")
SNAPSHOT_BYTES = 1 << 30
INITIAL_FILES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")  # of `init_from`
TRAINING_FILE = "training.pt"  # of an export with the state of the optimizer
RENAMED = {
    "clip_norm": "clip_norm is no setting any more: clip_grad_norm limits the norm of the whole step's "
    "gradient, as clip_grad_norm_ does "
    "in plain PyTorch; clip_lane_norm limits the gradient of each lane by itself, as clip_norm did",
    "grads_to_wait": "grads_to_wait is no setting: a parameter server steps with every push, so that each "
    "minibatch counts exactly once. "
    "push_every=N is the counterpart: each trainer pushes the mean gradient of N minibatches",
}
LANES_ARE_FIXED = (
    "lanes cannot follow the members: a job has the same lanes whoever trains, and its bits depend on them; "
    "give a power of two, for example 8, which up to 8 trainers share"
)
JOB_NAME = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
RESERVED = ("cluster", "jobs", "pool", "schedules", "sources")  # a cluster's own keys, beside its jobs' keys
_NOT_IN_NAMES = re.compile(r"[^a-z0-9]+")


def allowed_name(name: str) -> str:
    """The nearest name that a job can have: `My_Model` -> `my-model`. `name` itself if nothing of it can
    stay."""
    return _NOT_IN_NAMES.sub("-", name.lower()).strip("-")[:63].rstrip("-") or name


def name_problem(name: str) -> str:
    """Why no job can have this name, with the nearest one that a job can have; empty: a job can have it."""
    if re.fullmatch(JOB_NAME, name):
        return ""
    nearest = allowed_name(name[:200])
    other = f"; the nearest one is {nearest}" if re.fullmatch(JOB_NAME, nearest) else ""
    return f"a job's name has lower-case letters, digits and hyphens, at most 63{other}"


def _possible(name: object) -> object:
    """Raises ValueError for a text that is no name of a job."""
    if isinstance(name, str) and (problem := name_problem(name)):
        raise ValueError(problem)
    return name


def not_reserved(name: str) -> str:
    """Raises ValueError for a name whose keys in etcd would be a cluster's own."""
    if name in RESERVED:
        msg = f"the names {', '.join(RESERVED)} are keys of a cluster itself; choose another name"
        raise ValueError(msg)
    return name


JobName = Annotated[str, Field(pattern=JOB_NAME), BeforeValidator(_possible), AfterValidator(not_reserved)]


class Mode(StrEnum):
    """SYNC: every step is the same, whoever computes it. ASYNC: each trainer pushes when it is ready."""

    SYNC = "sync"
    ASYNC = "async"


class JobStrategy(StrEnum):
    """Where parameters are stepped: on parameter servers, or (COLLECTIVE) by every trainer, with gradients
    that the trainers exchange."""

    PARAMETER_SERVER = "parameter_server"
    COLLECTIVE = "collective"


Strategy = JobStrategy  # the REST document has one schema of each name, and Strategy is that of a resize


class Dispatch(StrEnum):
    """Who keeps the task queues: a master, or (`etcd`) the trainers themselves, by compare-and-set."""

    MASTER = "master"
    ETCD = "etcd"


class JobTask(Record):
    """`command`: for /bin/sh, or `function`: `pkg.mod:function`, called without arguments. A text alone is
    either, by its form. `timeout_s`: of one attempt. `retries`: how often it may fail before that counts.
    `when`: a post-task runs once the job is COMPLETED, or (always) also once it is FAILED or CANCELLED."""

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


class AcceptedChange(Record):
    """What the user changed of a job between two of its runs, and accepted (`--accept-changes`)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int = Field(ge=1, description="1 is the first of the job; older ones may not be kept.")
    options: int = Field(
        default=0,
        ge=0,
        description="Number of the newest change up to this one that gave the optimizer or its scheduler "
        "other options; 0: there was none.",
    )
    time: str = Field(max_length=64, description="When it was accepted, RFC 3339.")
    text: str = Field(
        max_length=CHANGES_CHARACTERS,
        description="Each changed setting with the old and the new value, for people.",
    )


class StopEarly(Record):
    """Training ends when `metric` (`loss:min`, `accuracy:max`) has not become better by more than `min_delta`
    in the last `patience` evaluations. As a text: `loss:min:patience=3:min_delta=0.01`."""

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


CSV, TENSORBOARD, MLFLOW, WANDB = "csv", "tensorboard", "mlflow", "wandb"
KINDS = (CSV, TENSORBOARD, MLFLOW, WANDB)
MAX_TRACKERS = 8
_CREDENTIALS = re.compile(r"^[A-Za-z0-9+.-]+://[^/@\s]*@")
_ELSE = " (mlflow, wandb); empty: as their variables say where the master runs"
_OPTIONS = ("uri", "experiment", "run")


class Tracker(BaseModel):
    """`kind`: csv, tensorboard, mlflow, wandb, or `pkg.mod:Name`, a class or function that gives a tracker of
    one's own. Of mlflow and wandb, "" being what their own environment variables say: `uri` of the server,
    without credentials; `experiment` (wandb: project); `run`, the name of the run. As a text:
    `mlflow?experiment=digits&run=first`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str = Field(
        max_length=200, description="csv, tensorboard, mlflow, wandb, or pkg.mod:Name for one of your own."
    )
    uri: UrlText = Field(default="", max_length=2000, description=f"The server, without credentials{_ELSE}.")
    experiment: str = Field(
        default="", max_length=200, description=f"Experiment or project{_ELSE}, or the job's name."
    )
    run: str = Field(default="", max_length=200, description=f"Name of the run{_ELSE}, or the job's name.")

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        kind, _, options = value.strip().partition("?")
        given: dict[str, Any] = dict(parse_qsl(options))
        if options and not given:
            msg = f"{value!r}: write options as {kind}?name=value&name=value; names are {', '.join(_OPTIONS)}"
            raise ValueError(msg)
        return {**given, "kind": kind}

    @field_validator("kind")
    @classmethod
    def _is_known(cls, value: str) -> str:
        if value not in KINDS and not _FUNCTION.fullmatch(value):
            msg = (
                f"there is no tracker {value!r}; there are {', '.join(KINDS)}, and pkg.mod:Name for "
                "one of your own"
            )
            raise ValueError(msg)
        return value

    @field_validator("uri")
    @classmethod
    def _has_no_credentials(cls, value: str) -> str:
        if _CREDENTIALS.match(value):
            raise ValueError(
                "uri has credentials, which the job's settings would show to everyone who may read "
                "them; leave them out and set "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD (wandb: WANDB_API_KEY) "
                "where the master runs"
            )
        return value

    @model_validator(mode="after")
    def _options_fit(self) -> Tracker:
        given = [name for name in _OPTIONS if getattr(self, name)]
        if given and self.kind not in (MLFLOW, WANDB):
            msg = f"the tracker {self.kind} has no {given[0]}; {', '.join(_OPTIONS)} are of mlflow and wandb"
            raise ValueError(msg)
        return self

    @property
    def is_own(self) -> bool:
        """Whether it is the user's."""
        return self.kind not in KINDS
