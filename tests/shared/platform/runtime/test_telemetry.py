"""What is bound to the log is in each line, whoever writes it; a line without it would be taken for one of
the script."""

from __future__ import annotations

import subprocess
import sys

from trireme.view.live_progress import is_of_script

PROGRAM = """
import threading
from trireme_shared.platform.runtime import telemetry
telemetry.configure(json=True, service="trainer", job="digits")
telemetry.logger("room").info("first")
thread = threading.Thread(target=lambda: telemetry.logger("room").info("second", job="other"))
thread.start()
thread.join()
"""


def test_lines_of_threads_have_what_is_bound_and_what_a_line_says_itself_is_stronger():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=True, timeout=60)
    first, second = done.stderr.splitlines()
    assert not is_of_script(first)
    assert not is_of_script(second)
    assert b'"job": "digits"' in first
    assert b'"job": "other"' in second


BAR = """
import sys
from trireme_shared.platform.runtime import telemetry
telemetry.configure(json=True, service="trainer")
telemetry.unfailing_output()
log = telemetry.logger("room")
sys.stderr.write("\\r 10%|#")
log.info("first")
log.info("second")
print("half", end="", flush=True)
log.info("third")
sys.stderr.write("\\r 20%|##")
sys.stderr.write("\\r 30%|###\\n")
log.info("fourth")
"""


def test_a_log_line_is_not_glued_to_a_progress_bar_or_a_line_without_its_end():
    told = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run([sys.executable, "-c", BAR], check=True, timeout=60, **told)
    lines = done.stdout.split(b"\n")
    assert [line for line in lines if is_of_script(line)] == [
        b"\r 10%|#",
        b"half",
        b"\r 20%|##\r 30%|###",
        b"",
    ]
    assert [
        name for line in lines for name in (b"first", b"second", b"third", b"fourth") if name in line
    ] == [
        b"first",
        b"second",
        b"third",
        b"fourth",
    ]
