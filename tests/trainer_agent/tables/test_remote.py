"""Rows on parameter servers, for a forward pass in a thread that may be given up."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from tests.trainer_agent.done_blocks import DoneBlocks
from tests.trainer_agent.loops.test_tables import MODEL
from tests.trainer_agent.scripts import records, spec_for, write_script
from trainer_agent.model.torch_compute import TorchCompute
from trainer_agent.script.user_module import load

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


async def test_a_forward_pass_that_is_given_up_before_it_has_its_thread_asks_for_no_rows(tmp_path):
    script = write_script(tmp_path, model=MODEL)
    with ThreadPoolExecutor(1) as executor:
        compute = executor.submit(TorchCompute, load(script), spec_for(script), executor).result()
        asked, free = [], Event()

        async def never(ids):
            asked.append(ids)
            await asyncio.sleep(20)

        compute.read_rows(never)
        executor.submit(free.wait)
        computing = asyncio.create_task(compute.gradient((0, 1), 0, 1, records(4), DoneBlocks()))
        await asyncio.sleep(0)
        computing.cancel()
        await asyncio.sleep(0)
        free.set()
        async with asyncio.timeout(10):
            with pytest.raises(asyncio.CancelledError):
                await computing
        assert not asked
        compute.close()
