"""A model that is another one than was laid out is refused, by name."""

from __future__ import annotations

import pytest
import torch

from tests.trainer_agent.cluster import cluster
from tests.trainer_agent.collective.cluster import cluster as collective_cluster
from tests.trainer_agent.done_blocks import DoneBlocks
from tests.trainer_agent.scripts import records, spec_for, write_script
from trainer_agent.model.flat import plan
from trainer_agent.model.watch.unshared_state import FIRST_LOOKS, KeptModel
from trainer_agent.script.user_module import load
from trireme.plain import run
from trireme_shared.protocol.errors import UserCodeError
from trireme_shared.protocol.records import Phase

MODEL = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(5, 8), nn.Linear(8, 3)
        self.body.requires_grad_(False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        return self.head(torch.relu(self.body(x)))

def model():
    return Model()
"""
LOSS = """
def loss(model, batch):
    if model.training:
        model.steps += 1
    if model.steps > AFTER:
        CHANGE
    return F.cross_entropy(model(batch["x"]), batch["y"])
"""
COUNTED = "seen = []\n" + LOSS.replace("model.steps += 1", "seen.append(1)").replace(
    "model.steps > AFTER", "len(seen) > 1"
)
THAWED = (
    r"changed requires_grad of the parameter body\.weight: it was False when training began, and now "
    r"it is True; .*the optimizer does not hold it .*in a second job"
)
HEAD_ALONE = "def optimizer(model):\n    return torch.optim.SGD(model.head.parameters(), lr=0.1)\n"
CHANGES = {
    "thawed": ("model.body.requires_grad_(True)", THAWED),
    "another layer": ("model.head = nn.Linear(8, 3)", r"the parameter head\.weight was replaced"),
    "another parameter": (
        "model.head.bias = nn.Parameter(torch.zeros(3))",
        r"the parameter head\.bias was replaced",
    ),
    "a layer more": ("model.more = nn.Linear(2, 2)", r"the parameter more\.weight was added"),
    "a layer less": ("model.head.bias = None", r"the parameter head\.bias was taken away"),
    "a buffer more": ("model.register_buffer('seen', torch.ones(()))", "the buffer seen was added"),
    "parametrized": (
        "hasattr(model.head, 'parametrizations') or nn.utils.parametrizations.weight_norm(model.head)",
        r"the parameter head\.weight was taken away",
    ),
    "pruned": (
        "__import__('torch.nn.utils.prune').nn.utils.prune.l1_unstructured(model.head, 'weight', 0.5)",
        r"the parameter head\.weight was taken away",
    ),
    "other memory": (
        "model.head.weight.data = model.head.weight.data.clone()",
        r"changed the parameter head\.weight",
    ),
    "another dtype": ("model.half().float()", r"changed the parameter (body|head)\."),
}


@pytest.mark.parametrize("name", list(CHANGES))
async def test_what_the_script_changes_of_its_model_is_refused_with_the_name(build, tmp_path, name):
    change, message = CHANGES[name]
    loss = COUNTED.replace("CHANGE", change)
    compute = build(model=MODEL, loss=loss, optimizer=HEAD_ALONE)
    with pytest.raises(UserCodeError, match=message) as caught:
        for number in range(FIRST_LOOKS):
            compute.forget_nodes()
            await compute.gradient((0, 1), 0, number, records(8, number), DoneBlocks())
    assert caught.value.details["fatal"]
    script = write_script(tmp_path, "alone", model=MODEL, loss=loss, optimizer=HEAD_ALONE)
    with pytest.raises(UserCodeError, match=message):
        run(load(script), spec_for(script))


@pytest.mark.parametrize("strategy", ["parameter_server", "collective"])
async def test_a_thawed_parameter_that_the_optimizer_lacks_fails_a_job_at_once(tmp_path, strategy):
    loss = LOSS.replace("AFTER", "5").replace("CHANGE", "model.body.requires_grad_(True)")
    script = write_script(tmp_path, model=MODEL, loss=loss, optimizer=HEAD_ALONE)
    spec = spec_for(script, strategy=strategy, pservers=int(strategy == "parameter_server"), lanes=2)
    async with (cluster if strategy == "parameter_server" else collective_cluster)(spec, 2) as made:
        state = await made.ended()
    assert state.phase is Phase.FAILED
    assert state.failure.message.startswith(
        "loss(model, batch) changed requires_grad of the parameter body.weight"
    )
    assert ", step 5, lane " in state.failure.task


async def test_a_change_behind_the_first_minibatches_is_noticed_at_the_end(tmp_path):
    """Names are compared in some minibatches only, and before the model is exported."""
    script = write_script(
        tmp_path,
        model=MODEL,
        loss=LOSS.replace("AFTER", "5").replace("CHANGE", "model.more = nn.Linear(2, 2)"),
    )
    async with cluster(spec_for(script), 1) as made:
        state = await made.ended()
    assert (state.phase, state.failure.message.split(";")[0]) == (
        Phase.FAILED,
        "the script changed the model: the parameter more.weight was added since training began",
    )
    with pytest.raises(UserCodeError, match=r"the parameter more\.weight was added"):
        run(load(script), spec_for(script))


async def test_modules_that_the_first_forward_makes_are_left_alone(build):
    lazily = "if not hasattr(model, 'act'): model.act = nn.GELU()"
    compute = build(model=MODEL, loss=LOSS.replace("AFTER", "0").replace("CHANGE", lazily))
    for number in range(FIRST_LOOKS):
        compute.forget_nodes()
        await compute.gradient((0, 1), 0, number, records(8, number), DoneBlocks())
    compute.model.act = torch.nn.ReLU()
    with pytest.raises(UserCodeError, match="the module act was replaced"):
        compute.minibatch.check_at_end()


async def test_an_asynchronous_job_refuses_what_thaws(build):
    loss = LOSS.replace("AFTER", "0").replace("CHANGE", "model.body.requires_grad_(True)")
    compute = build({"mode": "async"}, model=MODEL, loss=loss)
    with pytest.raises(UserCodeError, match=r"of the parameter body\.weight: .* or use mode sync"):
        await compute.gradient((0, 1), 0, 0, records(8, 0), DoneBlocks())


def test_a_parameter_that_lost_its_end_is_another_one(tmp_path) -> None:
    """It lies where it lay before, nothing was written, and what is left has the same numbers."""
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = KeptModel(model, plan(model, optimizer, 1024, 8), load(write_script(tmp_path)))
    assert not kept.change(fully=True)
    model.bias.data = model.bias.data[:2]
    assert "the parameter bias was replaced" in kept.change(fully=True)
