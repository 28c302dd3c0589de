"""Output whose reader is slow, stopped or gone keeps nobody waiting."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from trireme_shared.platform.runtime import output
from trireme_shared.platform.runtime.output import WAITING_BYTES, Output

FLOOD = 4 * WAITING_BYTES


@pytest.fixture
def pipe() -> Iterator[tuple[int, Output]]:
    """What its reader reads, and the output."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        yield reading, Output(stream)
        os.close(reading)


def flood(into: Output, size: int = FLOOD) -> int:
    """Lines of 100 bytes; their number."""
    for number in range(size // 100):
        into.write(f"{number:99}\n")
    return size // 100


class Reader(threading.Thread):
    def __init__(self, number: int, until: bytes) -> None:
        super().__init__()
        self._number, self._until = number, until
        self.found = b""

    def run(self) -> None:
        while self._until not in self.found and (block := os.read(self._number, 1 << 16)):
            self.found += block


def test_a_pipe_that_nobody_reads_keeps_nobody_waiting_and_what_was_left_out_is_told(pipe):
    reading, into = pipe
    lines = flood(into)
    into.drain(0.1)  # it gives up soon
    assert into.lost == "nobody read them in time"
    reader = Reader(reading, b"the last one\n")
    reader.start()
    into.drain(30)
    into.write("the last one\n")
    reader.join(30)
    told = [line.split()[1] for line in reader.found.splitlines() if b"are left out here" in line]
    left_out = sum(int(number.replace(b",", b"")) for number in told)
    assert left_out > 0
    assert left_out + reader.found.count(b"\n") - len(told) - 1 == lines
    assert len(reader.found) < WAITING_BYTES + (1 << 17)
    assert into.lost == ""


def test_what_a_slow_reader_still_wants_is_written_before_the_end(pipe):
    reading, into = pipe
    size = WAITING_BYTES - 100
    lines = flood(into, size)
    reader = Reader(reading, f"{lines - 1:99}\n".encode())
    reader.start()
    into.drain(30)
    reader.join(30)
    assert reader.found.count(b"\n") == lines


def test_a_reader_that_ends_is_no_error(tmp_path):
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        into = Output(stream)
        os.close(reading)
        flood(into)
        into.drain(30)
        into.write("nobody\n")
        assert "nobody reads" in repr(into)


def test_a_pipe_that_somebody_made_non_blocking_gets_all(pipe):
    reading, into = pipe
    os.set_blocking(into.fileno(), False)
    lines = flood(into, WAITING_BYTES - 100)
    reader = Reader(reading, f"{lines - 1:99}\n".encode())
    reader.start()
    into.drain(30)
    reader.join(30)
    assert reader.found.count(b"\n") == lines


def test_a_file_has_what_was_written_at_once(tmp_path):
    with (tmp_path / "log").open("w") as stream:
        into = Output(stream, at_once=True)
        print("ä, and more", file=into, flush=True)
        assert (tmp_path / "log").read_text() == "ä, and more\n"


def test_what_the_encoding_lacks_is_shown_by_its_number(tmp_path):
    """As Python does on standard error: LC_ALL=C hides no cause."""
    with (tmp_path / "log").open("w", encoding="ascii") as stream:
        Output(stream, at_once=True).write("die Größe fehlt → hier\n")
    assert (tmp_path / "log").read_text() == "die Gr\\xf6\\xdfe fehlt \\u2192 hier\n"


def test_lines_for_a_full_disk_are_left_out_and_told():
    with Path("/dev/full").open("w") as stream:
        into = Output(stream, at_once=True)
        into.write("one\n")
        into.write("two\n")
        assert into.lost == "No space left on device"


def ran(code: str, **streams: object) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-c", code], timeout=60, check=False, **{"stderr": subprocess.PIPE, **streams}
    )


def test_prints_and_logs_of_a_process_wait_for_nobody():
    code = (
        "import sys\nfrom trireme_shared.platform.runtime import output, telemetry\n"
        "output.END_S = 0.2\noutput.patient()\ntelemetry.configure()\n"
        "for number in range(20000): print('x' * 100); telemetry.logger('t').info('y' * 100)\n"
        "output.drain(0.2)\nimport os; os._exit(3)\n"
    )
    reading, writing = os.pipe()
    try:
        assert ran(code, stdout=writing, stderr=writing).returncode == 3
    finally:
        os.close(reading)
        os.close(writing)


def test_closed_output_is_nowhere_and_not_the_next_file_that_is_opened(tmp_path):
    code = (
        "import os, sys\nfrom trireme_shared.platform.runtime import output\n"
        "output.open_missing()\n"
        f"file = open({str(tmp_path / 'data')!r}, 'w')\n"
        "assert file.fileno() > 2, file.fileno()\n"
        "print('nowhere'); print('nowhere', file=sys.stderr); sys.stdout.flush()\n"
        "os.write(1, b'nowhere'); os.write(2, b'nowhere')\n"
        "sys.exit(3)\n"
    )
    shell = f'exec {sys.executable} -c "$1" 0<&- 1>&- 2>&-'
    done = subprocess.run(["bash", "-c", shell, "bash", code], timeout=60, check=False)
    assert done.returncode == 3
    assert (tmp_path / "data").read_text() == ""


def test_streams_that_are_none_of_the_system_stay(monkeypatch, capsys):
    before = sys.stdout, sys.stderr
    output.patient()
    assert (sys.stdout, sys.stderr) == before
