from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.trainer_agent.scripts import spec_for, write_script
from trainer_agent.model.torch_compute import TorchCompute
from trainer_agent.script.user_module import load


@pytest.fixture
def build(tmp_path):
    executor = ThreadPoolExecutor(1)

    def make(spec=None, shared=False, **parts):
        script = write_script(tmp_path, **parts)
        return TorchCompute(load(script), spec_for(script, **(spec or {})), executor, shared=shared)

    yield make
    executor.shutdown()
