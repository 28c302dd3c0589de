"""Which settings of a job may change when the same job is run again. docs/again.md has the same table.

FREE        members, limits, where parameters are stepped, when checkpoints are written: no bit depends on them
GROWS       epochs: there may be more of them
FIXED       what is trained, or how: the steps that are done belong to the old value. Each with its reason
"""

from __future__ import annotations

from trireme_shared.protocol.records.job_spec import JobSpec

FREE = frozenset(
    {
        "trainers", "pservers", "sources", "lease_ttl_s", "join_window_s", "stragglers", "rebalance_s", "straggler_factor",
        "task_timeout_floor_s", "task_timeout_ceiling_s", "max_task_failures", "max_discarded_fraction", "max_user_failures", "changed_files",
        "checkpoint_every_steps", "checkpoint_every_epochs", "checkpoint_every_seconds", "keep_checkpoints",
        "deltas_per_base", "snapshot_bytes", "checkpoint_checksum", "skip_after_seconds", "recovery_timeout_s", "grad_norm_every", "pre_tasks", "post_tasks",
        "trackers", "strategy", "min_members", "exchange", "backend", "reduction", "bucket_bytes", "restart_policy", "restart_delay_s",
    }
)  # fmt: skip
GROWS = "epochs"

_BITS = "the steps that are done were made with the old value, so the model would be that of neither"
_CUT = "checkpoints are cut into blocks of the old size"
_EVALUATED = "evaluations of the old kind cannot be compared with new ones"
_START = "the job has begun with its values already"
_PLACE = "the job's queue and checkpoints are there"
FIXED = {
    **dict.fromkeys(
        (
            "dataset", "mode", "global_batch_size", "lanes", "seed", "records_per_task", "drop_last", "push_every", "pull_every",
            "clip_grad_norm", "clip_lane_norm", "on_nonfinite", "threads_per_trainer", "device", "deterministic", "shuffle",
            "lr_staleness_modulation", "max_staleness", "lr_scale", "lr_base_batch_size", "precision", "schedule_per", "plateau_metric", "gradient_dtype", "parameter_dtype", "error_feedback",
        ),
        _BITS,
    ),
    **dict.fromkeys(("block_bytes", "slot_count"), _CUT),
    **dict.fromkeys(("evaluation_dataset", "evaluate_every", "keep_best", "stop_early"), _EVALUATED),
    **dict.fromkeys(("init_from", "init_partial", "init_optimizer"), _START),
    **dict.fromkeys(("job", "script", "storage", "dispatch", "checkpoint_kind"), _PLACE),
}  # fmt: skip
MEMBERS = ("trainers", "pservers", "sources")  # whoever leads next writes these


def renewed(stored: JobSpec, wanted: JobSpec) -> JobSpec:
    """`stored` with what may change as `wanted` has it; the numbers of members stay, and so does everything that is fixed."""
    changes = {name: getattr(wanted, name) for name in FREE - set(MEMBERS)}
    if stored.strategy is not wanted.strategy:
        changes["pservers"] = wanted.pservers
    return stored.model_copy(update={**changes, GROWS: max(stored.epochs, wanted.epochs)})
