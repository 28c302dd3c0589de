"""Trains a model of the zoo: in plain PyTorch, without anything of Trireme but the order of records, and as a
job."""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.utils.data import WeightedRandomSampler

from tests.trainer_agent.scripts import lane_batches, spec_for
from tests.zoo.models import Model
from trainer_agent.data.loaders import WeightedOrder
from trainer_agent.script.user_module import load
from trireme_shared.protocol.lanes import step_seed
from trireme_shared.protocol.records import JobSpec

EPOCHS = 10
NUMBERS = itertools.count()
HEAD = """
import copy, dataclasses
from pathlib import Path

import numpy as np
import torch, torchmetrics, trireme
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, WeightedRandomSampler

HERE = Path(__file__).parent

def dataset():
    return trireme.data.Npy(str(HERE / "x.npy"), str(HERE / "y.npy"), aligned=True)
"""
# A job of real processes: slow while the file `slow` is there, so that it can be disturbed.
SLOWABLE = """
import time

at_its_pace = loss

def loss(model, batch):
    time.sleep(0.08 if (HERE / "slow").exists() else 0)
    return at_its_pace(model, batch)
"""
STEP = """
def stepped(model, optimizers, found):
    for one in optimizers:
        one.zero_grad()
    (found["loss"] if isinstance(found, dict) else found).backward()
    for one in optimizers:
        one.step()

def step(model, optimizers, batch):
    stepped(model, optimizers, loss(model, batch))
"""


class Trained(NamedTuple):
    """Parameters and buffers by name, and the metrics of the evaluation after training."""

    state: Mapping[str, torch.Tensor]
    metrics: Mapping[str, float]


def write_script(folder: Path, model: Model, more: str = "") -> Path:
    """With its data beside it. Its name is new in this process, for readers find a script's objects by it."""
    x, y = model.data(np.random.default_rng(0))
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", y)
    for part in range(model.shards):
        rows = slice(part * len(x) // model.shards, (part + 1) * len(x) // model.shards)
        columns = pa.table({"x": list(x[rows]), "y": y[rows]})
        pq.write_table(columns, folder / f"{part}.parquet")
    path = folder / f"zoo_{next(NUMBERS)}.py"
    path.write_text(f"{HEAD}\n{model.script}\n{more}")
    return path


def spec_of(script: Path, **values: Any) -> JobSpec:
    """Steps of 16 records."""
    user = load(script)
    more: dict[str, Any] = {"epochs": EPOCHS, "global_batch_size": 16, "dataset": user.dataset(seed=7)}
    more |= user.config  # with the settings of a DataLoader
    if user.has("evaluation_dataset"):
        more["evaluation_dataset"] = user.dataset("evaluation_dataset", 7)
    if values.get("strategy") == "collective":
        more["pservers"] = 0
    return spec_for(script, **more | values)


def imported(path: Path) -> ModuleType:
    found = importlib.util.spec_from_file_location("script_plain", path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def plainly(folder: Path, model: Model, spec: JobSpec) -> Trained:
    """An ordinary loop. Its `step` gets the minibatches of all lanes, of which there is one as a rule."""
    script = model.script
    for ours, theirs in model.plain.items():
        assert ours in script
        script = script.replace(ours, theirs)
    path = folder / "script_plain.py"
    path.write_text(f"{HEAD}\n{script}\n{STEP}\n{model.beside}")
    user = imported(path)
    torch.set_num_threads(1)
    torch.manual_seed(spec.seed)
    net = user.model()
    made = user.optimizer(net)
    optimizers = list(made.values()) if isinstance(made, dict) else made if isinstance(made, list) else [made]
    for number, lanes in enumerate(lane_batches(path, spec, *order_of(user, spec))):
        torch.manual_seed(step_seed(spec.seed, number, 0))
        user.step(net.train(), optimizers, *(batch_of(user, columns) for columns in lanes))
    return Trained(dict(net.state_dict()), evaluated(user, net, spec))


def order_of(user: ModuleType, spec: JobSpec) -> Sequence[Callable[[int, int], int]]:
    """Which records a weighted sampler draws in a job: nothing if there is none."""
    sampler = getattr(user.dataset(), "sampler", None)
    if not isinstance(sampler, WeightedRandomSampler):
        return ()
    return (WeightedOrder(sampler.weights.numpy(), spec.seed).drawn,)


def batch_of(user: ModuleType, columns: Mapping[str, torch.Tensor]) -> Any:
    if not hasattr(user, "collate"):
        return dict(columns)
    records = zip(*(columns[name].numpy() for name in ("x", "y")), strict=True)
    return user.collate([{"x": x, "y": y} for x, y in records])


def whole(script: Path) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.load(script.parent / f"{name}.npy")) for name in ("x", "y")}


def evaluated(user: ModuleType, net: torch.nn.Module, spec: JobSpec) -> dict[str, float]:
    """By metrics that see the records in their order."""
    columns = whole(Path(str(user.__file__)))
    if hasattr(user, "final"):
        found: dict[str, float] = user.final(net, **columns)
        return found
    if not hasattr(user, "evaluation_metrics"):
        return {}
    metrics = user.evaluation_metrics()
    size = spec.minibatch_size
    with torch.no_grad():
        for x, y in zip(columns["x"].split(size), columns["y"].split(size), strict=True):
            user.evaluate(net.eval(), {"x": x, "y": y}, metrics)
    return {name: float(metric.compute()) for name, metric in metrics.items()}


def has_fallen(script: Path, spec: JobSpec, state: Mapping[str, torch.Tensor]) -> float:
    """What `measured`, else the loss, of all records at the beginning is divided by with `state`. All numbers
    are finite."""
    assert all(value.isfinite().all() for value in state.values())
    user = imported(script)
    torch.manual_seed(spec.seed)
    net = user.model()
    measured: Callable[..., Any] = getattr(user, "measured", user.loss)
    found = []
    for values in (None, state):
        if values is not None:
            getattr(net, "_orig_mod", net).load_state_dict(values)
        torch.manual_seed(0)
        with torch.no_grad():
            value = measured(net.eval(), batch_of(user, whole(script)))
        found.append(float(value["loss"] if isinstance(value, dict) else value))
    assert all(map(math.isfinite, found))
    return found[0] / found[1]


def differences(job: Trained, plain: Trained) -> list[str]:
    """Names of what a job exported, or evaluated, that differs in a bit from plain PyTorch's. torch.compile
    puts its name before those of the model in plain PyTorch; torch's averages count their updates."""
    state = {name.removeprefix("_orig_mod."): value for name, value in plain.state.items()}
    extra = state.keys() - job.state.keys() - {"ema.n_averaged"}
    missing = job.state.keys() - state.keys()
    return [
        *extra,
        *missing,
        *(n for n in job.state.keys() & state.keys() if not torch.equal(job.state[n], state[n])),
        *(n for n, value in plain.metrics.items() if job.metrics.get(n) != value),
    ]
