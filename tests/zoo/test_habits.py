"""docs/habits.md: the code of each row is trained as it stands there, and compared with plain PyTorch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.tidy.sources import ROOT
from tests.zoo.models import CROSS_ENTROPY, GAN, GAN_IN_TURNS, SGD, ZOO, Model
from tests.zoo.test_zoo import trained
from tests.zoo.training import differences, plainly, spec_of, write_script
from trainer_agent.own_loop.job_steps import JobSteps, telling

PAGE = (ROOT / "docs" / "habits.md").read_text(encoding="utf-8")
ROWS = dict(re.findall(r"^\| (.+?) \| (.+) \|$", PAGE.partition("|---|---|\n")[2], re.MULTILINE))
BODY = """
def model():
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))
"""


@dataclass(frozen=True)
class Plain:
    """What stands in a script of plain PyTorch instead. `exact`: to the bit. `common`: what both have."""

    script: str
    exact: bool = True
    common: str = ""


def scheduled(made: str, every: int = 1) -> str:
    """With a scheduler that is stepped after so many steps."""
    return f"""
kept, steps, make_optimizer = [], [], optimizer

def optimizer(model):
    made = make_optimizer(model)
    kept.append(torch.optim.lr_scheduler.{made})
    return made

def step(model, optimizers, batch):
    stepped(model, optimizers, loss(model, batch))
    steps.append(batch)
    if len(steps) % {every} == 0:
        kept[0].step()
"""


STEPS_OF_AN_EPOCH, EPOCHS = 4, 3
NOT_FINITE = """
def loss(model, batch):
    found = F.cross_entropy(model(batch["x"]), batch["y"])
    return found * (float("nan") if float(batch["x"][0, 0]) > 0.5 else 1)
"""
#: What plain PyTorch has instead; or the name of a model of the zoo; or the tests of a page.
HABITS: dict[str, Plain | str | Path] = {
    "`scheduler.step()` after each step": Plain(scheduled("ExponentialLR(made, 0.9)")),
    "`scheduler.step()` after each epoch": Plain(scheduled("StepLR(made, 2)", STEPS_OF_AN_EPOCH)),
    "`OneCycleLR(optimizer, 0.3, total_steps=epochs * len(loader))`": Plain(
        scheduled(f"OneCycleLR(made, 0.3, total_steps={EPOCHS * STEPS_OF_AN_EPOCH})")
    ),
    "`clip_grad_norm_(model.parameters(), 0.5)` before `optimizer.step()`": Plain(
        """
def step(model, optimizers, batch):
    optimizers[0].zero_grad()
    loss(model, batch).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizers[0].step()
""",
        exact=False,
    ),
    "`(loss / 2).backward()` twice, then `optimizer.step()`": Plain(
        """
def step(model, optimizers, *batches):
    optimizers[0].zero_grad()
    records = sum(len(batch["y"]) for batch in batches)
    for batch in batches:  # halves, but for a short minibatch
        (loss(model, batch) * len(batch["y"]) / records).backward()
    optimizers[0].step()
""",
        exact=False,
    ),
    '`with torch.autocast("cpu", torch.bfloat16):`': Plain(
        """
def step(model, optimizers, batch):
    with torch.autocast("cpu", torch.bfloat16):
        found = loss(model, batch)
    stepped(model, optimizers, found)
"""
    ),
    "`if not loss.isfinite(): continue`": Plain(
        """
def step(model, optimizers, batch):
    found = loss(model, batch)
    if not found.isfinite():
        return
    stepped(model, optimizers, found)
""",
        common=NOT_FINITE,
    ),
    "no weight decay for biases": Plain(
        """
def optimizer(model):
    large = [p for p in model.parameters() if p.dim() > 1]
    small = [p for p in model.parameters() if p.dim() < 2]
    return torch.optim.AdamW([{"params": large}, {"params": small, "weight_decay": 0.0}], lr=0.01)
"""
    ),
    "`model.eval()`, then right answers counted over a loader": Plain(
        """
def final(model, x, y):
    return {"accuracy": float((model.eval()(x).argmax(1) == y).sum()) / len(y)}
"""
    ),
    "`metric.update(...)`, `metric.compute()` of torchmetrics": "AUC by torchmetrics",
    '`writer.add_scalar("commitment", commitment)`': "VQ-VAE",
    "`collate_fn=collate` of a `DataLoader`": "GNN",
    "a `WeightedRandomSampler` with replacement, `num_workers`": "weighted sampler",
    "`load_dataset(..., streaming=True)`, an `IterableDataset`": "streaming by Hugging Face's datasets",
    "a frozen backbone, adapters (LoRA)": "LoRA",
    "`requires_grad_(epoch >= 2)`: layers that thaw or freeze later": "layers that thaw and freeze",
    "`torch.compile(model)`": "torch.compile",
    "`AveragedModel(model)`, `update_parameters` after each step": "trireme.nn.Ema",
    "a key encoder and a queue (MoCo)": "MoCo",
    "a codebook by moving averages (VQ-VAE)": "VQ-VAE",
    "two losses, an optimizer for each (actor and critic)": "actor and critic",
    "a GAN, both parts stepped from the same minibatch": "GAN",
    "a GAN in turns: a step of the discriminator, then one of the generator": "GAN in turns",
    # tests/trainer_agent/model/test_several_optimizers.py trains it
    "one loss, Adam for the trunk and SGD for the head": "actor and critic",
    "`AutoModel.from_pretrained(...)`, `peft.get_peft_model`, the arguments of `Trainer`": Path(
        "tests/zoo/test_hugging_face.py"
    ),
    "`Trainer(max_epochs=5).fit(module, datamodule)` of Lightning": Path("tests/zoo/test_lightning.py"),
    "`accelerator = Accelerator()`": Path("tests/trainer_agent/own_loop/test_from_accelerate.py"),
}


def code_in(row: str) -> list[str]:
    """Without names of things that are mentioned."""
    return [code for code in re.findall("`([^`]+)`", row) if re.search(r"[ (]\S", code)]


def test_each_row_is_tried_once():
    assert list(ROWS) == list(HABITS)


@pytest.mark.parametrize("habit", [habit for habit, plain in HABITS.items() if isinstance(plain, Plain)])
async def test_a_row_does_what_plain_pytorch_does(tmp_path: Path, habit: str):
    plain, code = HABITS[habit], "\n".join(code_in(ROWS[habit]))
    assert isinstance(plain, Plain)
    common = BODY + CROSS_ENTROPY + SGD + plain.common
    ours = Model(f"{common}\n{code}", falls=1)
    script = write_script(tmp_path, ours)
    spec = spec_of(script, epochs=EPOCHS)
    with telling(lambda: JobSteps(STEPS_OF_AN_EPOCH, EPOCHS)):  # as a process of a job does
        job = await trained(spec)
    theirs = plainly(tmp_path, Model(common, falls=1, beside=plain.script), spec)
    if plain.exact:
        assert differences(job, theirs) == []
    else:
        for name, value in theirs.state.items():
            torch.testing.assert_close(job.state[name], value, rtol=1e-4, atol=1e-5)
    without = Model(common, falls=1)
    if "def evaluate" not in code and not plain.common:  # the row does something
        assert differences(job, plainly(tmp_path, without, spec.with_fields(lanes=1)))


@pytest.mark.parametrize("habit", [habit for habit, plain in HABITS.items() if isinstance(plain, str)])
def test_a_row_shows_the_code_of_a_model_of_the_zoo(habit: str):
    """Which tests/zoo/test_zoo.py trains."""
    model = HABITS[habit]
    assert isinstance(model, str)
    script = re.sub(r"\s+", " ", ZOO[model].script)
    shown = [code for code in code_in(ROWS[habit]) if code != "trireme.log(name=value)"]
    assert all(re.sub(r"\s+", " ", code) in script for code in shown)


def test_the_code_of_several_optimizers_is_that_of_the_zoo():
    both, in_turns = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert both.strip() in GAN
    assert re.sub("  # .*", "", in_turns).strip() in GAN_IN_TURNS


def test_pages_that_rows_name_have_tests():
    assert all((ROOT / tests).is_file() for tests in HABITS.values() if isinstance(tests, Path))
