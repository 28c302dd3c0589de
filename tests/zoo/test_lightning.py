"""docs/lightning.md: a LightningModule has the bits of Lightning's own loop with one lane; what a job would
do otherwise is refused by name."""

from __future__ import annotations

import importlib.util
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.tidy.sources import ROOT
from tests.trainer_agent.cluster import cluster, trained_in
from tests.trainer_agent.collective.cluster import cluster as collective_cluster
from tests.trainer_agent.scripts import spec_for
from trainer_agent.own_loop.job_steps import JobSteps, telling
from trainer_agent.script.lightning import REFUSED
from trainer_agent.script.user_module import load
from trireme.plain import plain_spec, run
from trireme.settings import SETTINGS
from trireme_shared.protocol.errors import InvalidArgument, UserCodeError
from trireme_shared.protocol.records import JobSpec

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its import
    import lightning.pytorch as L
    from lightning.pytorch import Trainer

#: Lightning's advice about workers, and about what it does not find.
pytestmark = pytest.mark.filterwarnings("ignore")
PAGE = (ROOT / "docs" / "lightning.md").read_text(encoding="utf-8")
EPOCHS, STEPS, RECORDS = 3, 5, 40
HEAD = """
from pathlib import Path

import lightning.pytorch as L, numpy as np, torch, trireme
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

HERE = Path(__file__).parent
config = trireme.Config(epochs=3, shuffle=False, lanes=1, seed=7)

class Data(L.LightningDataModule):
    def __init__(self, size=8):
        super().__init__()
        self.save_hyperparameters()

    def prepare_data(self):
        self.x = torch.from_numpy(np.load(HERE / "x.npy"))

    def setup(self, stage):
        y = torch.from_numpy(np.load(HERE / "y.npy"))
        self.held = TensorDataset(self.x[:40], y[:40]), TensorDataset(self.x[40:], y[40:])

    def train_dataloader(self):
        return DataLoader(self.held[0], batch_size=self.hparams.size)

    def val_dataloader(self):
        return DataLoader(self.held[1], batch_size=self.hparams.size)
"""
MODULE = """
class Classifier(L.LightningModule):
    def __init__(self, width=16, lr=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.val_acc = MulticlassAccuracy(3, average="macro")
        self.heat = 0.0

    def configure_model(self):
        width = self.hparams.width
        self.body = nn.Sequential(nn.Linear(5, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, 3))

    def on_train_epoch_start(self):
        self.heat = 1.0 + 0.5 * self.current_epoch

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch[0] * 2, batch[1]

    def training_step(self, batch, batch_idx):
        x, y = batch
        found = self.body(x)
        loss = F.cross_entropy(found / self.heat, y) * (1 + 0.1 * batch_idx) + 0.01 * self.global_step
        self.log("train/loss", loss, prog_bar=True)
        self.log_dict({"train/acc": (found.argmax(1) == y).float().mean()}, on_epoch=True)
        return loss

    def validation_step(self, batch):
        x, y = batch
        found = self.body(x)
        self.val_acc(found, y)
        self.log("val/acc", self.val_acc)
        self.log("val/loss", F.cross_entropy(found, y))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)
        scheduler = SCHEDULER
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "INTERVAL"}}
"""
ONE_CYCLE = (
    "torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=self.trainer.estimated_stepping_batches)"
)
MAIN = """
L.seed_everything(3, verbose=False)
model = Classifier(width=12)
"""


def written(folder: Path, module: str, main: str, scheduler: str = ONE_CYCLE, interval: str = "step") -> Path:
    numbers = np.random.default_rng(0)
    np.save(folder / "x.npy", numbers.standard_normal((60, 5)).astype(np.float32))
    np.save(folder / "y.npy", numbers.integers(0, 3, 60))
    path = folder / "script_lightning.py"
    path.write_text(HEAD + module.replace("SCHEDULER", scheduler).replace("INTERVAL", interval) + main)
    return path


def spec_of(script: Path, **values: Any) -> JobSpec:
    user = load(script)
    data = {"dataset": user.dataset(seed=7), "evaluation_dataset": user.dataset("evaluation_dataset", 7)}
    return spec_for(script, **{**user.config, **data, "records_per_task": RECORDS, "lanes": 1, **values})


def by_lightning(script: Path, folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """The same script by Lightning's own loop."""
    text = script.read_text().partition("trireme.lightning")[0]
    path = folder / "theirs.py"
    path.write_text(text)
    found = importlib.util.spec_from_file_location("theirs", path)
    assert found is not None
    assert found.loader is not None
    theirs = importlib.util.module_from_spec(found)
    found.loader.exec_module(theirs)
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        devices=1,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        **quiet,
    )
    torch.set_num_threads(1)
    torch.manual_seed(7)  # configure_model draws
    trainer.fit(theirs.model, theirs.Data())
    metrics = {name.replace("/", "."): float(value) for name, value in trainer.callback_metrics.items()}
    return dict(theirs.model.state_dict()), metrics


@pytest.mark.parametrize("strategy", ["parameter_server", "collective"])
async def test_with_one_lane_it_has_the_bits_of_lightnings_loop(tmp_path: Path, strategy: str):
    """Numbers of batches, epochs and steps, hooks, schedule, hyperparameters and means of logs included."""
    script = written(tmp_path, MODULE, MAIN + "trireme.lightning(model, Data())\n")
    spec = spec_of(script, strategy=strategy, pservers=int(strategy == "parameter_server"))
    with telling(lambda: JobSteps(STEPS, EPOCHS)):  # as a process of a job does
        make = cluster if strategy == "parameter_server" else collective_cluster
        state, metrics = await trained_in(make, spec)
    theirs, measured = by_lightning(script, tmp_path)
    assert list(state) == list(theirs)
    assert [name for name, value in theirs.items() if not torch.equal(value, state[name])] == []
    assert metrics == pytest.approx({name: measured[name] for name in ("val.acc", "val.loss")}, rel=1e-6)


def test_python_script_py_trains_and_logs_each_epoch(tmp_path: Path):
    """With a scheduler by epoch, a function that makes the module, and DataLoaders without a datamodule."""
    schedule = "torch.optim.lr_scheduler.StepLR(optimizer, 2)"
    main = """
data = Data()
data.prepare_data()
data.setup("fit")
config = trireme.Config(epochs=3, shuffle=False, schedule_per="epoch", evaluate_every="epoch", seed=7)
model = Classifier(width=12)
trireme.lightning(lambda: Classifier(width=12), data.train_dataloader(), data.val_dataloader())
"""
    user = load(written(tmp_path, MODULE, main, schedule, "epoch"))
    result = run(user, plain_spec(user, {}))
    theirs, measured = by_lightning(tmp_path / "script_lightning.py", tmp_path)
    assert [n for n, value in theirs.items() if not torch.equal(value, result.model.state_dict()[n])] == []
    assert result.metrics["val.loss"] == pytest.approx(measured["val.loss"])
    assert result.epochs[-1]["train.acc"] == pytest.approx(measured["train.acc"])
    assert len(result.evaluations) == EPOCHS - 1  # the last one is that after training
    assert result.evaluations[0].metrics.keys() == {"val.acc", "val.loss"}
    assert isinstance(result.model, L.LightningModule)
    assert result.model.hparams == {"width": 12, "lr": 0.1}


async def test_with_four_lanes_it_has_one_result_whoever_computes_and_dies(tmp_path: Path):
    script = written(tmp_path, MODULE, MAIN + "trireme.lightning(model, Data())\n")
    found = []
    for trainers, death in ((1, None), (3, 6)):
        storage = str(tmp_path / str(trainers))
        spec = spec_of(script, lanes=4, records_per_task=10, shuffle=True, storage=storage)
        with telling(lambda: JobSteps(STEPS, EPOCHS)):
            found.append(await trained_in(cluster, spec, trainers, death_at=death))
    assert [n for n, value in found[0][0].items() if not torch.equal(value, found[1][0][n])] == []
    assert found[0][1] == found[1][1]


PLAIN = """
class Small(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(5, 3)
        self.train_acc = MulticlassAccuracy(3)
        BEGUN

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.body(batch[0]), batch[1])
        STEP
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return MADE
"""
SMALL = "trireme.lightning(Small(), Data())\n"
SCHEDULED = '"lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)'
WRONG = {
    "manual optimization": ("BEGUN", "self.automatic_optimization = False", "automatic_optimization = False"),
    "several optimizers": ("MADE", "[optimizer, optimizer]", "returned 2 optimizers and 0 schedulers"),
    "no optimizer": ("MADE", "None", "returned NoneType"),
    "frequency": ("MADE", '{"optimizer": optimizer, ' + SCHEDULED + ', "frequency": 2}}', "frequency 2"),
    "interval": (
        "MADE",
        '{"optimizer": optimizer, ' + SCHEDULED + "}}",
        r"schedule_per is step.*\(schedule_per=",
    ),
    "monitor": (
        "MADE",
        '{"optimizer": optimizer, "lr_scheduler": PLATEAU, "monitor": "val/loss"}'.replace(
            "PLATEAU", "torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)"
        ),
        r"plateau_metric is not set.*\(plateau_metric=.val.loss",
    ),
    "another reduction": ("STEP", 'self.log("a", loss, reduce_fx="max")', "reduce_fx='max'"),
    "a metric object of training": (
        "STEP",
        'self.log("a", self.train_acc)',
        "got a MulticlassAccuracy object",
    ),
    "the trainer": ("STEP", "self.trainer.callbacks", r"self\.trainer\.callbacks: a job of Trireme has no"),
    "backward": ("STEP", "self.manual_backward(loss)", "manual_backward"),
    "no loss": ("STEP", "return None", "training_step returned None"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_job_would_do_otherwise_is_refused_by_name(tmp_path: Path, name: str):
    where, code, told = WRONG[name]
    text = PLAIN.replace(where, code)
    for left, code_left in (("BEGUN", "pass"), ("STEP", "pass"), ("MADE", "optimizer")):
        text = text.replace(left, code_left)
    user = load(written(tmp_path, text, SMALL))
    with pytest.raises((UserCodeError, InvalidArgument)) as raised:
        run(user, plain_spec(user, {}))
    assert re.search(told, f"{raised.value.message} {raised.value.hint}"), raised.value


@pytest.mark.parametrize("hook", [name for names in REFUSED.values() for name in names.split()])
def test_hooks_that_a_job_does_not_call_are_refused_when_the_script_is_loaded(tmp_path: Path, hook: str):
    assert hasattr(L.LightningModule, hook) or hook == "configure_sharded_model"
    text = PLAIN.replace("BEGUN", "pass").replace("STEP", "pass").replace("MADE", "optimizer")
    script = written(tmp_path, f"{text}\n    def {hook}(self, *args, **kwargs):\n        pass\n", SMALL)
    with pytest.raises(UserCodeError, match=f"Small has {hook}, which a job does not call"):
        load(script)


def test_what_starts_with_an_epoch_is_refused_where_nobody_knows_when_that_is(tmp_path: Path):
    user = load(written(tmp_path, MODULE, MAIN + "trireme.lightning(model, Data())\n"))
    x, y = (torch.from_numpy(np.load(tmp_path / f"{name}.npy"))[:8] for name in ("x", "y"))
    with pytest.raises(
        UserCodeError, match="on_train_epoch_start: when an epoch starts is known in synchronous"
    ):
        user.call("loss", user.call("model"), [x, y])


MISTAKES = {
    "no module": ("trireme.lightning(nn.Linear(2, 2), Data())", "trireme.lightning got Linear"),
    "no datamodule": (SMALL.replace("Data()", "datamodule=3"), "got int as the datamodule"),
    "twice": (SMALL * 2, "called twice in one script"),
    "in the main part": (f'if __name__ == "__main__":\n    {SMALL}', "call trireme.lightning outside"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_call_that_cannot_be_is_told(tmp_path: Path, name: str):
    code, told = MISTAKES[name]
    text = PLAIN.replace("BEGUN", "pass").replace("STEP", "pass").replace("MADE", "optimizer")
    with pytest.raises((UserCodeError, InvalidArgument)) as raised:
        load(written(tmp_path, text, code))
    assert told in f"{raised.value.message} {raised.value.hint}"


def test_the_scripts_own_dataset_is_taken_where_lightning_has_none(tmp_path: Path):
    text = PLAIN.replace("BEGUN", "pass").replace("STEP", "pass").replace("MADE", "optimizer")
    main = """
data = Data()

def dataset():
    data.prepare_data()
    data.setup("fit")
    return data.train_dataloader()

model = loss = "names of the script's own"
trireme.lightning(Small)
"""
    user = load(written(tmp_path, text, main))
    assert user.dataset().reader == "script_lightning:dataset"
    assert not user.has("evaluate")
    assert run(user, plain_spec(user, {})).steps == EPOCHS * STEPS


def test_the_page_names_what_is_there():
    table = PAGE.partition("| `Trainer(...)` | here |\n|---|---|\n")[2].partition("\n\n")[0]
    theirs = (
        Trainer.__init__.__wrapped__.__code__.co_varnames if hasattr(Trainer.__init__, "__wrapped__") else ()
    )
    for row in table.splitlines():
        left, right = row.strip("| ").split(" | ")
        for name in re.findall(r"`(\w+)`", left):
            assert name in theirs or hasattr(L.callbacks, name), row
        for name in re.findall(r"`(\w+)(?:=[^`(]*)?`", right):
            assert name in SETTINGS or name == "lr", row
    for names in REFUSED.values():
        assert all(f"`{name}`" in PAGE for name in names.split()), names
