"""A user's script for the tests, and the plain PyTorch loop that training with one lane must agree with, bit
for bit."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from master_service.core.queue.file_table import FileTable, TableFile, TaskSizes
from master_service.core.queue.streams import EpochOrder, Streams
from trainer_agent.data import minibatch_indices, minibatches_in
from trainer_agent.model.averages import Ema
from trainer_agent.script.user_module import load
from trireme_shared.protocol.lanes import step_seed
from trireme_shared.protocol.records import JobSpec, TaskKind
from trireme_shared.protocol.records.datasets import IterableStyle, Npy

RECORDS = 60
PARTS = {
    "head": """
        import torch, trireme
        from torch import nn
        from torch.nn import functional as F
        from trireme_shared.protocol.records.datasets import Npy
    """,
    "model": """
        def model():
            return nn.Sequential(
                nn.Linear(5, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.3), nn.Linear(24, 24),
                nn.ReLU(), nn.Linear(24, 3)
            )
    """,
    "dataset": """
        def dataset():
            return Npy({folder!r} + "/x.npy", {folder!r} + "/y.npy", aligned=True)
    """,
    "loss": """
        def loss(model, batch):
            return F.cross_entropy(model(batch["x"]), batch["y"])
    """,
    "optimizer": """
        def optimizer(model):
            return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    """,
}


def write_script(folder: Path, name: str = "script", **changes: str) -> Path:
    """The script with parts replaced (or added; "" leaves one out), and its data beside it."""
    numbers = np.random.default_rng(0)
    np.save(folder / "x.npy", numbers.standard_normal((RECORDS, 5)).astype(np.float32))
    np.save(folder / "y.npy", numbers.integers(0, 3, RECORDS))
    parts = {part: textwrap.dedent(text) for part, text in (PARTS | changes).items()}
    path = folder / f"{name}.py"
    path.write_text("\n".join(parts.values()).replace("{folder!r}", repr(str(folder))))
    return path


def spec_for(script: Path, **values: Any) -> JobSpec:
    folder = script.parent
    defaults: dict[str, Any] = {
        "job": "test",
        "script": str(script),
        "dataset": Npy(f"{folder}/x.npy", f"{folder}/y.npy", aligned=True),
        "storage": str(folder / "storage"),
        "epochs": 2,
        "global_batch_size": 8,
        "lanes": 1,
        "seed": 7,
        "records_per_task": 16,
        "block_bytes": 256,
        "pservers": 1,
        "task_timeout_floor_s": 20,
    }
    chosen = defaults | values
    if chosen.get("mode") == "async":  # these parameter servers take no checkpoints
        chosen = {"checkpoint_kind": "independent", **chosen}
    return JobSpec(**chosen)


def train_plainly(
    script: Path, spec: JobSpec, steps: int | None = None, rates: Mapping[int, float] | None = None
) -> dict[str, torch.Tensor]:
    """The state_dict after an ordinary loop over the minibatches of lane 0 of one lane; after `steps` of
    them, if that is given. `rates`: the learning rate from a step on, instead of the script's scheduler."""
    assert spec.lanes == 1
    user = load(script)
    torch.set_num_threads(1)
    torch.manual_seed(spec.seed)
    model = user.call("model")
    optimizer = user.call("optimizer", model)
    scheduler = user.call("scheduler", optimizer) if rates is None and user.has("scheduler") else None
    x, y = np.load(script.parent / "x.npy"), np.load(script.parent / "y.npy")
    averages = [part for part in model.modules() if isinstance(part, Ema)]
    step, table = 0, table_of(spec)
    for epoch in range(spec.epochs):
        for position in range(table.tasks):
            task = EpochOrder(table.tasks, spec.seed, epoch, shuffle=spec.shuffle).task_at(position)
            first, count = table.locate(task).first, table.locate(task).count
            for number in range(minibatches_in(count, spec.minibatch_size)):
                if step == steps:
                    return dict(model.state_dict())
                chosen = first + minibatch_indices(
                    spec.seed, epoch, task, count, spec.minibatch_size, number, shuffle=spec.shuffle
                )
                for group in optimizer.param_groups:
                    group["lr"] = (rates or {}).get(step, group["lr"])
                torch.manual_seed(step_seed(spec.seed, step, 0))
                optimizer.zero_grad()
                batch = {"x": torch.from_numpy(x[chosen]), "y": torch.from_numpy(y[chosen])}
                with torch.autocast("cpu", torch.bfloat16, enabled=spec.precision == "bf16"):
                    loss = user.call("loss", model.train(), batch)
                loss.backward()
                if spec.clip_lane_norm is not None:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), spec.clip_lane_norm)
                optimizer.step()
                for average in averages:
                    average.follow()
                if scheduler is not None and spec.schedule_per == "step":
                    scheduler.step()
                step += 1
        if scheduler is not None and spec.schedule_per == "epoch":
            scheduler.step()
    return dict(model.state_dict())


def table_of(spec: JobSpec) -> FileTable:
    """The tasks of a script's data. A file is called by its first record."""
    shards = spec.dataset.shards if isinstance(spec.dataset, IterableStyle) else 1
    files = [TableFile(str(first), RECORDS // shards) for first in range(0, RECORDS, RECORDS // shards)]
    in_sequence = isinstance(spec.dataset, IterableStyle)
    return replace(TaskSizes.of(spec).table(files), in_sequence=in_sequence)


def lane_batches(
    script: Path, spec: JobSpec, drawn: Callable[[int, int], int] = lambda _, number: number
) -> Iterator[list[dict[str, torch.Tensor]]]:
    """Of each step: the minibatches of its lanes, without those that have no records. `drawn(epoch, number)`:
    the place of a record, where records are drawn by weight."""
    x, y = np.load(script.parent / "x.npy"), np.load(script.parent / "y.npy")
    table = table_of(spec)
    lanes = Streams(TaskKind.TRAIN, table, spec.lanes, spec.seed, spec.shuffle, spec.minibatch_size)
    for epoch in range(spec.epochs):
        order = lanes.order(epoch)
        streams: list[list[Any]] = [[] for _ in range(spec.lanes)]
        for position in range(table.tasks):
            task = order.task_at(position)
            place = table.locate(task)
            first, count = int(place.file) + place.first, place.count
            for number in range(minibatches_in(count, spec.minibatch_size)):
                chosen = minibatch_indices(
                    spec.seed, epoch, task, count, spec.minibatch_size, number, shuffle=spec.shuffle
                )
                places = [drawn(epoch, int(first + record)) for record in chosen]
                streams[position % spec.lanes].append(np.array(places))
        for number in range(max(map(len, streams))):
            rows = [stream[number] for stream in streams if number < len(stream)]
            yield [{"x": torch.from_numpy(x[each]), "y": torch.from_numpy(y[each])} for each in rows]


def differing(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of the tensors that are not equal in every bit (zeros may differ in sign)."""
    assert list(one) == list(other)
    return [name for name in one if not torch.equal(one[name], other[name])]


def records(count, seed=0):
    numbers = np.random.default_rng(seed)
    return [
        {"x": numbers.standard_normal(5).astype(np.float32), "y": int(numbers.integers(3))}
        for _ in range(count)
    ]
