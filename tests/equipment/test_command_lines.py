import subprocess
import sys

import psutil

from tests.equipment.command_lines import command_line


def test_a_process_that_has_ended_has_no_command_line() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()", "a mark"], stdin=subprocess.PIPE)
    seen = psutil.Process(process.pid)
    while "a mark" not in command_line(seen):  # it may be empty in the instant in which the program begins
        assert process.poll() is None
    process.stdin.close()
    while seen.status() != psutil.STATUS_ZOMBIE:
        pass
    assert command_line(seen) == "", "its exit status was not read yet"
    process.wait()
    assert command_line(seen) == ""
