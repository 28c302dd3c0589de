"""Whether the sizes of a job fit together: records of a step, of a minibatch and of a task."""

from __future__ import annotations

from trireme_shared.protocol.records.job_spec.choices import Mode


def check_sizes(
    mode: Mode, lanes: int, global_batch_size: int, records_per_task: int | None, *, drop_last: bool
) -> None:
    """Raises ValueError."""
    minibatch = global_batch_size // lanes if mode is Mode.SYNC else global_batch_size
    if lanes & (lanes - 1):
        below = 1 << (lanes.bit_length() - 1)
        msg = f"lanes must be a power of two, got {lanes}; use {below} or {below * 2}"
        raise ValueError(msg)
    if mode is Mode.SYNC and global_batch_size < lanes:
        msg = (
            f"global_batch_size {global_batch_size} is less than lanes {lanes}: every lane needs a record; lower lanes"
        )
        raise ValueError(msg)
    if mode is Mode.SYNC and global_batch_size % lanes:
        msg = f"global_batch_size {global_batch_size} is not a multiple of lanes {lanes}: lanes take equal shares"
        raise ValueError(msg)
    if drop_last and records_per_task is not None and records_per_task % minibatch:
        msg = (
            f"drop_last is set, and records_per_task {records_per_task} is not a multiple of the {minibatch} records of a "
            "minibatch, so each task would lose some; leave records_per_task out, or give a multiple"
        )
        raise ValueError(msg)
