"""What the process that follows a job is told, and what it tells: one JSON object a line, on its standard input and output.

leader ─ Assignment, then Permit again and again ─► process ─ News ─► leader: an event, a line in the log
"""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import Field

from trireme_shared.platform.runtime.telemetry import hidden
from trireme_shared.protocol.records import JobSpec
from trireme_shared.protocol.records.job_choices import Tracker
from trireme_shared.protocol.records.job_spec import JobSettings
from trireme_shared.protocol.records.record import Record

UNTOLD = {"trackers", "pre_tasks", "post_tasks"}  # commands may have what nobody shall read


class Assignment(Record):
    """`beside`: the folder of the script, if a tracker is the user's."""

    job: str
    storage: str
    trackers: tuple[Tracker, ...]
    parameters: dict[str, str]
    beside: str = ""


class Permit(Record):
    """`until`: by the machine's clock; after it another leader may have begun. `result`: the job has ended, all its metrics are stored."""

    until: float
    result: dict[str, Any] | None = None


class News(Record):
    """`state`: late (it lacks what the job has stored), well (again), ended (it has all, and was told the end); alive: nothing new."""

    state: Literal["late", "well", "ended", "alive"]
    tracker: str = ""
    cause: str = ""
    behind: int = Field(default=0, ge=0)


def assignment_of(spec: JobSpec, beside: str = "") -> Assignment:
    settings = spec.model_dump(mode="json", include=set(JobSettings.model_fields) - UNTOLD)
    told = {"job": spec.job, "script": spec.script, **settings}
    parameters = {name: hidden(_text(value)) for name, value in told.items() if value is not None}
    return Assignment(job=spec.job, storage=spec.storage, trackers=spec.trackers, parameters=parameters, beside=beside)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
