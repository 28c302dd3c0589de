"""What survives a long collection is set aside, and looked at again later; what jobs leave is collected
after a schedule."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import gc
import weakref
from master_service import garbage
from master_service.garbage import Collections, EndedJobs

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

class Circle:
    def __init__(self):
        self.me = self

ended, before = EndedJobs(), gc.get_stats()[2]["collections"]
for _ in range(garbage.ENDED - 1):
    ended.add()
ended.after_schedule()
assert gc.get_stats()[2]["collections"] == before, "too few have ended"
circle = weakref.ref(Circle())
ended.add()
ended.after_schedule()
assert gc.get_stats()[2]["collections"] == before + 1
assert circle() is None
ended.after_schedule()
assert gc.get_stats()[2]["collections"] == before + 1, "counted anew"
"""


def test_collections_are_rare_and_short() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=60)
