"""SIGHUP calls once what ends a command, and not at all under nohup."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from trireme.launch.interrupt import hangup


@pytest.fixture
def before():
    kept = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, kept)


@pytest.mark.usefixtures("before")
@pytest.mark.parametrize(("handler", "told"), [(signal.SIG_DFL, [True]), (signal.SIG_IGN, [])])
async def test_a_hangup_is_told_once_unless_it_is_ignored(handler, told):
    signal.signal(signal.SIGHUP, handler)
    stopped: list[bool] = []
    with hangup(lambda: stopped.append(True)):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0.05)
    assert stopped == told
    assert signal.getsignal(signal.SIGHUP) is handler
