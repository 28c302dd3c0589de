"""Settings that change nothing in a job of this mode, this strategy, or with these other settings: they are told, with both values."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from trireme_shared.protocol.records.job_spec.choices import Mode, Strategy
from trireme_shared.protocol.records.job_spec.settings import JobSettings


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
                if value is not None and value != fields[name].default:  # None: it is off
                    told.setdefault(name, f"{name} is {value}, which changes nothing: {idle.why(spec)}; leave it out")
    return list(told.values())
