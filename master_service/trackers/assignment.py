"""What the process that follows a job is told, what it tells, and what trackers remember from one process to
the next.

leader ─ Assignment, then Permit again and again ─► process ─ News ─► leader: an event, a line in the log
                                                      └─ Memory: `<storage>/trackers/`

Each message is one JSON object a line, on the process's standard input and output.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from trireme_shared.platform.runtime import ids
from trireme_shared.platform.runtime.telemetry import hidden
from trireme_shared.platform.storage import files
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
    """`until`: by the machine's clock; after it another leader may have begun. `result`: the job has ended,
    all its metrics are stored."""

    until: float
    result: dict[str, Any] | None = None


class News(Record):
    """`state`: late (it lacks what the job has stored), well (again), ended (it has all, and was told the
    end); alive: nothing new."""

    state: Literal["late", "well", "ended", "alive"]
    tracker: str = ""
    cause: str = ""
    behind: int = Field(default=0, ge=0)


def assignment_of(spec: JobSpec, beside: str = "") -> Assignment:
    settings = spec.model_dump(mode="json", include=set(JobSettings.model_fields) - UNTOLD)
    told = {"job": spec.job, "script": spec.script, **settings}
    parameters = {name: hidden(_text(value)) for name, value in told.items() if value is not None}
    return Assignment(
        job=spec.job, storage=spec.storage, trackers=spec.trackers, parameters=parameters, beside=beside
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


FOLDER = "trackers"
ENDED = "ended.json"


class Memory:
    """What trackers of a job remember, in `<storage>/trackers/`.

    run.json       the id of the run, and how often somebody began to follow it
    <kind>.json    of trackers that cannot tell what they have: what was logged
    ended.json     all of them were told the end of the job

    Its methods block, and raise OSError.
    """

    def __init__(self, storage: str) -> None:
        self._folder = files.join(storage, FOLDER)

    def begin(self) -> tuple[str, int]:
        """The run's id and the number of this attempt."""
        known = self.load("run")
        run, attempt = str(known.get("id") or ids.new_id("run")), int(known.get("attempt", 0)) + 1
        self.save("run", {"id": run, "attempt": attempt})
        return run, attempt

    def load(self, name: str) -> dict[str, Any]:
        """Empty if there is nothing, or what there is cannot be read."""
        try:
            found = json.loads(files.read_bytes(self._place(name)))
        except (FileNotFoundError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def save(self, name: str, document: Mapping[str, Any]) -> None:
        files.write_bytes(self._place(name), json.dumps(document, separators=(",", ":")).encode())

    def _place(self, name: str) -> str:
        return files.join(self._folder, f"{re.sub(r'[^A-Za-z0-9_.-]', '-', name)}.json")

    @property
    def ended(self) -> bool:
        return files.exists(files.join(self._folder, ENDED))

    def end(self) -> None:
        files.write_bytes(files.join(self._folder, ENDED), b"{}")

    def go_on(self) -> None:
        """A job that had failed trains again."""
        files.remove_file(files.join(self._folder, ENDED))
