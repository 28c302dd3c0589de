"""A script whose user has given modules beside it the names of ours, of dependencies and of the standard
library's."""

from __future__ import annotations

from pathlib import Path

NAMES = (
    "shared",
    "tests",
    "records",
    "platform",
    "queue",
    "types",
    "master_service",
    "trireme_shared_is_mine",
)
SCRIPT = """
import json
import helper
{imports}
import trireme
import trireme_shared_is_mine.inner as inner
from trireme_shared_is_mine import sub

FOUND = {{"inner": inner.MINE, "sub": sub.MINE, "helper": helper.FOUND, **{{{found}}}}}
"""
FUNCTIONS = """
import torch

def model():
    return torch.nn.Linear(2, 1)

def dataset():
    numbers = np.arange(32, dtype=np.float32)
    np.save(FOLDER / "x.npy", np.stack([numbers, numbers], 1))
    return trireme.data.Npy(str(FOLDER / "x.npy"))

def loss(model, batch):
    assert helper.late() == "user's", helper.late()
    return (model(batch["x"]) ** 2).mean()

def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=1e-5)
"""

OWN_LOOP = """
import torch

model = torch.nn.Linear(2, 1)
numbers = np.arange(32, dtype=np.float32)
np.save(FOLDER / "x.npy", np.stack([numbers, numbers], 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
model, optimizer, batches = trireme.prepare(model, optimizer, trireme.data.Npy(str(FOLDER / "x.npy")))
for batch in batches:
    assert helper.late() == "user's", helper.late()
    optimizer.zero_grad()
    trireme.backward((model(batch["x"]) ** 2).mean())
    optimizer.step()
"""


def write_users_modules(folder: Path, names: tuple[str, ...] = NAMES, functions: str = "") -> Path:
    """A script that imports modules of all `names`, each of which lies beside it."""
    for name in names:
        path = folder / f"{name}.py"
        if name == "trireme_shared_is_mine":
            path = folder / name / "__init__.py"
            path.parent.mkdir()
            (path.parent / "inner.py").write_text("from . import MINE\n")
            (path.parent / "sub.py").write_text("from .inner import MINE\n")
        path.write_text('MINE = "user\'s"\n')
    (folder / "helper.py").write_text(
        f"import {names[0]}\nFOUND = {names[0]}.MINE\n\ndef late():\n    import {names[-2]}\n    "
        f"return {names[-2]}.MINE\n"
    )
    script = folder / "train.py"
    found = ", ".join(f'"{name}": {name}.MINE' for name in names)
    head = (
        "import numpy as np\nfrom pathlib import Path\nFOLDER = Path(__file__).parent\n" if functions else ""
    )
    imports = "\n".join(f"import {name}" for name in names)
    script.write_text(head + SCRIPT.format(imports=imports, found=found) + functions)
    return script
