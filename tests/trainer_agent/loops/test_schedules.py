"""A scheduler that is stepped after each epoch: as in plain PyTorch's loop, for one lane and for many,
whoever dies."""

from __future__ import annotations

import pytest
import torch

from tests.trainer_agent.cluster import cluster, trained
from tests.trainer_agent.own_loop.scripts import write_loop
from tests.trainer_agent.scripts import differing, spec_for, train_plainly, write_script
from trainer_agent.script.user_module import load
from trireme.plain import run
from trireme_shared.protocol.records import Mode, Phase

SCHEDULERS = {
    "step": "torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.3)",
    "cosine": "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)",
}
PREPARE = "model, optimizer, batches = trireme.prepare(model, optimizer, dataset, scheduler=scheduler)\n"
WITHOUT_NOISE = "def model():\n    return nn.Sequential(nn.Linear(5, 24), nn.ReLU(), nn.Linear(24, 3))\n"
PER_EPOCH = {"schedule_per": "epoch", "epochs": 4}


def scheduler(name: str) -> str:
    return f"def scheduler(optimizer):\n    return {SCHEDULERS[name]}\n"


@pytest.mark.parametrize("name", list(SCHEDULERS))
async def test_one_lane_has_the_bits_of_plain_pytorchs_loop(tmp_path, name):
    script = write_script(tmp_path, scheduler=scheduler(name))
    spec = spec_for(script, **PER_EPOCH)
    plain = train_plainly(script, spec)
    assert differing(await trained(spec), plain) == []
    assert differing(dict(run(load(script), spec).model.state_dict()), plain) == []
    assert differing(train_plainly(script, spec_for(script, epochs=4)), plain) != []


async def test_a_loop_of_ones_own_has_the_same_bits(tmp_path):
    loop = write_loop(tmp_path, prepare=f"scheduler = {SCHEDULERS['step']}\n{PREPARE}")
    script = write_script(tmp_path, scheduler=scheduler("step"))
    ours = await trained(spec_for(loop, **PER_EPOCH, storage=str(tmp_path / "loop")))
    assert differing(ours, train_plainly(script, spec_for(script, **PER_EPOCH))) == []


async def test_one_asynchronous_trainer_has_the_same_bits(tmp_path):
    script = write_script(tmp_path, model=WITHOUT_NOISE, scheduler=scheduler("step"))
    spec = spec_for(script, **PER_EPOCH)
    ours = await trained(spec.model_copy(update={"mode": Mode.ASYNC, "checkpoint_kind": "independent"}))
    assert differing(ours, train_plainly(script, spec)) == []


async def test_neither_trainers_nor_kills_show_in_the_bits(tmp_path):
    script = write_script(tmp_path, scheduler=scheduler("step"))
    values = {**PER_EPOCH, "lanes": 4, "global_batch_size": 12, "records_per_task": 6, "pservers": 2}
    alone = await trained(spec_for(script, **values, storage=str(tmp_path / "alone")))
    async with cluster(spec_for(script, **values), 3) as made:
        await made.version(3)
        await made.kill("trainer-0-x")
        await made.version(9)
        made.add_trainer("trainer-3-x")
        await made.version(12)
        await made.kill("trainer-1-x")
        assert (await made.ended()).phase is Phase.COMPLETED
        assert differing(made.exported(), alone) == []


async def test_the_rate_changes_with_the_first_step_of_an_epoch(tmp_path):
    script = write_script(tmp_path, scheduler=scheduler("step").replace("step_size=2", "step_size=1"))
    spec = spec_for(script, schedule_per="epoch", lanes=4, global_batch_size=12, records_per_task=6, epochs=3)
    steps, seen = {}, 0
    async with cluster(spec, 2) as made:
        while not made.directory.state or not made.directory.state.phase.final:
            store = made.pservers[0].store
            for version in range(seen, store.highest + 1 if store else 0):
                seen = version
                if (record := store.history.record(version)) is not None and record.result is not None:
                    steps[record.result.step] = record.result.epoch, record.result.lr[0]
            await made.directory.changed(made.directory.revision, 0.01)
    assert len(steps) > 10
    assert dict(steps.values()) == pytest.approx({0: 0.1, 1: 0.03, 2: 0.009})
    assert len({*steps.values()}) == 3


def test_a_plateau_follows_evaluations_one_evaluation_later(tmp_path):
    """As a loop written by hand does it that evaluates each 3rd version and tells the scheduler at the next
    one."""
    plateau = "torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.02)"
    script = write_script(
        tmp_path,
        scheduler=f"def scheduler(optimizer):\n    return {plateau}\n",
        evaluation="def evaluation_dataset():\n    return dataset()\n",
    )
    spec = spec_for(
        script, evaluate_every=3, plateau_metric="loss", epochs=4, evaluation_dataset=spec_for(script).dataset
    )
    result = run(load(script), spec)
    values = [done.metrics["loss"] for done in result.evaluations]
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    by_hand = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.02)
    rates = {}
    for number, value in enumerate(values[:-1], 2):  # told at evaluation `number`
        by_hand.step(value)
        rates[3 * number] = optimizer.param_groups[0]["lr"]
    assert 1 < len({*rates.values()}) < len(rates)
    assert differing(dict(result.model.state_dict()), train_plainly(script, spec, rates=rates)) == []


@pytest.mark.parametrize("has", [True, False])
async def test_it_is_told_where_an_asynchronous_schedule_counts_more_pushes_than_are_made(tmp_path, has):
    """Tasks of 3, 3 and 2 minibatches."""
    more = {"scheduler": scheduler("step")} if has else {}
    script = write_script(tmp_path, **more)
    async with cluster(spec_for(script, mode="async", epochs=1, records_per_task=24), 1) as made:
        assert (await made.ended()).phase is Phase.COMPLETED
        events = made.master.events.after(0, 1000)
    told = [event.message for event in events if event.name == "warning"]
    assert [text for text in told if "schedule counts 3 for each task" in text] == told[: int(has)]
    assert len(told) == int(has)
