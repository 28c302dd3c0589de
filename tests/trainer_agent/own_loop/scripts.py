"""The script of tests.trainer_agent.scripts with a loop of its own; its parts can be replaced."""

from __future__ import annotations

import textwrap
from pathlib import Path

from tests.trainer_agent.scripts import write_script

PARTS = {
    "head": """
        import torch, trireme
        from torch import nn
        from torch.nn import functional as F
    """,
    "model": """
        model = nn.Sequential(
            nn.Linear(5, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.3), nn.Linear(24, 24), nn.ReLU(),
            nn.Linear(24, 3)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        dataset = trireme.data.Npy({folder!r} + "/x.npy", {folder!r} + "/y.npy", aligned=True)
    """,
    "prepare": """
        model, optimizer, batches = trireme.prepare(model, optimizer, dataset)
    """,
    "loop": """
        for batch in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch["x"]), batch["y"])
            trireme.backward(loss)
            optimizer.step()
    """,
    "after": """
        torch.save(model.state_dict(), {folder!r} + "/after.pt")
    """,
}


def write_loop(folder: Path, name: str = "loop", **changes: str) -> Path:
    """The script, and its data beside it."""
    write_script(folder)
    parts = {part: textwrap.dedent(text) for part, text in (PARTS | changes).items()}
    path = folder / f"{name}.py"
    path.write_text("\n".join(parts.values()).replace("{folder!r}", repr(str(folder))))
    return path
