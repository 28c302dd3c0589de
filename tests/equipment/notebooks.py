"""Notebooks run in a kernel of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nbclient import NotebookClient

from tests.equipment.forked import MARK, clean_environment

LIMIT_S = 150  # of a cell, on a busy machine
FOLDERS = ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR")


async def execute(notebook: Any, folder: Path, home: Path, mark: str, **environment: str) -> list[str]:
    """What each cell of code shows, as text. The kernel runs in `folder`; what Jupyter writes of its own goes
    to `home`; `mark`: of a `tests.end_to_end.command.Command`, which finds processes that are left."""
    client = NotebookClient(notebook, timeout=LIMIT_S, resources={"metadata": {"path": str(folder)}})
    homes = dict.fromkeys(FOLDERS, str(home))
    await client.async_execute(env=clean_environment() | homes | {MARK: mark} | environment)
    return [shown(cell) for cell in notebook.cells if cell.cell_type == "code"]


def shown(cell: Any) -> str:
    return "\n".join(output.get("text") or output["data"]["text/plain"] for output in cell["outputs"])
