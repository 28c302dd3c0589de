"""What settings do to a job: which change nothing in it, because of its other settings (they are told, with
both values), and which may change when the same job is run again. docs/again.md has the same table.

FREE        members, limits, where parameters are stepped, when checkpoints are written: no bit depends on
            them
GROWS       epochs: there may be more of them
ACCEPTED    hyperparameters: they may change if the user says so (--accept-changes); the steps that are done
            belong to the old value
FIXED       what the queue, the checkpoints or the evaluations of the job are made by. Each with its reason
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from trireme_shared.protocol.records.datasets import MapStyle
from trireme_shared.protocol.records.job_choices import Mode, Strategy
from trireme_shared.protocol.records.job_spec import JobSettings, JobSpec


class Idle(NamedTuple):
    """These settings change nothing in jobs for which `when` holds. `why`: with the value of the other
    setting."""

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
    Idle(
        ("checkpoint_every_seconds", "pull_every"),
        lambda spec: not _is_async(spec),
        lambda _: "only asynchronous jobs have it, and mode is sync",
    ),
    Idle(
        ("checkpoint_every_epochs",),
        lambda spec: spec.checkpoint_kind == "independent",
        lambda _: "checkpoint_kind is independent, whose checkpoints follow checkpoint_every_seconds alone",
    ),
    Idle(
        ("deltas_per_base",),
        _is_collective,
        lambda _: "strategy is collective, whose checkpoints are whole",
    ),
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
        ("data_workers",),
        lambda spec: not isinstance(spec.dataset, MapStyle),
        lambda _: "processes read only objects of the script with items by number (docs/data.md)",
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
                    told.setdefault(
                        name, f"{name} is {value}, which changes nothing: {idle.why(spec)}; leave it out"
                    )
    return list(told.values())


FREE = frozenset(
    {
        "trainers", "pservers", "sources", "history", "lease_ttl_s", "join_window_s", "stragglers",
        "rebalance_s", "straggler_factor", "task_timeout_floor_s", "task_timeout_ceiling_s",
        "max_task_failures", "max_discarded_fraction", "max_user_failures",
        "changed_files", "checkpoint_every_steps",
        "checkpoint_every_epochs", "checkpoint_every_seconds", "keep_checkpoints", "deltas_per_base",
        "snapshot_bytes", "checkpoint_checksum", "skip_after_seconds", "recovery_timeout_s",
        "grad_norm_every", "pre_tasks", "post_tasks", "trackers", "strategy", "min_members", "exchange",
        "backend", "reduction", "bucket_bytes", "restart_policy", "restart_delay_s", "data_workers",
    }
)  # fmt: skip
GROWS = "epochs"
ACCEPTED = frozenset(
    {
        "global_batch_size", "pull_every", "clip_grad_norm", "clip_lane_norm", "on_nonfinite",
        "threads_per_trainer", "deterministic", "lr_staleness_modulation", "max_staleness", "lr_scale",
        "lr_base_batch_size", "precision", "schedule_per", "gradient_dtype", "parameter_dtype",
        "error_feedback",
    }
)  # fmt: skip

_ORDER = "the records that are trained already were chosen by the old value"
_DEVICE = "a job trains on the kind of device on which its parameters were made"
_LEDGER = "the ledgers of the parameter servers count by the old value"
_PLATEAU = "the learning rate follows the evaluations that were made with the old value"
_CUT = "checkpoints are cut into blocks of the old size"
_EVALUATED = "evaluations of the old kind cannot be compared with new ones"
_START = "the job has begun with its values already"
_PLACE = "the job's queue and checkpoints are there"
FIXED = {
    **dict.fromkeys(
        ("dataset", "mode", "lanes", "seed", "records_per_task", "drop_last", "shuffle"), _ORDER
    ),
    "device": _DEVICE,
    "push_every": _LEDGER,
    "plateau_metric": _PLATEAU,
    **dict.fromkeys(("block_bytes", "slot_count"), _CUT),
    **dict.fromkeys(("evaluation_dataset", "evaluate_every", "keep_best", "stop_early"), _EVALUATED),
    **dict.fromkeys(("init_from", "init_partial", "init_optimizer"), _START),
    **dict.fromkeys(("job", "script", "storage", "dispatch", "checkpoint_kind"), _PLACE),
}  # fmt: skip
MEMBERS = ("trainers", "pservers", "sources", "history")  # whoever leads next writes the first three


def renewed(stored: JobSpec, wanted: JobSpec) -> JobSpec:
    """`stored` with what may change as `wanted` has it; the numbers of members stay, and so does everything
    that is fixed. Hyperparameters change with an accepted change that `stored` does not have."""
    changes = {name: getattr(wanted, name) for name in FREE - set(MEMBERS)}
    if wanted.accepted > stored.accepted:
        changes |= {name: getattr(wanted, name) for name in (*ACCEPTED, "history")}
    if stored.strategy is not wanted.strategy:
        changes["pservers"] = wanted.pservers
    return stored.model_copy(update={**changes, GROWS: max(stored.epochs, wanted.epochs)})
