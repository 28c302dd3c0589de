"""children.jsonl in a run's folder: which processes the launcher started, and how they ended. Other commands read it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shared.runtime import clock

EVENTS_FILE = "children.jsonl"


@dataclass(frozen=True, slots=True)
class ChildEvent:
    """`what`: started, died, given_up (died, and is not started again), restarted, finished, lease_left. `cause`: how it ended."""

    child: str
    what: str
    cause: str = ""
    pid: int = 0


def append_event(run_dir: Path, event: ChildEvent) -> None:
    """Append one line to the file."""
    line = json.dumps({"time": clock.timestamp(), **asdict(event)})
    with (run_dir / EVENTS_FILE).open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def read_events(run_dir: Path) -> list[dict[str, Any]]:
    """All complete lines."""
    try:
        text = (run_dir / EVENTS_FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.split("\n")[:-1]]
