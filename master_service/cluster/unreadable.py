"""What another version, or a person, has written of jobs and schedules, and this version does not know.

a record that it cannot read  UNREADABLE: what can be read is shown, nothing is written; it may be deleted
fields that it does not know  kept as they are, and told
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from master_service.core.changes import Event
from master_service.core.state.cluster import ClusterState
from trireme_shared.protocol.records.cluster import ClusterJob, JobSchedule, Standing
from trireme_shared.protocol.records.datasets import TextLines
from trireme_shared.protocol.records.job_spec import JobSpec
from trireme_shared.protocol.records.record import Record

SHOWN = 10  # names of fields
UNKNOWN = "unknown"  # what cannot be read, where a spec must have something

R = TypeVar("R", bound=Record)


def unreadable_job(name: str, value: bytes, cause: str) -> ClusterJob:
    """`value`: its record as etcd has it. `cause`: why it cannot be read, or written."""
    known, spec = _parts(name, value)
    job = _readable(ClusterJob, known, {"job": name, "spec": spec})
    return job.with_fields(standing=Standing.UNREADABLE, wanted="run", reason=cause)


def unreadable_schedule(name: str, value: bytes, cause: str) -> JobSchedule:
    """As `unreadable_job`. It begins no jobs."""
    known, spec = _parts(name, value)
    schedule = _readable(JobSchedule, known, {"name": name, "spec": spec, "cron": ""})
    return schedule.with_fields(next_time="", reason=f"{Standing.UNREADABLE}: {cause}")


def news_of(state: ClusterState) -> list[Event]:
    """What a new leader tells of what it found."""
    told = [unreadable_event(each) for each in state.unreadable]
    for job in state.jobs.values():
        if job.standing is not Standing.UNREADABLE and (names := unknown_fields(job)):
            fields = ", ".join(names[:SHOWN])
            message = (
                f"job {job.job} goes on without what this version of Trireme does not know of it: {fields}"
            )
            told.append(Event("job_fields_unknown", message, {"job": job.job}))
    return told


def unreadable_event(found: ClusterJob | JobSchedule) -> Event:
    if isinstance(found, JobSchedule):
        message = f"schedule {found.name} is {found.reason}"
        return Event("schedule_unreadable", message, {"schedule": found.name})
    return Event("job_unreadable", f"job {found.job} is {found.standing}: {found.reason}", {"job": found.job})


def unknown_fields(record: BaseModel, below: str = "") -> list[str]:
    """What another version has written into it, as `spec.colour`; this one keeps it, without an effect."""
    found = [f"{below}{name}" for name in record.model_extra or ()]
    for name in type(record).model_fields:
        if isinstance(value := getattr(record, name), BaseModel):
            found += unknown_fields(value, f"{below}{name}.")
    return found


def _parts(name: str, value: bytes) -> tuple[dict[str, Any], JobSpec]:
    """The fields of the record but for the spec, and what can be read of the spec."""
    known = _fields(value)
    least = {"job": name, "script": UNKNOWN, "storage": "", "dataset": TextLines(urls=(UNKNOWN,))}
    spec = _readable(JobSpec, _fields_in(known.pop("spec", None)), least)
    return known, spec.with_fields(job=name)


def _fields(value: bytes) -> dict[str, Any]:
    try:
        return _fields_in(json.loads(value))
    except ValueError:
        return {}


def _fields_in(found: Any) -> dict[str, Any]:
    return dict(found) if isinstance(found, dict) else {}


def _readable(kind: type[R], values: Mapping[str, Any], least: Mapping[str, Any]) -> R:
    """The record with those of `values` that it may have. `least`: what it cannot be without."""
    known = {**least, **{name: value for name, value in values.items() if name in kind.model_fields}}
    while True:
        try:
            return kind.model_validate(known)
        except ValidationError as error:
            wrong = {str(each["loc"][0]) for each in error.errors() if each["loc"]}
            kept = {**least, **{name: value for name, value in known.items() if name not in wrong}}
            known = dict(least) if kept == known else kept
