"""Whether a process works, by its processor time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from trireme_shared.platform.membership.life_sign import ProcessorUse, processor_use


def test_the_processor_time_of_this_process_is_that_of_its_clock():
    before = time.process_time()
    use = processor_use(os.getpid())
    after = time.process_time()
    assert use is not None
    assert not use.stopped
    assert before - 0.1 <= use.seconds <= after + 0.1, "the system counts in hundredths of a second"


def test_a_process_that_a_signal_stopped_is_told_from_one_that_waits():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        waits = processor_use(process.pid)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        stopped = processor_use(process.pid)
        process.kill()
    assert waits is not None
    assert stopped is not None
    assert (waits.stopped, stopped.stopped) == (False, True)


def test_a_twentieth_of_a_processor_since_the_last_look_is_work():
    before = ProcessorUse(10.0, stopped=False)
    assert ProcessorUse(10.11, stopped=False).works(before, 2.0)
    assert not ProcessorUse(10.09, stopped=False).works(before, 2.0)
    assert not ProcessorUse(12.0, stopped=True).works(before, 2.0), "it was stopped after that"
    assert not ProcessorUse(10.0, stopped=False).works(None, 2.0), "nobody knows when it worked"


def test_of_a_process_that_is_gone_nothing_is_known():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    assert processor_use(process.pid) is None
