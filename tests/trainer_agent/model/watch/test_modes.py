"""Modules keep the mode that model() gave them, and a mode that changes from minibatch to minibatch is
refused."""

from __future__ import annotations

import pytest

from tests.trainer_agent.cluster import trained
from tests.trainer_agent.collective.cluster import trained as trained_collectively
from tests.trainer_agent.done_blocks import DoneBlocks
from tests.trainer_agent.scripts import differing, records, spec_for, write_script
from trainer_agent.script.user_module import load
from trireme import plain
from trireme_shared.protocol.errors import UserCodeError

FROZEN = """
def model():
    made = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    made[1].requires_grad_(False).eval()
    return made
"""
MOVES = """
seen = []
def loss(model, batch):
    seen.append(1)
    MOVE
    return F.cross_entropy(model(batch["x"]), batch["y"])
"""


async def minibatches(compute, count):
    """The warnings."""
    told = []
    for number in range(count):
        compute.forget_nodes()
        told += (await compute.gradient((0, 1), 0, number, records(8, number), DoneBlocks())).warnings
    return told


@pytest.mark.parametrize("strategy", ["parameter_server", "collective"])
async def test_a_layer_in_evaluation_mode_stays_in_it_while_the_model_is_trained(tmp_path, strategy):
    script = write_script(tmp_path, model=FROZEN)
    spec = spec_for(script, strategy=strategy, pservers=int(strategy == "parameter_server"))
    found = await (trained if strategy == "parameter_server" else trained_collectively)(spec)
    assert (int(found["1.num_batches_tracked"]), float(found["1.running_mean"].abs().max())) == (0, 0.0)
    said = []
    alone = plain.run(load(script), spec_for(script), said.append)
    assert differing(found, alone.model.state_dict()) == []
    assert (
        said[0]
        == "model() left these modules in evaluation mode, and they stay in it while the model is trained: 1"
    )


def test_a_whole_model_in_evaluation_mode_is_trained_in_training_mode_and_that_is_told(tmp_path):
    script = write_script(
        tmp_path, model=FROZEN.replace("made[1].requires_grad_(False).eval()", "made.eval()")
    )
    said = []
    alone = plain.run(load(script), spec_for(script), said.append)
    assert int(alone.model.state_dict()["1.num_batches_tracked"]) == alone.steps
    assert said[0].startswith("model() returned a model in evaluation mode; it is trained in training mode")


async def test_a_loss_that_sets_the_same_modes_each_time_is_trained(build):
    compute = build(model=FROZEN, loss=MOVES.replace("MOVE", "model.eval()\n    model[3].train()"))
    await minibatches(compute, 3)
    assert not compute.model[2].training


LEFT = (
    "loss(model, batch) leaves 1 in training mode; every minibatch begins with it in evaluation mode, "
    "as model() says"
)


@pytest.mark.parametrize(
    ("restored", "told"), [("model.train()", LEFT), ("model.train(); model[1].eval()", None)]
)
async def test_a_mode_that_loss_leaves_is_undone_and_told(build, tmp_path, restored, told):
    of_loss = MOVES.replace("MOVE", f"model.eval(); model(batch['x']); {restored}")
    parts = {
        "model": FROZEN,
        "loss": of_loss.replace("return ", "value = ").rstrip() + f"\n    {restored}\n    return value\n",
    }
    compute = build(**parts)
    warnings, said = await minibatches(compute, 3), []
    plain.run(load(script := write_script(tmp_path, "alone", **parts)), spec_for(script), said.append)
    for texts in (warnings, said):
        assert [text[: len(LEFT)] for text in texts if "leaves" in text] == ([told] if told else [])


@pytest.mark.parametrize("move", ["if len(seen) == 3: model[2].eval()", "model[2].train(len(seen) < 3)"])
async def test_a_mode_that_changes_over_minibatches_is_refused(build, tmp_path, move):
    message = (
        "forward had 2 in evaluation mode, and in an earlier minibatch it was in training mode; "
        "trainers do not share modes"
    )
    parts = {"model": FROZEN, "loss": MOVES.replace("MOVE", move)}
    compute = build(**parts)
    await minibatches(compute, 2)
    with pytest.raises(UserCodeError, match=message) as caught:
        await minibatches(compute, 1)
    assert caught.value.details["fatal"]
    script = write_script(tmp_path, "alone", **parts)
    with pytest.raises(UserCodeError, match=message):
        plain.run(load(script), spec_for(script))
