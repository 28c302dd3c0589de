"""Each piece of a script's code draws the same random numbers in every process of its job, whatever was drawn
there before."""

from __future__ import annotations

import asyncio
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.trainer_agent.own_loop.scripts import write_loop
from tests.trainer_agent.scripts import records, spec_for
from trainer_agent.model.torch_compute import TorchCompute
from trainer_agent.script.inspect import inspect_script
from trainer_agent.script.user_module import load
from trireme_shared.datasets.random_state import Generators, seed_everything
from trireme_shared.datasets.user_modules import load_named

DRAWN = "random.random() + np.random.random() + torch.rand(1).item()"
HEAD = """
    import random
    import numpy as np
    import torch, trireme
    from torch import nn
    from torch.nn import functional as F
    from trireme_shared.protocol.records.datasets import Npy
"""
PARTS = {
    "head": HEAD,
    "own": f"AT_IMPORT = {DRAWN}\n",
    "optimizer": f"def optimizer(model):\n    return torch.optim.SGD(model.parameters(), lr={DRAWN})\n",
    "scheduler": "def scheduler(optimizer):\n    return torch.optim.lr_scheduler.StepLR(optimizer, 1, "
    f"gamma={DRAWN})\n",
    "metrics": f"def metrics(sums):\n    return {{'drawn': {DRAWN}}}\n",
    "collate": f"def collate(records):\n    return {DRAWN}\n",
    "ids": "def ids(batch):\n    return batch\n",
}


@pytest.fixture
def in_two_processes(tmp_path):
    """What `find` returns after other random numbers were drawn, twice; it must leave the generators as they
    were."""

    def both(find):
        found = []
        for seed in (1, 2):
            seed_everything(seed)
            before = Generators.now()
            found.append(find())
            assert before.differs() == ""
        return found

    sys.path.append(str(tmp_path))
    yield both
    sys.path.remove(str(tmp_path))


def described(compute: TorchCompute) -> object:
    metrics = asyncio.run(compute.metrics({}))
    said: list[object] = []
    ready = compute.minibatch.prepare(records(4, 0), 3, lambda ids: said.append(ids) or ())
    assert said == [ready.batch.batch]
    return compute.initial_lane_zero(), metrics, said


def test_functions_and_the_import_of_a_script_draw_what_its_seed_says(build, in_two_processes):
    def once():
        found = described(build(**PARTS)), sys.modules.pop("script").AT_IMPORT
        return str(found)

    first, second = in_two_processes(once)
    assert first == second


def test_a_module_of_records_is_imported_with_a_seed(tmp_path, in_two_processes):
    (tmp_path / "seeds_reader.py").write_text(
        "import random\nimport numpy as np\nimport torch\nnumbers = [" + DRAWN + "]\n"
    )

    def once():
        found = load_named("seeds_reader:numbers")
        del sys.modules["seeds_reader"]
        return found

    first, second = in_two_processes(once)
    assert first == second


LOOP = {
    "head": HEAD,
    "prepare": f"""
        sizes = [random.randrange(10**6), random.randrange(10**6)]
        dataset = trireme.data.MapStyle("somewhere:items", records=1 + sizes[0])
        def held_out():
            return trireme.data.MapStyle("somewhere:items", records=1 + sizes[1] + int(1000 * ({DRAWN})))
        model, optimizer, batches = trireme.prepare(
            model, optimizer, dataset, evaluation_dataset=held_out, evaluate=lambda model, batch: {{}}
        )
        between = {DRAWN}
    """,
    "loop": """
        for batch in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch["x"]), batch["y"]) * between
            trireme.backward(loss)
            optimizer.step()
    """,
}


def test_a_loop_of_ones_own_draws_the_same_before_its_first_batch_also_when_it_is_inspected(
    tmp_path, capsys, in_two_processes
):
    script = write_loop(tmp_path, **LOOP)

    def inspected():
        assert inspect_script(str(script), check=False, settings=["seed=7"]) == 0
        return json.loads(capsys.readouterr().out)

    first, second = in_two_processes(inspected)
    assert first == second


def test_what_a_loop_draws_between_prepare_and_its_first_batch_is_the_same_for_each_lane_and_step(tmp_path):
    first, second = (losses_of(write_loop(tmp_path, **LOOP), seed) for seed in (5, 9))
    assert first == second


def losses_of(script: Path, seed: int) -> float:
    """Of a minibatch with the same seed, after one that has `seed`: that of whichever lane and step is first
    at a trainer."""
    with ThreadPoolExecutor(1) as executor:
        user = load(script)
        compute = executor.submit(TorchCompute, user, spec_for(script), executor).result()
        for each in (seed, 3):
            compute.forget_nodes()
            result = asyncio.run(compute.gradient((0, 1), 0, each, records(4, 0), bool))
        user.loop.close()
    return result.loss_sum
