"""What an epoch of a job is made of, known before it begins; and what the user should know of it."""

from __future__ import annotations

from collections.abc import Iterator

from master_service.core.changes import Event, Fields
from master_service.core.queue.file_table import FileTable
from master_service.core.queue.streams import Streams
from trireme_shared.protocol.records import EpochPlan, JobSpec, Mode

SHORT = 0.9
"""Steps that have less than so much of the global batch, on average, are told."""


def plan_of(spec: JobSpec, streams: Streams) -> EpochPlan:
    """`streams`: of the tasks that are trained."""
    table = streams.table
    assert table is not None
    size = -(-table.task_records // spec.minibatch_size)
    steps = streams.longest if spec.mode is Mode.SYNC else table.tasks * -(-size // spec.push_every)
    return EpochPlan(
        records=table.records, left_out=table.left_out, tasks=table.tasks, task_records=table.task_records, steps=steps
    )


def news_of(spec: JobSpec, table: FileTable, plan: EpochPlan) -> Iterator[Event]:
    """What is told before a job begins."""
    if plan.left_out:
        message = (
            f"drop_last leaves out {plan.left_out} of {plan.records + plan.left_out} records in each epoch: the ends of files, "
            f"which do not fill a minibatch of {spec.minibatch_size}"
        )
        yield Event("records_left_out", message, {"records": plan.left_out})
    if sentence := short_steps(spec, table, plan):
        fields: Fields = {
            "steps": plan.steps or 0,
            "records": plan.records,
            "global_batch_size": spec.global_batch_size,
        }
        yield Event("steps_are_short", sentence, fields)


def short_steps(spec: JobSpec, table: FileTable, plan: EpochPlan) -> str:
    """A warning if steps of a synchronous job have fewer records than the user asked for, with the reason and what to do; else ""."""
    if spec.mode is not Mode.SYNC or not plan.steps:
        return ""
    full = -(-plan.records // spec.global_batch_size)
    average = plan.records / plan.steps
    if plan.steps <= full or plan.records >= SHORT * plan.steps * spec.global_batch_size:
        return ""
    reasons = list(_reasons(spec, table, plan))
    why, advice = (list(dict.fromkeys(texts)) for texts in zip(*reasons, strict=True))
    return (
        f"an epoch has {plan.steps} steps of {average:.4g} records on average, global_batch_size is {spec.global_batch_size} "
        f"({full} steps would do): {'; and '.join(why)}; {', and '.join(advice)}"
    )


def _reasons(spec: JobSpec, table: FileTable, plan: EpochPlan) -> Iterator[tuple[str, str]]:
    """Why steps are short, and what to do: at least one."""
    files = [file.records for file in table.files if file.records]
    size, given = spec.minibatch_size, spec.records_per_task
    in_files = sum(-(-records // size) for records in files)
    if len(files) > 1 and in_files > -(-plan.records // size):
        average = plan.records / len(files)
        yield (
            f"a minibatch has records of one file, and {len(files)} files of {average:.4g} records on average do not fill minibatches of {size}",
            "join the files, or set drop_last, or use minibatches of fewer records (a lower global_batch_size, or more lanes)",
        )
    if given is not None and given % size:
        yield (
            f"records_per_task {given} is no multiple of the {size} records of a minibatch",
            "leave records_per_task out",
        )
    if spec.lanes > 1 and plan.steps and plan.steps > -(-in_files // spec.lanes):
        tasks = f"{plan.tasks} task{'s' * (plan.tasks != 1)} of up to {table.task_records} records"
        yield (
            f"{tasks} are no equal shares for {spec.lanes} lanes, so some lanes have no records while others train",
            "leave records_per_task out" if given is not None else "use fewer lanes",
        )
