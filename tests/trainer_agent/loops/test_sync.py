"""Synchronous training gives the bits of plain PyTorch with one lane, and the same bits whoever computes the
lanes."""

from __future__ import annotations

import asyncio

import pytest
import torch

from tests.trainer_agent.cluster import cluster, trained
from tests.trainer_agent.scripts import differing, spec_for, train_plainly, write_script
from trainer_agent.script.user_module import load
from trireme.plain import run
from trireme_shared.protocol.records import Phase

OPTIMIZERS = {
    "sgd": "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)",
    "adam": "torch.optim.Adam(model.parameters(), lr=0.01)",
    "adamw": "torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)",
    "lion": "trireme.optim.Lion(model.parameters(), lr=0.01, weight_decay=0.1)",
    "adagrad": "torch.optim.Adagrad(model.parameters(), lr=0.05)",
}
SCHEDULERS = {
    "step": "torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 3, 9], 0.5)",
    "one_cycle": "torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=16)",
    "chained": "torch.optim.lr_scheduler.SequentialLR(optimizer, ["
    "torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4), "
    "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)], [4])",
}


def returning(hook: str, argument: str, expression: str) -> str:
    return f"def {hook}({argument}):\n    return {expression}\n"


@pytest.mark.parametrize("name", list(OPTIMIZERS))
async def test_one_lane_gives_the_bits_of_plain_pytorch(tmp_path, name):
    script = write_script(tmp_path, optimizer=returning("optimizer", "model", OPTIMIZERS[name]))
    spec = spec_for(script)
    assert differing(await trained(spec), train_plainly(script, spec)) == []


@pytest.mark.filterwarnings("ignore:The epoch parameter")  # torch 2.6 warns of its own call
@pytest.mark.parametrize("name", list(SCHEDULERS))
async def test_a_scheduler_steps_as_in_plain_pytorch(tmp_path, name):
    script = write_script(tmp_path, scheduler=returning("scheduler", "optimizer", SCHEDULERS[name]))
    spec = spec_for(script)
    assert differing(await trained(spec), train_plainly(script, spec)) == []


async def test_clipping_is_that_of_plain_pytorch(tmp_path):
    script = write_script(tmp_path)
    spec = spec_for(script, clip_lane_norm=0.5)
    clipped = train_plainly(script, spec)
    assert differing(await trained(spec), clipped) == []
    assert differing(train_plainly(script, spec_for(script)), clipped) != []


async def test_clipping_counts_the_optimizers_parameters_alone_as_in_one_process(tmp_path):
    """Others may have gradients too, which nobody sets to zero: their norm would grow from step to step."""
    script = write_script(
        tmp_path, optimizer=returning("optimizer", "model", "torch.optim.SGD(model[4:].parameters(), lr=0.1)")
    )
    spec = spec_for(script, clip_lane_norm=0.05)
    assert differing(await trained(spec), dict(run(load(script), spec).model.state_dict())) == []


@pytest.mark.parametrize("on_nonfinite", ["fail", "ignore"])
async def test_sparse_gradients_are_clipped_and_stepped_as_in_one_process(tmp_path, on_nonfinite):
    script = write_script(
        tmp_path,
        model="""
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.table, self.leave = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 3)

            def forward(self, x):
                return self.leave(self.table((x[:, 0].abs() * 3).long().clamp(max=8)))

        def model():
            return Net()
        """,
        optimizer=returning("optimizer", "model", "torch.optim.Adam(model.parameters(), lr=0.05)"),
    )
    spec = spec_for(script, clip_lane_norm=0.05, on_nonfinite=on_nonfinite)
    assert differing(await trained(spec), dict(run(load(script), spec).model.state_dict())) == []


async def test_groups_of_options_and_tied_weights_are_those_of_plain_pytorch(tmp_path):
    script = write_script(
        tmp_path,
        model="""
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.enter, self.inner = nn.Linear(5, 8), nn.Linear(8, 8)
                self.again, self.leave = nn.Linear(8, 8), nn.Linear(8, 3)
                self.again.weight = self.inner.weight

            def forward(self, x):
                return self.leave(self.again(self.inner(self.enter(x)).relu()).relu())

        def model():
            return Net()
        """,
        optimizer="""
        def optimizer(model):
            decayed = [p for p in model.parameters() if p.ndim > 1]
            plain = [p for p in model.parameters() if p.ndim == 1]
            groups = [{"params": decayed, "lr": 0.02}, {"params": plain, "weight_decay": 0.0}]
            return torch.optim.AdamW(groups, lr=0.01)
        """,
    )
    spec = spec_for(script)
    assert differing(await trained(spec), train_plainly(script, spec)) == []


async def test_the_lanes_owners_and_the_parameter_servers_do_not_show_in_the_bits(tmp_path):
    script = write_script(tmp_path)
    found = {}
    for trainers, pservers in ((1, 1), (2, 3), (3, 1), (5, 2)):
        spec = spec_for(
            script,
            lanes=8,
            global_batch_size=24,
            records_per_task=5,
            pservers=pservers,
            storage=str(tmp_path / f"{trainers}"),
        )
        found[trainers] = await trained(spec, trainers)
    assert [differing(found[1], found[trainers]) for trainers in (2, 3, 5)] == [[], [], []]


async def test_a_killed_trainer_and_a_new_one_do_not_show_in_the_bits(tmp_path):
    script = write_script(tmp_path, scheduler=returning("scheduler", "optimizer", SCHEDULERS["step"]))
    common = {"lanes": 4, "global_batch_size": 12, "records_per_task": 6, "pservers": 2, "epochs": 4}
    undisturbed = await trained(spec_for(script, **common, storage=str(tmp_path / "a")), 2)
    async with cluster(spec_for(script, **common, storage=str(tmp_path / "b")), 2) as made:
        await made.version(3)
        await made.kill("trainer-0-x")  # owner of lane 0, in the middle of something
        await made.version(6)
        made.add_trainer("trainer-2-x")
        await made.version(9)
        await made.kill("trainer-1-x")
        assert (await made.ended()).phase is Phase.COMPLETED
        assert differing(undisturbed, made.exported()) == []


async def test_training_goes_on_with_the_tasks_at_hand_while_the_master_is_away(tmp_path):
    script = write_script(tmp_path)
    common = {"lanes": 2, "global_batch_size": 4, "records_per_task": 12, "epochs": 2}
    undisturbed = await trained(spec_for(script, **common, storage=str(tmp_path / "a")))
    async with cluster(spec_for(script, **common, storage=str(tmp_path / "b")), 2) as made:
        await made.version(1)
        made.port.away = True
        await made.version(6)
        await asyncio.sleep(0.3)
        made.port.away = False
        assert (await made.ended()).phase is Phase.COMPLETED
        assert differing(undisturbed, made.exported()) == []


async def test_the_end_of_training_is_announced_for_a_lane_that_is_its_trainers_now(tmp_path):
    """The master is told of no finished task, and all lanes move between the last version and the
    announcement."""
    common = {"lanes": 2, "global_batch_size": 4, "records_per_task": 30, "epochs": 1}
    script = write_script(tmp_path)
    undisturbed = await trained(spec_for(script, **common, storage=str(tmp_path / "a")))
    async with cluster(spec_for(script, **common, storage=str(tmp_path / "b")), 2) as made:
        await made.version(1)
        made.port.away = True
        await made.version(15)
        await made.kill("trainer-0-x")
        made.add_trainer("trainer-2-x")
        await made.directory.wait_for(
            lambda view: view.trainers.lanes_of("trainer-1-x") == (0, 1) and "trainer-2-x" in view.trainers,
            50.0,
            "lane 0 to move to trainer-1-x, which had lane 1",
        )
        made.port.away = False
        assert (await made.ended(20.0)).phase is Phase.COMPLETED
        assert differing(undisturbed, made.exported()) == []


async def test_a_trainer_asked_to_stop_leaves_with_code_0_and_the_others_finish(tmp_path):
    script = write_script(tmp_path)
    common = {"lanes": 2, "global_batch_size": 4, "records_per_task": 8, "epochs": 3}
    async with cluster(spec_for(script, **common), 2) as made:
        await made.version(2)
        made.stopping["trainer-0-x"].set()
        async with asyncio.timeout(5):
            assert await made.running["trainer-0-x"] == 0
        assert await made.etcd.get(made.keys.trainer("trainer-0-x")) is None
        assert (await made.ended()).phase is Phase.COMPLETED
        async with asyncio.timeout(5):
            assert await made.running["trainer-1-x"] == 0


async def test_a_trainer_asked_to_stop_does_not_wait_for_parameter_servers_that_have_left(tmp_path):
    """A job that is paused: its parameter servers leave at once, so nothing can be handed over."""
    script = write_script(tmp_path)
    common = {"lanes": 2, "global_batch_size": 4, "records_per_task": 8, "epochs": 300}
    async with cluster(spec_for(script, **common), 2) as made:
        await made.version(2)
        await made.stop_master()
        for pserver in made.pservers:
            await made.etcd.delete(made.keys.pserver(pserver.index))
        await made.directory.wait_for(lambda view: not view.pservers, 5.0, "no parameter servers")
        await asyncio.sleep(0.3)  # by then each of them is in the middle of a step that nobody takes
        made.stopping["trainer-0-x"].set()
        async with asyncio.timeout(5):  # it would wait for 10 s
            assert await made.running["trainer-0-x"] == 0


async def test_an_exported_model_is_loaded_by_plain_pytorch_and_scored_by_the_users_metrics(tmp_path):
    from safetensors.torch import load_file

    from trainer_agent.script.user_module import load

    script = write_script(
        tmp_path,
        evaluation="""
        def evaluation_dataset():
            return dataset()

        def evaluate(model, batch):
            assert not model.training
            return {"right": (model(batch["x"]).argmax(1) == batch["y"]).sum(), "records": len(batch["y"])}

        def metrics(sums):
            return {"accuracy": sums["right"] / sums["records"]}
        """,
    )
    spec = spec_for(script, lanes=2, evaluation_dataset=spec_for(script).dataset)
    async with cluster(spec, 2) as made:
        state = await made.ended()
        model = load(script).call("model")
        model.load_state_dict(made.exported())
        held = load_file(state.result.exports["safetensors"])
        assert differing(made.exported(), {name: held[name] for name in made.exported()}) == []
    import numpy as np

    x, y = torch.from_numpy(np.load(tmp_path / "x.npy")), torch.from_numpy(np.load(tmp_path / "y.npy"))
    right = (model.eval()(x).argmax(1) == y).sum().item()
    assert state.result.metrics == {"accuracy": right / len(y)}
