"""After `stop` nothing of a process runs, however many threads it has."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

from tests.equipment.stopping import stop

COUNTING = """
import sys, threading, time
def count():
    while True:
        sys.stdout.write("x")
        sys.stdout.flush()
        time.sleep(0)
for _ in range(8):
    threading.Thread(target=count, daemon=True).start()
time.sleep(30)
"""


def test_a_process_of_many_threads_does_nothing_more_once_it_is_stopped(tmp_path):
    written = tmp_path / "written"
    with written.open("wb") as out, subprocess.Popen([sys.executable, "-c", COUNTING], stdout=out) as process:
        try:
            for _ in range(20):
                before = written.stat().st_size
                while written.stat().st_size == before:
                    time.sleep(0.001)
                stop(process.pid)
                stopped = written.stat().st_size
                time.sleep(0.005)
                assert written.stat().st_size == stopped
                process.send_signal(signal.SIGCONT)
        finally:
            process.kill()
