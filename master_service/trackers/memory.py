"""What trackers of a job remember from one process to the next, in `<storage>/trackers/`.

run.json       the id of the run, and how often somebody began to follow it
<kind>.json    of trackers that cannot tell what they have: what was logged
ended.json     all of them were told the end of the job
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from trireme_shared.platform.runtime import ids
from trireme_shared.platform.storage import files

FOLDER = "trackers"
ENDED = "ended.json"


class Memory:
    """Blocks. All raise OSError."""

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
