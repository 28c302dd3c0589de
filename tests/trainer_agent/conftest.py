from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.trainer_agent.scripts import spec_for, write_script
from trainer_agent.model.torch_compute import TorchCompute
from trainer_agent.script.user_module import load


@pytest.fixture(autouse=True)
def process_stays_as_it_was():
    """Users' modules, their folders on sys.path, and torch's threads are global."""
    modules, path, threads = set(sys.modules), list(sys.path), torch.get_num_threads()
    yield
    for name in set(sys.modules) - modules:
        if name.startswith(("script", "trireme_script", "user_")):
            del sys.modules[name]
    sys.path[:] = path
    torch.set_num_threads(threads)


@pytest.fixture
def build(tmp_path):
    executor = ThreadPoolExecutor(1)

    def make(spec=None, shared=False, **parts):
        script = write_script(tmp_path, **parts)
        return TorchCompute(load(script), spec_for(script, **(spec or {})), executor, shared=shared)

    yield make
    executor.shutdown()
