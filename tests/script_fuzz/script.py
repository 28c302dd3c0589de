"""The text of a script: the plain one, with the code of its mutations. The same code in functions, in a loop,
and in plain PyTorch."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.script_fuzz.mutation import Mutation

RECORDS, SEED = 28, 7
SETTINGS = {
    "epochs": 2,
    "global_batch_size": 8,
    "records_per_task": 16,
    "seed": SEED,
    "lanes": 1,
    "block_bytes": 256,
}
OPTIMIZER = "torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)"

HEAD = """
import copy, functools, math, random
import numpy as np, torch, trireme
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize, parametrizations, prune
import torchmetrics

calls = [0]  # of loss
made = []  # the optimizer

def seed():  # as Trireme does before it calls a function of a script
    torch.manual_seed(7), np.random.seed(7), random.seed(7)
"""
ROWS = """
def rows():
    columns = (torch.from_numpy(np.load(file)) for file in ({x!r}, {y!r}))
    return [{{"x": x, "y": y}} for x, y in zip(*columns)]
"""
MODEL = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.last = nn.Linear(8, 3)
{init}

    def forward(self, x):
        h = self.first(x)
{forward}
        return self.last(torch.relu(h))

def build():
    m = Net()
{build}
    return m

def build_optimizer(m):
    opt = {optimizer}
    made.append(opt)
{prepared}
    return opt

def build_scheduler(opt):
    return {scheduler}

def compute_loss(model, batch):
    step = calls[0]
    calls[0] += 1
    out = model(batch["x"])
    value = F.cross_entropy(out, batch["y"])
{loss}
    return {returns}
"""
EVALUATION = """
def evaluation_dataset():
    return trireme.data.Npy({x!r}, {y!r}, aligned=True)

def evaluate(model, batch, metrics):
    scores = model(batch["x"])
{evaluate}

def evaluation_metrics():
    return {objects}
"""
IN_LOOPS = (
    ", evaluation_dataset=evaluation_dataset(), evaluate=evaluate, evaluation_metrics=evaluation_metrics"
)
FUNCTIONS = """
config = trireme.Config(**{settings})
model, optimizer, loss = build, build_optimizer, compute_loss
{scheduler}
def dataset():
    return {dataset}
"""
LOOP = """
config = trireme.Config(**{settings})
seed()
model = build()
seed()
opt = build_optimizer(model)
dataset = {dataset}
model, opt, batches = trireme.prepare(model, opt, dataset{given})
for batch in batches:
    step = calls[0]
{top}
    {zero}
    value = compute_loss(model, batch)
    trireme.backward(value)
    value = value["loss"] if isinstance(value, dict) else value
{between}
    opt.step()
{after}
torch.save(model.state_dict(), {saved!r})
"""
PLAIN = """
def train(epochs):
    seed()
    model = build()
    seed()
    opt = build_optimizer(model)
    scheduler = build_scheduler(opt)
    for batches in epochs:
        for batch in batches:
            step = calls[0]
{top}
            {zero}
            with torch.autocast("cpu", torch.bfloat16, enabled={bf16}):
                value = compute_loss(model, batch)
            value = value["loss"] if isinstance(value, dict) else value
            value.backward()
{clip}
{between}
            opt.step()
{by_hand}
            if scheduler is not None and not {per_epoch}:
                scheduler.step()
{after}
        if scheduler is not None and {per_epoch}:
            scheduler.step()
    return model
"""


class Script:
    """Of some mutations, with its data in `folder`."""

    def __init__(self, folder: Path, mutations: Sequence[Mutation]) -> None:
        self.folder, self.mutations = folder, tuple(mutations)
        self.settings = dict(SETTINGS)
        for mutation in mutations:
            self.settings |= mutation.settings
        self.x, self.y = str(folder / "x.npy"), str(folder / "y.npy")
        self.numbers = str(folder / "numbers.npy")
        np.save(self.numbers, np.arange(RECORDS))
        numbers = np.random.default_rng(0)
        np.save(self.x, numbers.standard_normal((RECORDS, 5)).astype(np.float32))
        np.save(self.y, numbers.integers(0, 3, RECORDS))

    def names(self, surface: str) -> tuple[str, ...]:
        """Words of which a refusal must have one."""
        found = [mutation.names for mutation in self.mutations]
        if any("trireme.nn.Ema" in mutation.init for mutation in self.mutations):
            found.append(("Ema begins",))  # others may give other values to what it has copied
        if "asynchronous" in surface:
            found += [mutation.async_names for mutation in self.mutations]
        if "loop" in surface:
            found += [mutation.loop_names for mutation in self.mutations]
        return tuple(name for names in found for name in names)

    @property
    def has_functions(self) -> bool:
        return not any(mutation.in_loops_only for mutation in self.mutations)

    @property
    def saved(self) -> Path:
        return self.folder / "after.pt"

    def functions(self, name: str) -> Path:
        scheduler = "scheduler = build_scheduler" if self._one("scheduler") else ""
        return self._write(
            name, FUNCTIONS.format(settings=self.settings, scheduler=scheduler, dataset=self._dataset)
        )

    def loop(self, name: str) -> Path:
        given = ", scheduler=build_scheduler(opt)" if self._one("scheduler") else ""
        given += ", collate=collate" if self._one("collate") else ""
        given += ", buffers=buffers" if self._one("buffers") else ""
        given += IN_LOOPS if self.is_evaluated else ""
        text = LOOP.format(
            settings=self.settings,
            dataset=self._dataset,
            given=given,
            zero=self._one("zero") or "opt.zero_grad()",
            saved=str(self.saved),
            **{part: self._code(part, 4) for part in ("top", "between", "after")},
        )
        return self._write(name, text)

    def plain(self) -> str:
        """The text of a module with `train(epochs)`, without a service."""
        limit = self.settings.get("clip_lane_norm")
        clip = "" if limit is None else f"            nn.utils.clip_grad_norm_(model.parameters(), {limit})"
        code = {part: self._code(part, 12) for part in ("top", "between", "after", "by_hand")}
        return self._common() + PLAIN.format(
            zero=self._one("zero") or "opt.zero_grad()",
            clip=clip,
            bf16=self.settings.get("precision") == "bf16",
            per_epoch=self.settings.get("schedule_per") == "epoch",
            **code,
        )

    def _write(self, name: str, text: str) -> Path:
        path = self.folder / f"{name}.py"
        path.write_text(self._common() + text)
        return path

    @property
    def has_loader(self) -> bool:
        return bool(self._one("loader"))

    @property
    def is_evaluated(self) -> bool:
        return bool(self._one("objects"))

    @property
    def collator(self) -> str:
        """The function that makes a batch of records in plain PyTorch; "": torch's own."""
        return self._one("collator") or ("collate" if self._one("collate") else "")

    def item(self, epoch: int, number: int) -> int:
        """Which row is record `number` of the dataset."""
        found = next((each.item for each in self.mutations if each.item is not None), None)
        return number if found is None else found(epoch, number)

    @property
    def _dataset(self) -> str:
        return self._one("loader") or f"trireme.data.Npy({self.x!r}, {self.y!r}, aligned=True)"

    def _common(self) -> str:
        collate = self._one("collate")
        text = HEAD + ROWS.format(x=self.x, y=self.y) + self._code("head", 0)
        text += (
            f"\ndef collate(records):\n{textwrap.indent(textwrap.dedent(collate), '    ')}\n"
            if collate
            else ""
        )
        if policies := self._one("buffers"):
            text += f"\nbuffers = {policies}\n"
        if self.is_evaluated:
            code = self._code("evaluate", 4)
            text += EVALUATION.format(x=self.x, y=self.y, evaluate=code, objects=self._one("objects"))
        return text + MODEL.format(
            init=self._code("init", 8),
            forward=self._code("forward", 8),
            build=self._code("build", 4),
            optimizer=self._one("optimizer") or OPTIMIZER,
            prepared=self._code("prepared", 4),
            scheduler=self._one("scheduler") or "None",
            loss=self._code("loss", 4),
            returns=self._one("returns") or "value",
        )

    def _code(self, part: str, indent: int) -> str:
        texts = (textwrap.dedent(getattr(mutation, part)).strip("\n") for mutation in self.mutations)
        return "\n".join(textwrap.indent(text, " " * indent) for text in texts if text)

    def _one(self, part: str) -> str:
        return next((getattr(mutation, part) for mutation in self.mutations if getattr(mutation, part)), "")
