"""docs/loop.md, "From Accelerate": the rows of its table in one script each, which train to the same bits; an
Accelerator that is left in a script is refused."""

from __future__ import annotations

import re
import runpy
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.equipment.accelerate_state import forget_accelerators
from tests.tidy.sources import ROOT
from tests.trainer_agent.cluster import cluster, trained_in
from tests.trainer_agent.own_loop.scripts import write_loop
from tests.trainer_agent.scripts import spec_for, write_script
from trainer_agent.script.user_module import load
from trireme.settings import SETTINGS
from trireme_shared.protocol.errors import InvalidArgument, UserCodeError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its import
    from accelerate import Accelerator

PAGE = (ROOT / "docs" / "loop.md").read_text(encoding="utf-8")
TABLE = PAGE.partition("| Accelerate | here |\n|---|---|\n")[2].partition("\n\n")[0]
ROWS = [tuple(row.strip("| ").split(" | ")) for row in TABLE.splitlines()]
COMMON = """
import numpy as np, torch
from pathlib import Path
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

HERE = Path(__file__).parent
x, y = torch.from_numpy(np.load(HERE / "x.npy")), torch.from_numpy(np.load(HERE / "y.npy"))
rows = [{"x": a, "y": b} for a, b in zip(x, y)]
"""
MODEL = """
model = nn.Sequential(nn.Linear(5, 24), nn.Tanh(), nn.Linear(24, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
loader = DataLoader(rows, batch_size=8)
"""
THEIRS = f"""{COMMON}
from accelerate import Accelerator
from accelerate.utils import set_seed

accelerator = Accelerator(cpu=True)
set_seed(7)
{MODEL}
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for epoch in range(2):
    for batch in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch["x"]), batch["y"])
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
right = records = 0
with torch.no_grad():
    for batch in loader:
        found, wanted = accelerator.gather_for_metrics((model.eval()(batch["x"]).argmax(1), batch["y"]))
        right, records = right + int((found == wanted).sum()), records + len(found)
"""
OURS = f"""{COMMON}
import trireme

torch.manual_seed(7)
{MODEL}
def counted(model, batch):
    return {{"right": (model(batch["x"]).argmax(1) == batch["y"]).sum(), "records": len(batch["y"])}}

model, optimizer, batches = trireme.prepare(
    model, optimizer, loader, scheduler=scheduler, epochs=2, evaluation_dataset=loader, evaluate=counted
)
for batch in batches:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(batch["x"]), batch["y"])
    trireme.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    scheduler.step()
"""


@pytest.fixture(autouse=True)
def accelerators_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_accelerators(monkeypatch)


async def test_the_rows_of_the_table_have_the_bits_of_accelerate(tmp_path: Path):
    numbers = np.random.default_rng(0)
    np.save(tmp_path / "x.npy", numbers.standard_normal((60, 5)).astype(np.float32))
    np.save(tmp_path / "y.npy", numbers.integers(0, 3, 60))
    (tmp_path / "theirs.py").write_text(THEIRS)
    script = tmp_path / "script_ours.py"
    script.write_text(OURS)
    user = load(script)
    dataset, held_out = user.dataset(), user.dataset("evaluation_dataset")
    config = user.config
    user.loop.close()
    spec = spec_for(
        script,
        dataset=dataset,
        evaluation_dataset=held_out,
        records_per_task=60,
        **{**config, "shuffle": False},
    )
    state, metrics = await trained_in(cluster, spec)
    torch.set_num_threads(1)
    plain = runpy.run_path(str(tmp_path / "theirs.py"))
    assert [n for n, v in plain["model"].state_dict().items() if not torch.equal(v, state[n])] == []
    assert metrics == {"right": plain["right"], "records": plain["records"]}


def test_the_table_says_what_the_scripts_do():
    """Rows that a script here does not have name things that are there."""
    tried, methods = 0, vars(Accelerator)
    for theirs, ours in ROWS:
        codes = re.findall(r"`([^`]+)`", theirs)
        if all(code in THEIRS or code == "accelerator = Accelerator()" for code in codes):
            mine = re.findall(r"`([^`]+)`", ours.partition(", of each lane")[0])
            text = re.sub(r"\s+", " ", OURS)
            parts = [part for code in mine for part in re.findall(r"[\w.]+\(|\w+=\w+|for .+:", code)]
            assert all(part in text for part in parts), ours
            tried += 1
        for name in re.findall(r"accelerator\.(\w+)", " ".join(codes)):
            assert name in methods, theirs
        for name in re.findall(r"`(\w+)=", ours):
            assert name in SETTINGS or name == "evaluation_dataset", ours
    assert tried >= 6


@pytest.mark.parametrize("own_loop", [False, True])
def test_an_accelerator_that_is_left_is_refused_by_name(tmp_path: Path, own_loop: bool):
    if own_loop:
        left = "from accelerate import Accelerator\naccelerator = Accelerator(cpu=True)\n"
        user = load(write_loop(tmp_path, prepare=left + "trireme.prepare(model, optimizer, dataset)\n"))
        with pytest.raises(UserCodeError, match=r"makes an accelerate.Accelerator\(\).*from-accelerate"):
            user.call("model")
        return
    left = "from accelerate import Accelerator\naccelerator = Accelerator(cpu=True)\n"
    with pytest.raises(InvalidArgument, match=r"script.py makes an accelerate.Accelerator\(\)") as raised:
        load(write_script(tmp_path, config=left))
    assert "docs/loop.md#from-accelerate" in raised.value.hint


def test_accelerate_that_is_only_imported_is_nobodys_concern(tmp_path: Path):
    assert load(write_script(tmp_path, config="from accelerate import Accelerator\n")).has("model")
