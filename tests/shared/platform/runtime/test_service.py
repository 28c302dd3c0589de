"""Signals of a service process: it drains after the first and exits at once after the second."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

SERVICE = """
import asyncio, sys, time
from trireme_shared.platform.runtime import service, telemetry

async def main(stopping):
    loop = asyncio.get_running_loop()
    print("up", flush=True)
    await stopping.wait()
    print("draining", flush=True)
    writing = loop.run_in_executor(None, time.sleep, float(sys.argv[1]))
    await writing
    return 0

telemetry.configure(service="test")
sys.exit(service.run(main, drain_s=float(sys.argv[2])))
"""


@pytest.mark.parametrize(
    ("writing_s", "drain_s", "signals", "code"),
    [
        (0.2, 20, [signal.SIGTERM], 0),
        (60, 20, [signal.SIGTERM, signal.SIGINT], 130),
        (1, 0.1, [signal.SIGINT], 130),
    ],
    ids=[
        "it drains",
        "a second signal ends it at once, whatever is being written",
        "it does not drain for ever",
    ],
)
def test_a_service_that_is_asked_to_stop(writing_s, drain_s, signals, code):
    began = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-c", SERVICE, str(writing_s), str(drain_s)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        for number, word in zip(signals, (b"up\n", b"draining\n"), strict=False):
            assert process.stdout.readline() == word
            process.send_signal(number)
        assert process.wait(timeout=30) == code
        assert b"Traceback" not in process.communicate()[1]
    assert time.monotonic() - began < 25
