"""`trireme.nn.Ema`: averages of parameters that follow after each step, whoever computes it, and that are
evaluated, exported and in checkpoints."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.equipment.replaced import replaced
from tests.trainer_agent.cluster import cluster, trained_in
from tests.trainer_agent.collective.cluster import cluster as collective_cluster
from tests.trainer_agent.scripts import differing, spec_for, train_plainly, write_script
from trainer_agent.model.averages import Ema, averages_of, begin_apart
from trainer_agent.script.user_module import load
from trireme.plain import plain_spec, run
from trireme_shared.protocol.errors import InvalidArgument

BODY = """
def body():
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
"""
MODEL = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = body()
        self.ema = trireme.nn.Ema(self.body, 0.9)

    def forward(self, x):
        return self.body(x) if self.training else self.ema(x)

def model():
    return Model()
"""
# torch's own averages of the same model. It counts as updated once, for its first update copies.
BY_TORCH = """
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

averaged = []

def model():
    return body()

def optimizer(model):
    made = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    averaged.append(AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)))
    averaged[0].n_averaged += 1
    made.register_step_post_hook(lambda *_: averaged[0].update_parameters(model))
    return made
"""
COLLECTIVE = {"strategy": "collective", "pservers": 0}
WAYS = [(cluster, {}), (collective_cluster, COLLECTIVE)]


def written(folder):
    return write_script(folder, model=BODY + MODEL)


def by_torch(folder, spec):
    """The names and values that a job exports, of plain PyTorch with torch's own averages."""
    script = write_script(folder, "by_torch", model=BODY, optimizer=BY_TORCH)
    try:
        body = train_plainly(script, spec)
        (averaged,) = sys.modules["by_torch"].averaged
    finally:
        del sys.modules["by_torch"]
    averages = dict(averaged.module.named_parameters())
    values = {f"body.{name}": value for name, value in body.items()}
    return values | {f"ema.module.{name}": averages.get(name, value) for name, value in body.items()}


@pytest.mark.parametrize(("make", "values"), WAYS, ids=["pservers", "collective"])
async def test_with_one_lane_they_have_the_bits_of_torchs_averages(tmp_path, make, values):
    """With those of the last step. Buffers of the module are copied."""
    script = written(tmp_path)
    spec = spec_for(script, epochs=1, **values)
    exported, _ = await trained_in(make, spec)
    expected = by_torch(tmp_path, spec)
    assert sorted(exported) == sorted(expected)
    assert differing({name: exported[name] for name in expected}, expected) == []


async def test_without_following_they_have_not(tmp_path):
    script = written(tmp_path)
    spec = spec_for(script, epochs=1)
    with replaced(Ema, "follow", lambda self: None):
        exported, _ = await trained_in(cluster, spec)
    assert "ema.module.0.weight" in differing(exported, dict.fromkeys(exported) | by_torch(tmp_path, spec))


async def test_with_four_lanes_they_do_not_depend_on_who_trains_and_are_evaluated(tmp_path):
    script, found = written(tmp_path), []
    for name, (make, values), trainers in (("a", WAYS[0], 1), ("b", WAYS[0], 3), ("c", WAYS[1], 2)):
        spec = spec_for(script, lanes=4, global_batch_size=16, storage=str(tmp_path / name), **values)
        spec = spec.with_fields(evaluation_dataset=spec.dataset)
        found.append(await trained_in(make, spec, trainers, death_at=4 if name == "b" else None))
    exported, metrics = found[0]
    assert [differing(exported, other) for other, _ in found[1:]] == [[], []]
    model = load(script).call("model")
    model.load_state_dict(exported)
    x, y = (torch.from_numpy(np.load(tmp_path / name)) for name in ("x.npy", "y.npy"))
    assert metrics["loss"] == pytest.approx(F.cross_entropy(model.eval()(x), y).item(), rel=1e-5)
    assert metrics["loss"] != pytest.approx(F.cross_entropy(model.body(x), y).item(), rel=1e-4)


async def test_a_step_that_is_left_out_does_not_move_them(tmp_path):
    """As in plain training, where the average follows only steps."""
    loss = (
        "def loss(model, batch):\n"
        "    found = F.cross_entropy(model(batch['x']), batch['y'])\n"
        "    return found * (float('nan') if float(batch['x'][0, 0]) > 0.5 else 1)\n"
    )
    script = write_script(tmp_path, model=BODY + MODEL, loss=loss)
    spec = spec_for(script, epochs=2, on_nonfinite="skip")
    exported, _ = await trained_in(cluster, spec)
    user = load(script)
    result = run(user, spec)
    assert result.records < spec.epochs * 60
    assert differing(exported, dict(result.model.state_dict())) == []


def test_plain_training_lets_them_follow(tmp_path):
    script = written(tmp_path)
    spec = spec_for(script, epochs=1)
    state = dict(run(load(script), spec).model.state_dict())
    assert differing(state, dict.fromkeys(state) | by_torch(tmp_path, spec)) == []


def test_parameters_that_two_modules_have_are_averaged_once():
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = module[0].weight
    ema = Ema(module, 0.5)
    assert list(ema.parameters()) == []
    assert [name for name, _ in ema.named_buffers()] == ["module.0.weight", "module.0.bias", "module.1.bias"]
    before = module[0].weight.detach().clone()
    with torch.no_grad():
        module[0].weight += 1
    ema.follow()
    assert torch.equal(ema.module[1].weight, before.lerp(before + 1, 0.5))


@pytest.mark.parametrize(
    ("module", "decay", "message"),
    [
        (nn.Linear(2, 2), 1.0, "Ema got decay = 1.0"),
        (nn.Linear(2, 2), "0.9", "Ema got decay = '0.9'"),
        (nn.ReLU(), 0.9, "Ema got ReLU, which has no parameters to average"),
        (nn.Sequential(nn.LSTM(2, 2)), 0.9, "Ema got a module with LSTM, which has weights that"),
    ],
)
def test_what_cannot_be_averaged_is_refused(module, decay, message):
    with pytest.raises(InvalidArgument) as raised:
        Ema(module, decay)
    assert raised.value.message.startswith(message)


OUTSIDE = """
kept = []

def model():
    made = nn.Linear(5, 3)
    kept.append(trireme.nn.Ema(made, 0.9))
    return made
"""


def test_one_that_is_no_part_of_the_model_is_refused(tmp_path, build):
    with pytest.raises(InvalidArgument, match="follows the model and is no part of it"):
        build(model=OUTSIDE)
    user = load(write_script(tmp_path, "plain", model=OUTSIDE))
    with pytest.raises(InvalidArgument, match="follows the model and is no part of it"):
        run(user, plain_spec(user, {}))


def test_asynchronous_jobs_refuse_them(build):
    with pytest.raises(InvalidArgument, match="the model has an Ema, and the job is asynchronous"):
        build({"mode": "async"}, model=BODY + MODEL)


def test_one_whose_module_has_lost_a_parameter_since_says_which():
    layer = nn.Linear(2, 2)
    average = Ema(layer, 0.9)
    torch.nn.utils.parametrizations.weight_norm(layer)
    with pytest.raises(InvalidArgument, match="an Ema has an average of weight, which its Parametrized"):
        average.follow()


def test_one_that_begins_with_other_values_than_its_module_is_told():
    model = nn.Sequential(nn.Linear(2, 2))
    model.append(Ema(model[0], 0.9))
    assert begin_apart(averages_of(model)) == ""
    nn.init.ones_(model[0].bias)
    assert begin_apart(averages_of(model)).startswith(
        "an Ema begins with another value of bias than its Linear has; "
    )
