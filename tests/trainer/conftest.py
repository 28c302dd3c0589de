from __future__ import annotations

import sys

import pytest
import torch


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
