"""A run that cannot go on because of one member saves first what the others have trained."""

from __future__ import annotations

import re

import pytest

from tests.end_to_end.command import wait_for_step
from tests.end_to_end.scripts import HEAD, UNHURRIED_LOSS, write_script

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]
RARE = "checkpoint_every_epochs=100000"
#: The second trainer ends by itself, without a word, whenever it is started once the file is there.
ENDS = """
import os

if os.environ.get("TRIREME_NAME") == "trainer-1" and (HERE / "broken").exists():
    os._exit(3)
"""


def test_what_the_others_have_trained_is_saved_before_a_run_gives_up(trireme, tmp_path):
    script = write_script(tmp_path, head=HEAD + ENDS, loss=UNHURRIED_LOSS)
    run = trireme.begin("run", script, "--epochs", 100_000, "--trainers", 2, "--set", RARE)
    step = wait_for_step(trireme, 3)
    (tmp_path / "broken").touch()
    victim = next(each for each in trireme.family() if "[trainer-1]" in " ".join(each.cmdline()))
    victim.kill()
    done = trireme.end_of(run)
    assert done.code not in (0, 130)
    assert re.search(r"error: trainer-1 ended \d times right after its start, .* exit code 3", done.err)
    assert "the run cannot go on: saving a checkpoint first (at most 30 s)" in done.err
    saved = re.search(r"saved step (\d+); stopping", done.err)
    assert saved, done.err
    assert int(saved[1]) > step
    (tmp_path / "broken").unlink()
    again = trireme.begin("run", script, "--epochs", 100_000, "--trainers", 2, "--set", RARE)
    assert wait_for_step(trireme, int(saved[1])) >= int(saved[1])
    again.send_signal(15)
    assert "saved" in trireme.end_of(again).err
