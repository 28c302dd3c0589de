"""Drives a cluster by the client that openapi-python-client gives. Prints what it saw as one JSON object."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from trireme_api import AuthenticatedClient
from trireme_api.api.checkpoints import create_checkpoint
from trireme_api.api.events import list_events
from trireme_api.api.jobs import cancel_job, create_job, get_job, pause_job, resume_job
from trireme_api.api.operations import get_operation
from trireme_api.api.resizes import create_resize
from trireme_api.api.system import get_version
from trireme_api.api.tasks import get_task, list_tasks
from trireme_api.models import (
    CreateCheckpoint,
    CreateJob,
    CreateResize,
    JobSettings,
    JobView,
    Npy,
    Operation,
    Problem,
    Resize,
    Scheduling,
    Source,
)

LIMIT_S = 60.0
T = TypeVar("T")

job = os.environ["SCENARIO_JOB"]
script = Path(os.environ["SCENARIO_SCRIPT"])
client = AuthenticatedClient(base_url=os.environ["SCENARIO_URL"], token=os.environ["SCENARIO_TOKEN"])


def good(answer: T | Problem | None) -> T:
    if answer is None or isinstance(answer, Problem):
        raise AssertionError(answer)
    return answer


def job_when(holds: Callable[[JobView], bool]) -> JobView:
    end = time.monotonic() + LIMIT_S
    while not holds(found := good(get_job.sync(job, client=client))):
        assert time.monotonic() < end, found
        time.sleep(0.1)
    return found


def ended(begun: Operation | Problem | None) -> Operation:
    """The operation once it has ended well."""
    operation = good(begun)
    while operation.state == "RUNNING":
        operation = good(get_operation.sync(job, operation.operation_id, client=client, wait_s=4.0))
    assert operation.state == "DONE", operation
    return operation


settings = JobSettings(
    dataset=Npy(urls=os.environ["SCENARIO_FILES"].split(","), aligned=True),
    epochs=10_000,
    global_batch_size=32,
    lanes=4,
    records_per_task=16,
    block_bytes=256,
)
asked = CreateJob(
    name=job,
    settings=settings,
    source=Source(file_name="script.py", text=script.read_text()),
    scheduling=Scheduling(max_trainers=1),
)
key = uuid.uuid4().hex
created = good(create_job.sync(client=client, body=asked, idempotency_key=key))
again = good(create_job.sync(client=client, body=asked, idempotency_key=key))
job_when(lambda found: (found.progress.step or 0) >= 1)

tasks: list[str] = []
token, pages = "", 0
while pages == 0 or token:
    page = good(list_tasks.sync(job, client=client, page_size=5, page_token=token))
    tasks += [task.task_id for task in page.tasks]
    token, pages = page.next_page_token or "", pages + 1

operation = ended(
    create_checkpoint.sync(
        job, client=client, body=CreateCheckpoint(cause="scenario"), idempotency_key=uuid.uuid4().hex
    )
)

# of a later version
newer = Operation.from_dict({**operation.to_dict(), "state": "SUSPENDED", "kind": "MOVE"})
assert (newer.state, newer.kind) == ("SUSPENDED", "MOVE"), newer

resize = ended(
    create_resize.sync(job, client=client, body=CreateResize(trainers=2), idempotency_key=uuid.uuid4().hex)
).resize
assert isinstance(resize, Resize), resize

step = good(get_job.sync(job, client=client)).progress.step or 0
ended(pause_job.sync(job, client=client, wait_s=4.0))
paused = good(get_job.sync(job, client=client))
ended(resume_job.sync(job, client=client))
job_when(lambda found: found.state == "RUNNING" and (found.progress.step or 0) > step)

events: list[int] = []
while len(events) < 3:
    found = good(
        list_events.sync(job, client=client, after=events[-1] if events else 0, wait_s=4.0, page_size=2)
    )
    events += [event.event_id for event in found.events]

unknown = get_task.sync(job, "no-such-task", client=client)
assert isinstance(unknown, Problem), unknown
ended(cancel_job.sync(job, client=client))
cancelled = good(get_job.sync(job, client=client))
print(
    json.dumps(
        {
            "version": good(get_version.sync(client=client)).version,
            "same": created.create_time == again.create_time,
            "tasks": len(set(tasks)),
            "pages": pages,
            "checkpoint": operation.state or "",
            "resize": resize.phase or "",
            "trainers": resize.trainers,
            "events": events,
            "problem": unknown.code,
            "states": [paused.state, cancelled.state],
        }
    )
)
