"""The trainer's process."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from tests.equipment.etcd.real import embedded_etcd
from trainer_agent.process import serve
from trainer_agent.settings import Settings

__all__ = ["embedded_etcd"]


@pytest.mark.processes
def test_a_process_without_a_job_says_which_setting_is_missing():
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRIREME_")}
    done = subprocess.run(
        [sys.executable, "-m", "trainer_agent"],
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
        env=environment,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "TRIREME_JOB: Field required\n"


@pytest.mark.processes
async def test_a_trainer_whose_job_is_gone_before_it_has_begun_leaves_when_it_is_asked_to(embedded_etcd):
    """A job that has failed while its trainer started could be deleted before that had read the spec: it
    waited for one until it was killed, and its place with it."""
    stopping = asyncio.Event()
    work = asyncio.ensure_future(serve(Settings(job="gone", etcd=(embedded_etcd.url,)), stopping))
    try:
        await asyncio.wait([work], timeout=0.5)
        assert not work.done()
        stopping.set()
        async with asyncio.timeout(10):
            assert await work == 0
    finally:
        work.cancel()
