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
