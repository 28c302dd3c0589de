"""A brake and a tally for scripts of the soak. No bit depends on either.

Each minibatch takes the seconds longer that the file SOAK_BRAKE says. Each record that is computed is one
line in a file of this process in SOAK_TALLY: its fingerprint and the time by the monotonic clock, the same
for a whole minibatch. MOMENTS: see moments/.
"""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Any

if os.environ.get("MOMENTS"):
    from tests.soak.moments.hooks import install

    install()

BRAKE = Path(os.environ.get("SOAK_BRAKE", "no-brake"))
TALLY = Path(os.environ.get("SOAK_TALLY", "no-tally")) / f"{os.getpid()}-{time.time_ns()}"


def fingerprint(record: bytes) -> str:
    return hashlib.blake2b(record, digest_size=12).hexdigest()


def count(rows: Any) -> None:
    """One minibatch: a tensor whose first dimension is its records."""
    now = time.monotonic()
    with TALLY.open("a") as file:
        file.write("".join(f"{fingerprint(row.numpy().tobytes())} {now}\n" for row in rows))
    time.sleep(float(BRAKE.read_text()) if BRAKE.exists() else 0)
