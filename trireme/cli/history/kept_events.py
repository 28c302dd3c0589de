"""The events of a run, kept beside its result: its master ends with it, and `trireme events` goes on telling them."""

from __future__ import annotations

import contextlib
from pathlib import Path

from trireme.launch.run_folder import read_json, write_json
from trireme.view.job_address import Connect
from trireme_shared.protocol.errors import TriremeError
from trireme_shared.protocol.events import EventRecord

FILE = "events.json"


async def all_events(connect: Connect) -> list[EventRecord]:
    """All that the job's log still has, oldest first; those before an error if the master fails meanwhile."""
    found: list[EventRecord] = []
    with contextlib.suppress(TriremeError):
        async with connect() as (client, job):
            while page := (await client.list_events(job, after=found[-1].event_id if found else 0)).events:
                found += page
    return found


def keep(folder: Path, events: list[EventRecord]) -> None:
    """A disk that is full costs the events, not the run."""
    with contextlib.suppress(OSError):
        write_json(folder / FILE, {"events": [event.model_dump(mode="json") for event in events]})


def kept_events(folder: Path) -> list[EventRecord] | None:
    """None: the run has not ended, or it ended without a master that could tell them."""
    found = read_json(folder / FILE)
    return None if found is None else [EventRecord.model_validate(event) for event in found.get("events", ())]
