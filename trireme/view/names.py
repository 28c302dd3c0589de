"""Names of processes as people use them: `trainer-0`, which `trireme chaos kill` takes, instead of `trainer-0-4da120b091a6`."""

from __future__ import annotations

import re

_TOKEN = (
    re.compile(  # as trireme_shared.platform.runtime.ids.new_id makes them, one for each start; not the end of a UUID
        r"(?<=[\w])(?<![0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4})-[0-9a-f]{12}\b"
    )
)


def without_tokens(sentence: str) -> str:
    """`trainer-0-4da120b091a6 joined` -> `trainer-0 joined`."""
    return _TOKEN.sub("", sentence)
