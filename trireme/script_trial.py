"""What `python script.py` does before it trains: the script is tried as `trireme run` tries it, in a process
of its own, so that what a job refuses is not first seen in a job."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path

from trireme.preflight import inspect
from trireme.settings import Setting, origins_of
from trireme.validation import without_auto

LOOP_RUNS = (
    "the script is not tried as a job tries it: an event loop runs in this thread, as in a notebook; "
    "`trireme run --dry-run` tries it"
)


def say(text: str) -> None:
    """Print to stderr, above the progress bars that the script has there."""
    if (tqdm := sys.modules.get("tqdm")) is not None:
        tqdm.tqdm.write(text, file=sys.stderr)
    else:
        print(text, file=sys.stderr)  # noqa: T201


def try_script(script: Path, settings: Mapping[str, Setting]) -> None:
    """Tell what a job would tell before it begins. `settings`: those that win over the script's config.
    Raises what trireme.preflight.inspect raises."""
    if _loop_runs():
        say(LOOP_RUNS)
        return
    say(f"checking {script.name}")
    values = without_auto({name: setting.value for name, setting in settings.items()})
    found = asyncio.run(inspect(script, values, origins=origins_of(settings)))
    if found.notice:
        say(found.notice)


def _loop_runs() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
