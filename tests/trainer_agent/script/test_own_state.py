"""A script whose result depends on a generator, a counter or a queue of its own is refused by name; one that
only looks so is not."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from types import SimpleNamespace

import pytest
import torch

from tests.trainer_agent.own_loop.scripts import write_loop
from tests.trainer_agent.scripts import records, spec_for, write_script
from trainer_agent.model.compute import LaneResult
from trainer_agent.model.watch.own_state import Watch
from trainer_agent.script.inspect import inspect_script
from trainer_agent.script.twice import Twice

HEAD = """
    import collections, random, time
    import numpy as np
    import torch, trireme
    from torch import nn
    from torch.nn import functional as F
    from trireme_shared.protocol.records.datasets import Custom, MapStyle, Npy
"""
NOISY_LOSS = (
    "def loss(model, batch):\n    noise = {noise}\n"
    "    return F.cross_entropy(model(batch['x'] + noise), batch['y'])\n"
)
LEAKING = """
    KEPT = {{"rng": np.random.default_rng(0)}}
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(5, 3)
            {attribute}
        def forward(self, x): return self.inner(x){forward}
    def model(): return Net()
"""
ITEMS = """
    class Items:
        def __init__(self): self.rng, self.reads = np.random.default_rng(0), 0
        def __len__(self): return 60
        def __getitem__(self, i):
            self.reads += 1
            return {{"x": np.ones(5, dtype=np.float32) * {value}, "y": i % 3}}
    def dataset(): return Items()
"""

REFUSED = {
    "numpy generator": (
        {"own": "RNG = np.random.default_rng(0)\n", "loss": NOISY_LOSS.format(noise="RNG.normal()")},
        "RNG of own_numpy_generator.py: a random generator of the script's own",
    ),
    "torch generator of the model": (
        {
            "model": LEAKING.format(
                attribute="self.noise = torch.Generator().manual_seed(1)",
                forward=" + torch.rand(1, generator=self.noise)",
            )
        },
        "noise of the model: a random generator",
    ),
    "generator in a hook of the model": (
        {
            "model": LEAKING.format(
                attribute="rng = random.Random(0); self.register_forward_hook(lambda m, i, out: out + "
                "rng.random())",
                forward="",
            )
        },
        "rng of the model: a random generator",
    ),
    "generator in a closure of collate": (
        {
            "collate": """
                def make():
                    rng = random.Random(3)
                    def collate(records):
                        return {"x": torch.stack([torch.as_tensor(r["x"]) for r in records]) * rng.random(),
                                "y": torch.tensor([r["y"] for r in records])}
                    return collate
                collate = make()
            """
        },
        "rng of own_generator_in_a_closure_of_collate.py: a random generator",
    ),
    "generator that seldom matters": (
        {
            "own": "RNG = random.Random(0)\n",
            "loss": NOISY_LOSS.format(noise="1.0 if RNG.random() < 1e-9 else 0.0"),
        },
        "RNG of own_generator_that_seldom_matters.py: a random generator",
    ),
    "generator of an iterator": (
        {
            "own": "NOISE = (r.random() for r in [random.Random(0)] * 1000)\n",
            "loss": NOISY_LOSS.format(noise="next(NOISE)"),
        },
        "NOISE.r of own_generator_of_an_iterator.py: a random generator",
    ),
    "generator of the dataset": (
        {"dataset": ITEMS.format(value="self.rng.normal()")},
        "rng of dataset\\(\\): a random generator",
    ),
    "generator without a seed": (
        {"loss": NOISY_LOSS.format(noise="np.random.default_rng().normal()")},
        "is not a function of its records, the parameters and the seed: computed twice,",
    ),
    "generator of a record without a seed": (
        {"dataset": ITEMS.format(value="np.random.default_rng().normal()")},
        r"reading the records of dataset\(\) is not a function .*: computed twice, record 0 \['x'\] differs",
    ),
    "counter": (
        {
            "own": "STEP = [0]\n",
            "loss": "def loss(model, batch):\n    STEP[0] += 1\n"
            "    return F.cross_entropy(model(batch['x']), batch['y']) * STEP[0]\n",
        },
        r"state of its own that changed: STEP\[0\] of own_counter.py",
    ),
    "counter in the loss alone": (
        {
            "own": "STEP = [0]\n",
            "loss": "def loss(model, batch):\n    STEP[0] += 1\n"
            "    return F.cross_entropy(model(batch['x']), batch['y']) + STEP[0]\n",
        },
        r"computed twice, the loss was \d\S+ and then \d",
    ),
    "queue of negatives": (
        {
            "own": "QUEUE = collections.deque(maxlen=8)\n",
            "loss": """
                def loss(model, batch):
                    out = model(batch["x"])
                    far = sum((out - other).square().mean() for other in QUEUE)
                    QUEUE.append(out.detach().mean(0))
                    return F.cross_entropy(out, batch["y"]) - 0.1 * far
            """,
        },
        r"state of its own that changed: QUEUE of own_queue_of_negatives.py",
    ),
}
ACCEPTED = {
    "global generators": {
        "loss": NOISY_LOSS.format(noise="np.random.normal() + random.random() + torch.rand(1)"),
        "collate": """
            def collate(records):
                return {"x": torch.stack([torch.as_tensor(r["x"]) for r in records]) * random.random(),
                        "y": torch.tensor([r["y"] for r in records])}
        """,
        "dataset": ITEMS.format(value="np.random.normal()").replace("self.reads += 1", "pass"),
    },
    "generator that is seeded anew": {
        "own": "RNG = torch.Generator()\n",
        "loss": NOISY_LOSS.format(noise="torch.rand(1, generator=RNG.manual_seed(len(batch['x'])))"),
    },
    "generator made from the global ones": {
        "loss": NOISY_LOSS.format(noise="np.random.default_rng(np.random.randint(2**31)).normal()")
    },
}


def inspected(script, capsys, *settings):
    code = inspect_script(str(script), check=True, settings=list(settings))
    sys.modules.pop(script.stem, None)
    return code, json.loads(capsys.readouterr().out)


def named(name: str) -> str:
    return "own_" + name.replace(" ", "_")


@pytest.mark.parametrize("name", REFUSED)
def test_what_depends_on_the_process_is_refused_by_name(tmp_path, capsys, name):
    parts, message = REFUSED[name]
    script = write_script(tmp_path, named(name), **{"head": HEAD} | parts)
    code, found = inspected(script, capsys)
    assert code == 2
    assert re.search(message, found["error"]["message"]), found["error"]["message"]
    assert "which are seeded" in found["error"]["hint"]


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_is_the_same_in_each_process_is_accepted_without_a_word(tmp_path, capsys, name):
    script = write_script(tmp_path, named(name), **{"head": HEAD} | ACCEPTED[name])
    code, found = inspected(script, capsys)
    assert (code, found.get("notice")) == (0, None), found


@pytest.mark.parametrize(
    "settings", [("mode=async", "checkpoint_kind=independent"), ("deterministic=false",)]
)
def test_a_job_that_is_not_deterministic_is_only_told(tmp_path, capsys, settings):
    parts, message = REFUSED["numpy generator"]
    script = write_script(tmp_path, named("numpy generator"), **{"head": HEAD} | parts)
    code, found = inspected(script, capsys, *settings)
    assert code == 0
    assert message in found["notice"]


def test_a_counter_that_changes_nothing_is_told_and_not_refused(tmp_path, capsys):
    loss = (
        "def loss(model, batch):\n    CALLS.append(1)\n"
        "    return F.cross_entropy(model(batch['x']), batch['y'])\n"
    )
    code, found = inspected(write_script(tmp_path, "own_calls", own="CALLS = []\n", loss=loss), capsys)
    assert code == 0
    assert "changes CALLS of own_calls.py" in found["notice"]


BATCHES = """
    rng = torch.Generator().manual_seed(0)
    for batch in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch["x"] + torch.rand(1, generator=rng)), batch["y"])
        trireme.backward(loss)
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("loop", "where"),
    [
        (BATCHES, "rng of loop.py"),
        (f"def main():{BATCHES.replace(chr(10), chr(10) + '    ')}\nmain()\n", "rng in main of loop.py"),
    ],
    ids=["of the module", "of a function"],
)
def test_a_generator_in_a_loop_of_ones_own_is_refused_by_the_function_that_holds_it(
    tmp_path, capsys, loop, where
):
    code, found = inspected(write_loop(tmp_path, loop=loop), capsys)
    assert code == 2
    assert f"{where}: a random generator of the script's own" in found["error"]["message"]


def test_kernels_that_give_other_bits_each_time_are_no_fault_of_a_script(tmp_path):
    """As those of GPUs may, in jobs that need not be deterministic."""
    script, numbers = write_script(tmp_path), iter(range(100))
    for device, told in (("cuda", False), ("cpu", True)):
        layout = SimpleNamespace(device=device)
        parts = SimpleNamespace(gradient_views=())
        compute = SimpleNamespace(
            layout=layout, minibatch=parts, places=(), forget_nodes=bool, model=torch.nn.Identity()
        )
        twice = Twice(script, spec_for(script, deterministic=False), compute)
        twice.minibatch(lambda: LaneResult(float(next(numbers)), 1))
        assert bool(twice.notices) == told


def test_a_trainer_tells_of_a_generator_that_moves_with_its_minibatches(build):
    """Also one that nobody has inspected: started by hand, or with an order of records that only some
    minibatches have."""
    compute = build(
        head=HEAD, own="RNG = np.random.default_rng(0)\n", loss=NOISY_LOSS.format(noise="RNG.normal()")
    )
    told = []
    for number in range(4):
        compute.forget_nodes()
        told += asyncio.run(compute.gradient((0, 1), 0, number, records(4, number), bool)).warnings
    del sys.modules["script"]
    assert len(told) == 1
    assert "RNG of script.py is a random generator of the script's own" in told[0]


def test_a_process_of_the_users_own_is_watched_and_told(tmp_path, monkeypatch):
    (tmp_path / "watched.py").write_text("import random\nRNG, FIXED = random.Random(0), random.Random(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    import watched

    watch, told = Watch(tmp_path / "watched.py", torch.nn.Identity()), []
    for _ in range(4):
        watched.RNG.random()
        watched.FIXED.seed(3)
        told.append(watch.after_minibatch())
    del sys.modules["watched"]
    assert [bool(text) for text in told] == [False, False, True, False]
    assert "RNG of watched.py is a random generator of the script's own" in told[2]
    assert "FIXED" not in told[2]


def test_a_module_beside_the_model_is_told_if_it_changes_with_each_minibatch(tmp_path, monkeypatch):
    """Not one that stays as it is, nor one that has the model's own parameters."""
    (tmp_path / "beside.py").write_text(
        "import torch\nmodel, average, teacher = (torch.nn.BatchNorm1d(3) for _ in range(3))\n"
        "wrapped, once = torch.nn.Sequential(model, teacher), torch.nn.Linear(2, 2)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import beside

    watch, told = Watch(tmp_path / "beside.py", beside.model), []
    for number in range(4):
        beside.model(torch.full((4, 3), float(number)))
        beside.model.weight.data.mul_(2)
        beside.average.weight.data.lerp_(beside.model.weight.data, 0.5)  # torch's counter does not show it
        if number == 1:
            beside.once.bias.data.add_(1)
        told.append(watch.after_minibatch())
    del sys.modules["beside"]
    assert [bool(text) for text in told] == [False, False, True, False]
    assert "each minibatch changes average.weight of beside.py of a module beside the model" in told[2]
