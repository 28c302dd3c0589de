"""The terminal of `trireme run` is closed while it trains."""

from __future__ import annotations

import os
import pty
import select
import signal
import threading
from contextlib import contextmanager, suppress

import pytest

from tests.end_to_end.command import wait_for_step
from tests.end_to_end.scripts import UNHURRIED_LOSS, write_script
from trireme.launch.run_folder import SOCKETS

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]
STOP_S = 45.0  # a checkpoint has 30 of them


@pytest.fixture(autouse=True)
def _hangups_count():
    """Tests that were started with nohup ignore SIGHUP, and so would what they start."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@contextmanager
def terminal():
    """(its descriptor for the program, a function that closes it for good)."""
    ours, theirs = pty.openpty()
    closing = threading.Event()

    def read() -> None:
        while not closing.is_set():
            if select.select([ours], [], [], 0.05)[0]:
                with suppress(OSError):  # the program has closed it
                    os.read(ours, 1 << 16)

    reading = threading.Thread(target=read)
    reading.start()

    def close() -> None:
        if not closing.is_set():
            closing.set()
            reading.join()
            os.close(ours)

    try:
        yield theirs, close
    finally:
        close()


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_run_whose_terminal_is_closed_saves_and_stops(trireme, tmp_path, number):
    """SIGTERM: it was started with nohup, for example."""
    script, rare = write_script(tmp_path, loss=UNHURRIED_LOSS), "checkpoint_every_epochs=100000"
    with terminal() as (screen, close):
        process = trireme.start("run", script, "--epochs", 100_000, "--set", rare, stderr_to=screen)
        os.close(screen)
        wait_for_step(trireme, 1)
        used = next(path for path in tmp_path.rglob(SOCKETS) if path.is_symlink()).readlink()
        close()
        process.send_signal(number)
        try:
            out, _ = process.communicate(timeout=STOP_S)
        finally:
            process.kill()
    assert (process.returncode, out) == (130, "")
    assert not used.exists()
    assert list((tmp_path / ".trireme" / "script" / "checkpoints").iterdir())
