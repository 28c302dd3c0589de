"""Which settings go together: a setting that would change what is trained, and cannot here, is refused; one that changes nothing here is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from shared.records.job_spec.choices import Dispatch, Mode, Strategy

if TYPE_CHECKING:
    from shared.records.job_spec.settings import JobSettings


def check_mode(spec: JobSettings) -> None:
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


def check_evaluations(spec: JobSettings) -> None:
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


def check_start_values(spec: JobSettings) -> None:
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


class Idle(NamedTuple):
    """These settings change nothing in jobs for which `when` holds. `why`: with the value of the other setting."""

    names: tuple[str, ...]
    when: Callable[[JobSettings], bool]
    why: Callable[[JobSettings], str]


def _is_async(spec: JobSettings) -> bool:
    return spec.mode is Mode.ASYNC


def _is_collective(spec: JobSettings) -> bool:
    return spec.strategy is Strategy.COLLECTIVE


IDLE: tuple[Idle, ...] = (
    Idle(
        ("lanes", "grad_norm_every", "deterministic", "checkpoint_every_steps", "rebalance_s"),
        _is_async,
        lambda _: "only synchronous jobs have it, and mode is async",
    ),
    Idle(("checkpoint_every_seconds", "pull_every"), lambda spec: not _is_async(spec), lambda _: "only asynchronous jobs have it, and mode is sync"),
    Idle(
        ("checkpoint_every_epochs",),
        lambda spec: spec.checkpoint_kind == "independent",
        lambda _: "checkpoint_kind is independent, whose checkpoints follow checkpoint_every_seconds alone",
    ),
    Idle(("deltas_per_base",), _is_collective, lambda _: "strategy is collective, whose checkpoints are whole"),
    Idle(
        ("rebalance_s", "straggler_factor"),
        lambda spec: spec.stragglers == "off",
        lambda _: "stragglers is off",
    ),
    Idle(
        ("grad_norm_every",),
        lambda spec: spec.clip_grad_norm is not None,
        lambda spec: f"clip_grad_norm is {spec.clip_grad_norm:g}, so the norm is known in each step",
    ),
    Idle(
        ("error_feedback",),
        lambda spec: spec.gradient_dtype == "float32",
        lambda _: "gradient_dtype is float32, so no gradient is rounded",
    ),
    Idle(
        ("restart_delay_s",),
        lambda spec: spec.restart_policy == "never",
        lambda _: "restart_policy is never",
    ),
)  # fmt: skip


def without_effect(spec: JobSettings) -> list[str]:
    """A sentence for each setting that differs from its default and changes nothing in this job."""
    fields = type(spec).model_fields
    told: dict[str, str] = {}
    for idle in IDLE:
        if idle.when(spec):
            for name in idle.names:
                value = getattr(spec, name)
                if value != fields[name].default:
                    told.setdefault(name, f"{name} is {value}, which changes nothing: {idle.why(spec)}; leave it out")
    return list(told.values())
