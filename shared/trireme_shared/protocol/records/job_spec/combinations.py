"""Which settings go together: one that would change what is trained, and cannot in this job, is refused. Those that change nothing: idle.py."""

from __future__ import annotations

from typing import Any, Protocol

from trireme_shared.protocol.records.job_spec.choices import Dispatch, EvaluateEvery, Mode, StopEarly


class Settings(Protocol):
    """Those of JobSettings that are compared here."""

    @property
    def mode(self) -> Mode: ...

    @property
    def dispatch(self) -> Dispatch: ...

    @property
    def checkpoint_kind(self) -> str: ...

    @property
    def skip_after_seconds(self) -> float | None: ...

    @property
    def error_feedback(self) -> bool | None: ...

    @property
    def lr_staleness_modulation(self) -> bool: ...

    @property
    def max_staleness(self) -> int | None: ...

    @property
    def push_every(self) -> int: ...

    @property
    def trackers(self) -> tuple[Any, ...]: ...

    @property
    def evaluation_dataset(self) -> Any: ...

    @property
    def evaluate_every(self) -> EvaluateEvery | None: ...

    @property
    def keep_best(self) -> str | None: ...

    @property
    def stop_early(self) -> StopEarly | None: ...

    @property
    def plateau_metric(self) -> str | None: ...

    @property
    def init_from(self) -> str | None: ...

    @property
    def init_partial(self) -> bool: ...

    @property
    def init_optimizer(self) -> bool: ...


def check_mode(spec: Settings) -> None:
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
            msg = f"{name} is {value}, which only asynchronous jobs can have, and mode is sync; use mode async or leave it out"
            raise ValueError(msg)
    if spec.trackers and spec.dispatch is Dispatch.ETCD:
        msg = "trackers are set, which only jobs with a master can have; leave them out, or use dispatch master"
        raise ValueError(msg)


def check_evaluations(spec: Settings) -> None:
    """Raises ValueError."""
    if spec.plateau_metric is not None and spec.mode is Mode.ASYNC:
        msg = f"plateau_metric is {spec.plateau_metric}, which only synchronous jobs can have; leave it out, or use mode sync"
        raise ValueError(msg)
    if spec.evaluate_every is None:
        stop_early = spec.stop_early.metric if spec.stop_early is not None else None
        named = {"keep_best": spec.keep_best, "stop_early": stop_early, "plateau_metric": spec.plateau_metric}
        for name, value in named.items():
            if value is not None:
                msg = f"{name} is {value}, but nothing is evaluated while the job trains: evaluate_every is not set; set evaluate_every, too, or leave {name} out"
                raise ValueError(msg)
        return
    if spec.evaluation_dataset is None:
        msg = f"evaluate_every is {spec.evaluate_every}, but there is no evaluation dataset; define evaluation_dataset() in the script"
        raise ValueError(msg)
    if spec.checkpoint_kind == "independent":
        msg = (
            f"evaluate_every is {spec.evaluate_every} and checkpoint_kind independent: what is evaluated is one version of all "
            "parameters, which only coordinated checkpoints hold; leave out one of both"
        )
        raise ValueError(msg)


def check_start_values(spec: Settings) -> None:
    """Raises ValueError."""
    for name, value in (("init_optimizer", spec.init_optimizer), ("init_partial", spec.init_partial)):
        if value and spec.init_from is None:
            held = "that state" if name == "init_optimizer" else "the values"
            msg = f"{name} is set, but there is no init_from, whose file holds {held}; give it, or leave {name} out"
            raise ValueError(msg)
    if not spec.init_optimizer or spec.init_from is None:
        return
    if spec.init_partial:
        msg = "init_optimizer and init_partial are both set: the state of an optimizer fits only a whole model; leave one of them out"
        raise ValueError(msg)
    if spec.init_from.endswith(".safetensors"):
        msg = (
            f"init_optimizer is set, and {spec.init_from} holds parameters alone; give a job (--init-from JOB[@STEP]), or a file "
            'of torch.save({"model": ..., "optimizer": ...})'
        )
        raise ValueError(msg)
