"""The notebook runs in a kernel of its own, from its first cell to its last, and is kept without what it
printed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import nbformat
import pytest

from tests.end_to_end.command import command_in
from tests.equipment.notebooks import execute

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOK = EXAMPLES / "notebook" / "trireme.ipynb"


@pytest.mark.soak
@pytest.mark.processes
@pytest.mark.timeout(240)
@pytest.mark.filterwarnings("ignore::DeprecationWarning:zmq", "ignore::ResourceWarning")
async def test_the_notebook_trains_stops_resumes_and_loads_the_model(tmp_path):
    for folder in ("digits", "notebook"):
        shutil.copytree(
            EXAMPLES / folder, tmp_path / folder, ignore=shutil.ignore_patterns("data", "__pycache__")
        )
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with command_in(tmp_path) as command:  # fails if a process is left
        data = str(tmp_path / "data")
        shown = await execute(
            notebook, tmp_path / "notebook", tmp_path / "home", command.mark, DIGITS_DATA=data
        )
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert shown[1].startswith("digits STOPPED\n"), "the progress under the first call, as it was last"
    assert shown[4] == "<Run digits: STOPPED>"
    assert "<b>digits</b> STOPPED" in code[4].outputs[0].data["text/html"]
    assert shown[5].startswith("digits COMPLETED\n")
    assert "COMPLETED after 184 steps" in shown[5]
    assert "epoch 8" in shown[6]
    assert "each step once: True" in shown[7]
    accuracies = re.findall(r"0\.\d{3}", shown[8])
    assert len(accuracies) == 2
    assert accuracies[0] == accuracies[1], "the model that was loaded is the one that the job measured"


def test_the_notebook_is_kept_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(cells) > 5
    assert [(cell.outputs, cell.execution_count, cell.metadata) for cell in cells] == [([], None, {})] * len(
        cells
    )
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert notebook.metadata.language_info == {"name": "python"}
