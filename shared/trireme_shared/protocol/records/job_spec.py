"""The job's spec: the user's settings, validated once, the same for every process. JSON in etcd and on REST.

Settings that would change what is trained, and cannot in this job, are refused (`_check_...`).
setting_effects.py tells those that change nothing.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from trireme_shared.protocol.errors import TooLarge
from trireme_shared.protocol.records.datasets import Dataset
from trireme_shared.protocol.records.job_choices import (
    INITIAL_FILES,
    LANES_ARE_FIXED,
    MAX_CHANGES,
    MAX_MEMBERS,
    MAX_TASKS,
    MAX_TRACKERS,
    METRIC_NAME,
    RENAMED,
    SNAPSHOT_BYTES,
    AcceptedChange,
    Backend,
    ChangedFiles,
    Criterion,
    Dispatch,
    EvaluateEvery,
    JobName,
    JobTask,
    Mode,
    Nonfinite,
    Precision,
    RateScale,
    RestartPolicy,
    StopEarly,
    Strategy,
    Tracker,
    Transported,
)
from trireme_shared.protocol.records.record import Record, UrlText

OF_NATIVE = ("backend", "reduction", "bucket_bytes")
"""Settings that only native exchange has."""
SPEC_BYTES = 256 << 10
"""As JSON. A schedule writes its own spec and that of the job which begins in one transaction of 900 KiB."""


class JobSettings(Record):
    """What users choose of a job. Durations in seconds, sizes in bytes.

    `gradient_dtype`, `parameter_dtype`: dtypes in which float32 gradients and parameters are sent.
    `error_feedback` (asynchronous only; None: on whenever gradients are cast): the rounding error of a cast
    is added to the next push. `on_nonfinite`: what a loss or gradient that is NaN or infinite does: the job
    fails, the minibatch is left out, or it is trained all the same. `clip_grad_norm`: the gradient of a whole
    step (asynchronous: of each push) is scaled down to this norm; `clip_lane_norm`: the gradient of each
    minibatch, before the mean over lanes is taken. `grad_norm_every` (synchronous): the norm of the gradient
    is measured in every so many steps (0: never); a job with `clip_grad_norm` has it in each. `init_from`:
    path or URL of a file with the values that parameters and buffers start with (safetensors, or a
    state_dict); `init_partial`: what does not fit the model is left out; `init_optimizer`: optimizer and
    scheduler start with their state in that file. `evaluate_every`: so many steps (asynchronous: minibatches
    of the whole job), or epoch: such versions are evaluated while training goes on. `keep_best`:
    `accuracy:max` or `loss:min`: the checkpoint of the best evaluation is kept and exported. `stop_early`:
    training ends when evaluations get no better. `strategy` collective (synchronous only): trainers hold the
    parameters, and there are no parameter servers: `pservers` is 0. `device` auto: that of the trainer that
    initialises the parameters. `join_window_s`: members that join a running job within it after a change make
    one generation. `stragglers`: on: lanes follow measured speed, a look every `rebalance_s`, and work that
    takes longer than `straggler_factor` times the usual is done by another trainer too; bits do not depend on
    it. `pre_tasks`, `post_tasks` (in a cluster only): commands that run before its members are assigned, and
    after its end. `deterministic`: synchronous trainers on GPUs use kernels that give the same bits each
    time. `trackers` (jobs with a master): where metrics, settings and the result go as well."""

    keeps_unknown: ClassVar[bool] = True

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)  # JSON has no inf

    dataset: Dataset
    evaluation_dataset: Dataset | None = None
    mode: Mode = Mode.SYNC
    strategy: Strategy = Strategy.PARAMETER_SERVER
    dispatch: Dispatch = Dispatch.MASTER
    epochs: int = Field(default=1, ge=1, lt=2**63)
    global_batch_size: int = Field(default=256, ge=1, lt=2**63)
    lanes: int = Field(default=8, ge=1, le=1024)
    seed: int = Field(default=0, ge=0, lt=2**63)
    trainers: int = Field(default=2, ge=1, le=MAX_MEMBERS)
    pservers: int = Field(default=1, ge=0, le=128)
    min_members: int = Field(
        default=1,
        ge=1,
        le=MAX_MEMBERS,
        description="Collective: training begins, and goes on, with at least so many trainers that hold the "
        "parameters.",
    )
    exchange: Literal["direct", "native"] = Field(
        default="direct",
        description="Collective: trainers send each other gradients themselves, or by groups of "
        "torch.distributed (native).",
    )
    backend: Backend = Field(
        default="auto",
        description="Native exchange: Gloo, NCCL, or NCCL where the trainers have GPUs (auto).",
    )
    reduction: Literal["canonical", "fast"] = Field(
        default="canonical",
        description="Native exchange: canonical gives the bits of every other number of trainers; those of "
        "fast depend on the trainers.",
    )
    bucket_bytes: int = Field(
        default=25 << 20,
        ge=4096,
        le=1 << 30,
        description="Native exchange: so many bytes of gradients travel in one operation.",
    )
    restart_policy: RestartPolicy = Field(
        default="always",
        description="Whether a dead trainer or parameter server is started again: always, on_failure (not if "
        "it ended with exit code 0), or never.",
    )
    restart_delay_s: float = Field(
        default=0.0,
        ge=0,
        le=3600,
        description=(
            "A dead trainer or parameter server is started again after so many seconds at the earliest."
        ),
    )
    records_per_task: int | None = Field(default=None, ge=1, lt=2**63)
    drop_last: bool = Field(
        default=False,
        description="A minibatch that would be short, at the end of a file, is not trained; the number of "
        "records left out is told.",
    )
    block_bytes: int = Field(default=1 << 20, ge=256, le=64 << 20)
    slot_count: int = Field(default=1024, ge=128, le=1024)
    push_every: int = Field(default=1, ge=1, lt=2**63)
    pull_every: int = Field(default=1, ge=1, lt=2**63)
    lr_staleness_modulation: bool = Field(
        default=False,
        description="Asynchronous: a push steps with the learning rate divided by the number of versions "
        "that came since its parameters were pulled.",
    )
    max_staleness: int | None = Field(
        default=None,
        ge=0,
        lt=2**63,
        description="Asynchronous: a trainer waits before a minibatch while another one computes with "
        "parameters more than so many versions older; null: it never waits.",
    )
    lr_scale: RateScale = Field(
        default="none",
        description="How learning rates follow the global batch: by its ratio to lr_base_batch_size "
        "(linear), by the root of that (sqrt), or not at all.",
    )
    lr_base_batch_size: int | None = Field(
        default=None,
        ge=1,
        lt=2**63,
        description="The records of a step for which the script's learning rates were chosen; with lr_scale.",
    )
    clip_grad_norm: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    clip_lane_norm: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    grad_norm_every: int = Field(default=10, ge=0, lt=2**63)
    on_nonfinite: Nonfinite = "fail"
    precision: Precision = Field(
        default="fp32",
        description="fp32, or bf16: forward, loss and evaluation run under torch.autocast with bfloat16; "
        "parameters and gradients stay float32.",
    )
    schedule_per: Literal["step", "epoch"] = Field(
        default="step", description="The script's scheduler is stepped after each step, or after each epoch."
    )
    plateau_metric: str | None = Field(
        default=None,
        description="The metric of evaluations that ReduceLROnPlateau is stepped with; null: the script has "
        "no such scheduler.",
    )
    threads_per_trainer: int = Field(default=1, ge=1, lt=2**63)
    data_workers: int = Field(
        default=0,
        ge=0,
        le=256,
        description="So many processes for each trainer read and collate the items of a dataset that is an "
        "object of the script, as num_workers of a DataLoader; 0: threads of the trainer read them.",
    )
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
    max_task_failures: int = Field(default=3, ge=1, lt=2**63)
    max_discarded_fraction: float = Field(default=0.01, ge=0, le=1)
    max_user_failures: int = Field(default=3, ge=1, lt=2**63)
    changed_files: ChangedFiles = "fail"
    checkpoint_every_steps: int | None = Field(default=None, ge=1, lt=2**63)
    checkpoint_every_epochs: int | None = Field(default=1, ge=1, lt=2**63)
    keep_checkpoints: int = Field(default=2, ge=1, le=100)
    deltas_per_base: int = Field(
        default=10,
        ge=0,
        le=100,
        description="Checkpoints in a row that save of tables only changed rows; 0: none.",
    )
    snapshot_bytes: int = Field(default=SNAPSHOT_BYTES, ge=1 << 20, lt=2**63)
    evaluate_every: EvaluateEvery | None = None
    keep_best: str | None = None
    stop_early: StopEarly | None = None
    checkpoint_checksum: Literal["xxh3-128", "md5", "sha256"] = "xxh3-128"
    checkpoint_every_seconds: float | None = Field(default=60.0, gt=0)
    checkpoint_kind: Literal["coordinated", "independent"] = "coordinated"
    skip_after_seconds: float | None = Field(default=None, ge=0)
    gradient_dtype: Transported = "float32"
    parameter_dtype: Transported = "float32"
    error_feedback: bool | None = None
    recovery_timeout_s: float = Field(default=600.0, gt=0)
    init_from: UrlText | None = None
    init_partial: bool = False
    init_optimizer: bool = False
    pre_tasks: tuple[JobTask, ...] = Field(default=(), max_length=MAX_TASKS)
    post_tasks: tuple[JobTask, ...] = Field(default=(), max_length=MAX_TASKS)
    trackers: tuple[Tracker, ...] = Field(
        default=(),
        max_length=MAX_TRACKERS,
        description="Where metrics, settings and the result go beside the storage.",
    )

    @field_validator(
        "checkpoint_every_steps",
        "checkpoint_every_epochs",
        "checkpoint_every_seconds",
        "evaluate_every",
        mode="before",
    )
    @classmethod
    def _off(cls, value: object) -> object:
        """`off` or 0 mean null, which flags and TOML cannot express."""
        return None if value in ("off", "0", 0) else value

    @field_validator("lanes", mode="before")
    @classmethod
    def _is_fixed(cls, value: object) -> object:
        if value == "members":
            raise ValueError(LANES_ARE_FIXED)
        return value

    @field_validator("plateau_metric")
    @classmethod
    def _is_name(cls, value: str | None) -> str | None:
        if value is not None and not METRIC_NAME.fullmatch(value):
            msg = (
                "give the name of a metric alone, for example loss; which values are better says "
                "ReduceLROnPlateau(mode=...)"
            )
            raise ValueError(msg)
        return value

    @field_validator("precision", mode="before")
    @classmethod
    def _needs_no_scaling(cls, value: object) -> object:
        if isinstance(value, str) and value.lower() in ("fp16", "float16", "half", "16", "16-mixed"):
            raise ValueError(
                "gradients in float16 need a scaled loss, which Trireme does not do; use bf16 or fp32"
            )
        return value

    @model_validator(mode="before")
    @classmethod
    def _not_renamed(cls, values: object) -> object:
        for name, message in RENAMED.items():
            if isinstance(values, dict) and name in values:
                raise ValueError(message)
        return values

    @model_validator(mode="before")
    @classmethod
    def _without_pservers(cls, values: object) -> object:
        if isinstance(values, dict) and values.get("strategy") == Strategy.COLLECTIVE:
            return {"pservers": 0} | values
        return values

    @field_validator("keep_best")
    @classmethod
    def _is_criterion(cls, value: str | None) -> str | None:
        if value is not None:
            Criterion.parse(value)
        return value

    @field_validator("init_from")
    @classmethod
    def _is_file_of_values(cls, value: str | None) -> str | None:
        if value is not None and not value.endswith(INITIAL_FILES):
            msg = (
                f"give the path or URL of a file of parameters ({', '.join(INITIAL_FILES)}); "
                "names of jobs are for --init-from on the command line"
            )
            raise ValueError(msg)
        return value

    @field_validator("pre_tasks", "post_tasks", mode="before")
    @classmethod
    def _one(cls, value: object) -> object:
        """A text alone is one task, which flags and the environment can express."""
        return (value,) if isinstance(value, str) else value

    @field_validator("trackers", mode="before")
    @classmethod
    def _by_commas(cls, value: object) -> object:
        """`csv,tensorboard`, which flags and the environment can express."""
        if isinstance(value, str):
            return tuple(part for part in map(str.strip, value.split(",")) if part)
        return (value,) if isinstance(value, dict) else value

    @field_validator("trackers")
    @classmethod
    def _each_once(cls, value: tuple[Tracker, ...]) -> tuple[Tracker, ...]:
        kinds = [tracker.kind for tracker in value]
        for kind in kinds:
            if kinds.count(kind) > 1:
                msg = f"the tracker {kind} is there twice; name each once"
                raise ValueError(msg)
        return value

    @field_validator("pre_tasks")
    @classmethod
    def _when_is_for_post_tasks(cls, value: tuple[JobTask, ...]) -> tuple[JobTask, ...]:
        if any(task.when != "completed" for task in value):
            raise ValueError("`when` is for post-tasks: pre-tasks run before the job")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _check_strategy(self)
        _check_sizes(self)
        _check_mode(self)
        _check_evaluations(self)
        _check_rates(self)
        _check_start_values(self)
        if self.block_bytes % 64:
            msg = f"block_bytes must be a multiple of 64, got {self.block_bytes}"
            raise ValueError(msg)
        return self

    @property
    def named_tasks(self) -> dict[str, JobTask]:
        """Pre-tasks, then post-tasks, in their order."""
        pre = {f"pre-{number}": task for number, task in enumerate(self.pre_tasks)}
        return pre | {f"post-{number}": task for number, task in enumerate(self.post_tasks)}

    @property
    def minibatch_size(self) -> int:
        """Records of one forward/backward: a lane's share of a step (sync), the whole batch (async)."""
        return self.global_batch_size // self.lanes if self.mode is Mode.SYNC else self.global_batch_size

    @property
    def records_per_step(self) -> int:
        """Records behind one step of the optimizer: those of all lanes (sync), of one push (async)."""
        return self.global_batch_size * (1 if self.mode is Mode.SYNC else self.push_every)

    @property
    def lr_factor(self) -> float:
        """What the script's learning rates are multiplied by: they were chosen for steps of
        `lr_base_batch_size` records."""
        ratio = self.records_per_step / (self.lr_base_batch_size or self.records_per_step)
        return math.sqrt(ratio) if self.lr_scale == "sqrt" else ratio

    @property
    def feeds_errors_back(self) -> bool:
        return (
            self.mode is Mode.ASYNC and self.gradient_dtype != "float32" and self.error_feedback is not False
        )

    @property
    def streams(self) -> int:
        return self.lanes if self.mode is Mode.SYNC else 1


class JobSpec(JobSettings):
    """A job's settings, its name, its script (a path, or `source:<digest>/<file name>`) and where its files
    go; written once. `sources`: SHA-256 of the script and of the modules beside it, by their path below its
    folder; of scripts that are a path. `history`: the newest changes that the user has accepted between two
    runs; settings have the values after them."""

    job: JobName
    script: UrlText
    storage: UrlText
    sources: dict[str, str] = Field(default_factory=dict, max_length=256)
    history: tuple[AcceptedChange, ...] = Field(default=(), max_length=MAX_CHANGES)

    @property
    def accepted(self) -> int:
        """Number of the newest change that the user has accepted, 0 if there was none."""
        return self.history[-1].number if self.history else 0

    @property
    def options_change(self) -> int:
        """Number of the newest accepted change of the optimizer's options or its scheduler, 0 if there was
        none. The scheduler's state of a step made before it is that of another schedule."""
        return self.history[-1].options if self.history else 0


def check_size(spec: JobSpec) -> None:
    """For specs that come from users; what etcd holds is read whatever its size. Raises TooLarge."""
    size = len(spec.to_bytes())
    if size > SPEC_BYTES:
        sizes = {name: len(spec.model_dump_json(include={name})) for name in JobSpec.model_fields}
        largest = max(sizes, key=sizes.__getitem__)
        msg = (
            f"the settings of job {spec.job} have {size} bytes, at most {SPEC_BYTES} are taken; {largest} "
            f"alone has {sizes[largest]}"
        )
        hint = f"make {largest} shorter"
        if "dataset" in largest:
            hint = "name its files by globs (data/train-*.csv) instead of one by one"
        raise TooLarge(msg, hint=hint, bytes=size, limit=SPEC_BYTES)


def _check_strategy(spec: JobSettings) -> None:
    """Raises ValueError."""
    if spec.strategy is Strategy.COLLECTIVE and spec.mode is not Mode.SYNC:
        msg = (
            f"strategy is collective, which only synchronous jobs can have, and mode is {spec.mode}; "
            "use mode sync, or strategy parameter_server"
        )
        raise ValueError(msg)
    if spec.strategy is Strategy.COLLECTIVE and spec.pservers:
        msg = (
            f"pservers is {spec.pservers}, but a job with strategy collective has no parameter "
            "servers; leave it out, or use strategy parameter_server"
        )
        raise ValueError(msg)
    if spec.strategy is Strategy.COLLECTIVE and spec.parameter_dtype != "float32":
        msg = (
            f"parameter_dtype is {spec.parameter_dtype}, but with strategy collective no parameters "
            "travel in a step; leave it out (gradient_dtype is for gradients, both ways)"
        )
        raise ValueError(msg)
    if spec.strategy is Strategy.PARAMETER_SERVER and not spec.pservers:
        msg = (
            "pservers is 0: a job needs one at least, which hold its parameters; only strategy "
            "collective does without"
        )
        raise ValueError(msg)
    if spec.strategy is Strategy.PARAMETER_SERVER and spec.min_members > 1:
        msg = (
            f"min_members is {spec.min_members}, which only jobs with strategy collective can have; "
            "leave it out, or use that strategy"
        )
        raise ValueError(msg)
    _check_exchange(spec)


def _check_exchange(spec: JobSettings) -> None:
    if spec.strategy is Strategy.PARAMETER_SERVER and spec.exchange != "direct":
        msg = (
            f"exchange is {spec.exchange}, which only jobs with strategy collective can have; leave it "
            "out, or use that strategy"
        )
        raise ValueError(msg)
    if spec.exchange == "direct":
        for name in OF_NATIVE:
            if (value := getattr(spec, name)) != type(spec).model_fields[name].default:
                msg = (
                    f"{name} is {value}, which only native exchange has, and exchange is direct; leave "
                    "it out, or use exchange native"
                )
                raise ValueError(msg)


def _check_sizes(spec: JobSettings) -> None:
    """The records of a step, of a minibatch and of a task fit together. Raises ValueError."""
    lanes, size, task = spec.lanes, spec.global_batch_size, spec.records_per_task
    if lanes & (lanes - 1):
        below = 1 << (lanes.bit_length() - 1)
        msg = f"lanes must be a power of two, got {lanes}; use {below} or {below * 2}"
        raise ValueError(msg)
    if spec.mode is Mode.SYNC and size < lanes:
        msg = f"global_batch_size {size} is less than lanes {lanes}: every lane needs a record; lower lanes"
        raise ValueError(msg)
    if spec.mode is Mode.SYNC and size % lanes:
        msg = f"global_batch_size {size} is not a multiple of lanes {lanes}: lanes take equal shares"
        raise ValueError(msg)
    if spec.drop_last and task is not None and task % spec.minibatch_size:
        msg = (
            f"drop_last is set, and records_per_task {task} is not a multiple of the "
            f"{spec.minibatch_size} records of a "
            "minibatch, so each task would lose some; leave records_per_task out, or give a multiple"
        )
        raise ValueError(msg)


def _check_mode(spec: JobSettings) -> None:
    """Settings that only asynchronous jobs can have. Raises ValueError."""
    for name, value, default in (
        ("checkpoint_kind", spec.checkpoint_kind, "coordinated"),
        ("skip_after_seconds", spec.skip_after_seconds, None),
        ("error_feedback", spec.error_feedback or None, None),
        ("lr_staleness_modulation", spec.lr_staleness_modulation, False),
        ("max_staleness", spec.max_staleness, None),
        ("push_every", spec.push_every, 1),
    ):
        if spec.mode is Mode.SYNC and value != default:
            msg = (
                f"{name} is {value}, which only asynchronous jobs can have, and mode is sync; use mode "
                "async or leave it out"
            )
            raise ValueError(msg)
    if spec.trackers and spec.dispatch is Dispatch.ETCD:
        msg = (
            "trackers are set, which only jobs with a master can have; leave them out, or use dispatch master"
        )
        raise ValueError(msg)


def _check_evaluations(spec: JobSettings) -> None:
    """Raises ValueError."""
    if spec.plateau_metric is not None and spec.mode is Mode.ASYNC:
        msg = (
            f"plateau_metric is {spec.plateau_metric}, which only synchronous jobs can have; leave it "
            "out, or use mode sync"
        )
        raise ValueError(msg)
    if spec.evaluate_every is None:
        stop_early = spec.stop_early.metric if spec.stop_early is not None else None
        named = {"keep_best": spec.keep_best, "stop_early": stop_early, "plateau_metric": spec.plateau_metric}
        for name, value in named.items():
            if value is not None:
                msg = (
                    f"{name} is {value}, but nothing is evaluated while the job trains: evaluate_every "
                    f"is not set; set evaluate_every, too, or leave {name} out"
                )
                raise ValueError(msg)
        return
    if spec.evaluation_dataset is None:
        msg = (
            f"evaluate_every is {spec.evaluate_every}, but there is no evaluation dataset; define "
            "evaluation_dataset() in the script"
        )
        raise ValueError(msg)
    if spec.checkpoint_kind == "independent":
        msg = (
            f"evaluate_every is {spec.evaluate_every} and checkpoint_kind independent: what is "
            "evaluated is one version of all "
            "parameters, which only coordinated checkpoints hold; leave out one of both"
        )
        raise ValueError(msg)


def _check_start_values(spec: JobSettings) -> None:
    """Raises ValueError."""
    for name, value in (("init_optimizer", spec.init_optimizer), ("init_partial", spec.init_partial)):
        if value and spec.init_from is None:
            held = "that state" if name == "init_optimizer" else "the values"
            msg = (
                f"{name} is set, but there is no init_from, whose file holds {held}; give it, or leave "
                f"{name} out"
            )
            raise ValueError(msg)
    if not spec.init_optimizer or spec.init_from is None:
        return
    if spec.init_partial:
        msg = (
            "init_optimizer and init_partial are both set: the state of an optimizer fits only a whole "
            "model; leave one of them out"
        )
        raise ValueError(msg)
    if spec.init_from.endswith(".safetensors"):
        msg = (
            f"init_optimizer is set, and {spec.init_from} holds parameters alone; give a job "
            "(--init-from JOB[@STEP]), or a file "
            'of torch.save({"model": ..., "optimizer": ...})'
        )
        raise ValueError(msg)


def _check_rates(spec: JobSettings) -> None:
    """Raises ValueError for one of both settings of learning rates without the other."""
    scale, base = spec.lr_scale, spec.lr_base_batch_size
    if scale != "none" and base is None:
        msg = (
            f"lr_scale is {scale}, and lr_base_batch_size is not set; give the records of a step for "
            "which the script's learning rate was chosen"
        )
        raise ValueError(msg)
    if scale == "none" and base is not None:
        msg = (
            f"lr_base_batch_size is {base}, and lr_scale is none, so no rate follows it; set lr_scale "
            "to linear or sqrt, or leave it out"
        )
        raise ValueError(msg)
