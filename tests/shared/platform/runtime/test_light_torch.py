"""Neither a trainer nor a parameter server loads torch's compiler; a process that compiles something still
can."""

from __future__ import annotations

import subprocess
import sys

MAKE = (
    "import sys, torch; from trireme_shared.platform.runtime.process_setup import "
    "optimizers_without_compiler; optimizers_without_compiler()"
)
AS_A_PSERVER = """
from trireme_shared.serving.core.optimizers import CLASSES, BlockOptimizer
for name in CLASSES:
    values = torch.ones(4)
    BlockOptimizer(name, {}, values).step(values, torch.ones(4), {"lr": 0.1})
    assert (values < 1).all(), name
"""
AS_A_TRAINER = """
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(4))], lr=0.1)
torch.optim.lr_scheduler.LinearLR(optimizer)
optimizer.load_state_dict(optimizer.state_dict())
optimizer.zero_grad()
"""
IS_LOADED = "print('torch._dynamo' in sys.modules)"
COMPILE = "print(torch.compile(lambda x: x + 1, backend='eager')(torch.ones(1)).item())"


def test_optimizers_load_no_compiler_and_it_is_there_for_whoever_wants_it():
    code = f"{MAKE}\n{AS_A_PSERVER}\n{IS_LOADED}\n{AS_A_TRAINER}\n{IS_LOADED}\n{COMPILE}\n{IS_LOADED}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100
    )
    assert done.stdout.split() == ["False", "False", "2.0", "True"]
