"""What survives a long collection is set aside, and looked at again later."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import gc
from master_service import garbage
from master_service.garbage import Collections

garbage.LONG_S, garbage.ALL_S = -1.0, 3600.0
collections = Collections()
collections.begin()
assert gc.get_threshold() == garbage.THRESHOLDS
gc.collect()
aside = gc.get_freeze_count()
assert aside > 10_000, aside
gc.collect(0)
assert gc.get_freeze_count() == aside
garbage.ALL_S = 0.0
gc.collect(0)
assert gc.get_freeze_count() == 0, "they are looked at again"

with garbage.put_off():
    assert not gc.isenabled()
    with garbage.put_off():
        pass
    assert not gc.isenabled(), "the outer one lasts"
assert gc.isenabled()

garbage.LONG_S = 3600.0
gc.collect()
assert gc.get_freeze_count() == 0, "it was a short one"
"""


def test_what_survives_a_long_collection_is_set_aside_for_a_while() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=60)
