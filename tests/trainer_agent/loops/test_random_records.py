"""Training has the same bits whether it is evaluated or not, and whoever reads and computes, also when
records and evaluations draw random numbers or seed the generators."""

from __future__ import annotations

import asyncio
import textwrap

import numpy as np
import torch

from tests.trainer_agent.cluster import TorchCluster, cluster, trained
from tests.trainer_agent.collective.cluster import trained as trained_collectively
from tests.trainer_agent.own_loop.scripts import write_loop
from tests.trainer_agent.scripts import RECORDS, differing, spec_for, write_script
from trainer_agent.data import evaluation_seed, open_dataset
from trainer_agent.script.user_module import load
from trireme.plain import plain_spec, run
from trireme_shared.protocol.records import JobSpec, Phase, Strategy
from trireme_shared.protocol.records.datasets import MapStyle

HELD_OUT = 24
ITEMS = f"""
    import random, time
    import numpy as np
    class Augmented:
        def __len__(self): return {RECORDS}
        def __getitem__(self, i):
            if i % 4 == 0: time.sleep(0.0005)
            x = torch.rand(5, generator=torch.Generator().manual_seed(i))
            return {{"x": x + 0.1 * torch.randn(5) + np.random.normal() * random.random(), "y": i % 3}}
    class Seeding:
        def __len__(self): return {HELD_OUT}
        def __getitem__(self, i):
            torch.manual_seed(i); np.random.seed(i); random.seed(i)
            if i % 4 == 0: time.sleep(0.0005)
            return {{"x": torch.rand(5) + random.random(), "y": i % 3}}
"""
EVALUATE = """
    def evaluate(model, batch):
        torch.manual_seed(3)
        noise = torch.rand(5) + np.random.random() + random.random()
        correct = (model(batch["x"] + noise).argmax(1) == batch["y"]).sum()
        return {"correct": correct, "records": len(batch["y"])}
    def metrics(sums): return {"accuracy": sums["correct"] / sums["records"], "drawn": random.random()}
"""
FOUR = {"lanes": 4, "global_batch_size": 12, "records_per_task": 12, "epochs": 2}


def job(folder, name, *, evaluates, **values):
    """The spec of a job whose records draw; `evaluates`: while it trains, too."""
    script = write_script(
        folder,
        name,
        dataset=ITEMS
        + "\n    def dataset(): return Augmented()\n    def evaluation_dataset(): return Seeding()\n",
        evaluate=EVALUATE,
    )
    held_out = {
        "evaluation_dataset": MapStyle(f"{name}:evaluation_dataset", records=HELD_OUT),
        "evaluate_every": 2,
    }
    return spec_for(
        script,
        dataset=MapStyle(f"{name}:dataset", records=RECORDS),
        storage=str(folder / f"storage-{name}-{evaluates}"),
        **(FOUR | (held_out if evaluates else {}) | values),
    )


async def test_evaluations_of_a_collective_job_do_not_show_in_the_bits(tmp_path):
    values = {"strategy": Strategy.COLLECTIVE, "pservers": 0}
    alone = await trained_collectively(job(tmp_path, "random_collective", evaluates=False, **values), 2)
    torch.manual_seed(5)
    found = await trained_collectively(job(tmp_path, "random_collective", evaluates=True, **values), 1)
    assert differing(alone, found) == []


async def trained_while_evaluating(spec: JobSpec, held_out: MapStyle) -> dict[str, torch.Tensor]:
    """By two trainers, one of which evaluates all the time; these parameter servers save no versions, which
    `evaluate_every` needs."""

    async def evaluate(made: TorchCluster) -> None:
        reader, compute = open_dataset(held_out, spec.seed), made.computes["trainer-0-x"]
        await made.version(1)
        while True:
            shard = await asyncio.to_thread(reader.read, "", 0, HELD_OUT)
            await compute.evaluate(shard.minibatch(np.arange(8)), evaluation_seed(spec.seed, 0, 0))

    async with cluster(spec, 2) as made:
        evaluating = asyncio.create_task(evaluate(made))
        state = await made.ended()
        assert not evaluating.done()
        evaluating.cancel()
        await asyncio.wait([evaluating])
        assert state.phase is Phase.COMPLETED, state
        return made.exported()


async def test_evaluations_beside_parameter_servers_do_not_show_in_the_bits(tmp_path):
    alone = await trained(job(tmp_path, "random_servers", evaluates=False), 1)
    held_out = MapStyle("random_servers:evaluation_dataset", records=HELD_OUT)
    found = await trained_while_evaluating(job(tmp_path, "random_servers", evaluates=False), held_out)
    assert differing(alone, found) == []


async def test_plain_training_has_the_bits_of_one_lane_with_and_without_evaluations(tmp_path):
    one = {"lanes": 1, "global_batch_size": 6}
    expected = await trained(job(tmp_path, "random_plain", evaluates=False, **one), 1)
    for evaluates in (False, True):
        spec = job(tmp_path, "random_plain", evaluates=evaluates, **one)
        user = load(spec.script)
        assert plain_spec(user, {}).dataset == spec.dataset
        assert differing(run(user, spec).model.state_dict(), expected) == []


async def test_a_loop_of_ones_own_draws_between_its_batches_what_the_step_says(tmp_path):
    (tmp_path / "random_items.py").write_text("import torch\n" + textwrap.dedent(ITEMS))
    drawing = {
        "head": "import random, torch, trireme\nimport numpy as np\nfrom torch import nn\n"
        "from torch.nn import functional as F\n",
        "prepare": f"""
            dataset = trireme.data.MapStyle("random_items:Augmented", records={RECORDS})
            model, optimizer, batches = trireme.prepare(
                model, optimizer, dataset, config={{"seed": 7}},
                evaluation_dataset=trireme.data.MapStyle("random_items:Seeding", records={HELD_OUT}),
                evaluate=lambda model, batch: {{"sum": model(batch["x"] + torch.rand(5)).sum()}},
            )
            scale = 1 + random.random()  # before the first batch: the same at every trainer
        """,
        "loop": """
            for batch in batches:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(batch["x"] * scale), batch["y"])
                trireme.backward(loss)
                optimizer.step()
        """,
        "after": "",
    }
    script = write_loop(tmp_path, "random_loop", **drawing)
    spec = spec_for(script, dataset=MapStyle("random_items:Augmented", records=RECORDS), **FOUR)
    alone = await trained(spec, 1)
    held_out = MapStyle("random_items:Seeding", records=HELD_OUT)
    assert differing(alone, await trained_while_evaluating(spec, held_out)) == []


async def test_a_generator_of_ones_own_is_an_event_of_a_job_that_nobody_tried_before(tmp_path):
    loss = (
        "def loss(model, batch):\n    return F.cross_entropy(model(batch['x'] + RNG.random()), batch['y'])\n"
    )
    script = write_script(
        tmp_path, "random_untried", own="import random\nRNG = random.Random(0)\n", loss=loss
    )
    async with cluster(spec_for(script), 1) as made:
        assert (await made.ended()).phase is Phase.COMPLETED
        told = [event.message for event in made.master.events.after(0, 1000) if event.name == "warning"]
    assert len(told) == 1
    assert (
        "RNG of random_untried.py is a random generator of the script's own; each trainer of a job" in told[0]
    )
