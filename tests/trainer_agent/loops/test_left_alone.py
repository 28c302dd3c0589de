"""What requires a gradient may change at any step, and what no step has used is left alone: with one lane the
bits are plain PyTorch's, and a lane that freezes other parameters than the others is told by name."""

from __future__ import annotations

import pytest
import torch

from tests.trainer_agent.cluster import cluster, trained
from tests.trainer_agent.collective import cluster as collective
from tests.trainer_agent.scripts import differing, lane_batches, spec_for, train_plainly, write_script
from trainer_agent.script.user_module import load
from trireme.plain import run
from trireme_shared.protocol.lanes import combine, step_seed
from trireme_shared.protocol.records import Phase, Strategy

MODEL = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.middle, self.head = nn.Linear(5, 24), nn.Linear(24, 24), nn.Linear(24, 3)
        self.body.requires_grad_(False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        return self.head(torch.relu(self.middle(torch.relu(self.body(x)))))

def model():
    return Model()
"""
LOSS = """
def loss(model, batch):
    if model.training:
        model.steps += 1
    step = int(model.steps)
    {change}
    return F.cross_entropy(model(batch["x"]), batch["y"])
"""
CHANGES = {
    "thawed": "model.body.requires_grad_(step > 4)",
    "frozen": "model.head.bias.requires_grad_(step < 4)",
    "both ways": (
        "model.body.requires_grad_(step > 4)\n"
        "    model.head.bias.requires_grad_(not 3 < step < 9)\n"
        "    model.middle.requires_grad_(step % 5 > 1)"
    ),
    "once": "step == 6 and model.body.requires_grad_(True)",
    "thawed behind forward": (
        "value = F.cross_entropy(model(batch['x']), batch['y'])\n"
        "    step == 4 and model.body.requires_grad_(True)\n"
        "    return value"
    ),
    "frozen behind forward": (
        "value = F.cross_entropy(model(batch['x']), batch['y'])\n"
        "    step == 4 and model.middle.requires_grad_(False)\n"
        "    return value"
    ),
    "used late": (
        "hidden = torch.relu(model.body(batch['x']))\n"
        "    model.body.requires_grad_(step > 2)\n"
        "    hidden = torch.relu(model.middle(hidden)) if step > 6 else hidden\n"
        "    return F.cross_entropy(model.head(hidden), batch['y'])"
    ),
    "never used": "return F.cross_entropy(model.head(torch.relu(model.body(batch['x']))), batch['y'])",
    "never": "pass",
}
OF_LANES = {
    "used by some lanes": (
        "hidden = torch.relu(model.body(batch['x']))\n"
        "    hidden = torch.relu(model.middle(hidden)) if step > 4 and batch['x'][0, 0] > 0.3 else hidden\n"
        "    return F.cross_entropy(model.head(hidden), batch['y'])"
    ),
}
OPTIMIZERS = {
    "sgd": "SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01, dampening=0.1)",
    "adamw": "AdamW(model.parameters(), lr=0.01, weight_decay=0.1)",
    "fused": "Adam(model.parameters(), lr=0.01, weight_decay=0.1, fused=True)",
    "radam": "RAdam(model.parameters(), lr=0.01)",
    "nadam": "NAdam(model.parameters(), lr=0.01)",
    "adagrad": "Adagrad(model.parameters(), lr=0.01, weight_decay=0.1, initial_accumulator_value=0.1)",
}
ONE = {"epochs": 2, "block_bytes": 1024}
FOUR = {"lanes": 4, "global_batch_size": 12, "records_per_task": 6, "epochs": 4, "block_bytes": 1024}
WHOLE = {
    "lamb": "trireme.optim.LAMB(model.parameters(), lr=0.01, weight_decay=0.1)",
    "lars": "trireme.optim.LARS(model.parameters(), lr=0.1, weight_decay=0.1)",
}


def script_with(folder, change, optimizer="adamw", name="script"):
    made = WHOLE.get(optimizer) or f"torch.optim.{OPTIMIZERS[optimizer]}"
    text = f"import trireme.optim\ndef optimizer(model):\n    return {made}\n"
    loss = LOSS.format(change=(CHANGES | OF_LANES)[change])
    return write_script(folder, name, model=MODEL, loss=loss, optimizer=text)


@pytest.mark.parametrize(
    ("change", "optimizer"),
    [*((each, "adamw") for each in ("both ways", "once", "thawed behind forward")), ("used late", "sgd")],
)
async def test_one_lane_has_the_bits_of_plain_pytorch(tmp_path, change, optimizer):
    script = script_with(tmp_path, change, optimizer)
    spec = spec_for(script, pservers=2, **ONE)
    plain = train_plainly(script, spec)
    assert differing(dict(run(load(script), spec).model.state_dict()), plain) == []
    assert differing(await trained(spec), plain) == []
    ring = spec_for(script, strategy=Strategy.COLLECTIVE, pservers=0, **ONE, storage=str(tmp_path / "ring"))
    assert differing(await collective.trained(ring, 2), plain) == []


def trained_in_lanes(script, spec):
    """As plain PyTorch with the mean over the lanes: a parameter that has had no gradient in any lane yet has
    none, one that has had one has 0 in each lane without."""
    user = load(script)
    torch.set_num_threads(1)
    torch.manual_seed(spec.seed)
    model = user.call("model").train()
    optimizer = user.call("optimizer", model)
    parameters, begun = list(model.parameters()), set()
    for step, batches in enumerate(lane_batches(script, spec)):
        lanes = []
        for lane, batch in enumerate(batches):
            model.steps.fill_(step)
            optimizer.zero_grad()
            torch.manual_seed(step_seed(spec.seed, step, lane))
            user.call("loss", model, batch).backward()
            lanes.append([parameter.grad for parameter in parameters])
        for number, gradients in enumerate(zip(*lanes, strict=True)):
            begun |= {number} if any(each is not None for each in gradients) else set()
            nodes = [
                (torch.zeros_like(parameters[number]) if each is None else each, len(batch["y"]))
                for each, batch in zip(gradients, batches, strict=True)
            ]
            nodes += [(None, 0)] * (spec.lanes - len(nodes))
            while len(nodes) > 1:
                nodes = [combine(*left, *right) for left, right in zip(nodes[::2], nodes[1::2], strict=True)]
            parameters[number].grad = nodes[0][0] if number in begun else None
        optimizer.step()
    return {name: value for name, value in model.state_dict().items() if name != "steps"}


@pytest.mark.parametrize("strategy", list(Strategy))
async def test_a_step_has_the_gradients_of_those_lanes_that_have_any(tmp_path, strategy):
    script = script_with(tmp_path, "used by some lanes")
    servers = 2 * int(strategy is Strategy.PARAMETER_SERVER)
    spec = spec_for(script, **{**FOUR, "strategy": strategy, "pservers": servers})
    made = await (trained if servers else collective.trained)(spec, 2)
    made.pop("steps")
    assert differing(made, trained_in_lanes(script, spec)) == []


@pytest.mark.parametrize("change", ["both ways", "used by some lanes"])
async def test_trainers_that_die_and_join_do_not_show_in_the_bits(tmp_path, change):
    script = script_with(tmp_path, change)
    alone = await trained(spec_for(script, **FOUR, storage=str(tmp_path / "alone")), 1)
    for strategy, members in (
        (Strategy.PARAMETER_SERVER, cluster),
        (Strategy.COLLECTIVE, collective.cluster),
    ):
        servers = int(members is cluster)
        common = {**FOUR, "strategy": strategy, "pservers": servers, "storage": str(tmp_path / strategy)}
        async with members(spec_for(script, **common, trainers=2), 2) as made:
            await made.version(6)
            await made.kill("trainer-0-x")
            made.add_trainer("trainer-7-x")
            await made.version(11)
            await made.kill("trainer-1-x")
            assert (await made.ended()).phase is Phase.COMPLETED
            assert differing(alone, made.exported()) == []


async def test_lanes_that_disagree_are_told_with_the_name(tmp_path):
    script = write_script(
        tmp_path,
        model=MODEL,
        loss=LOSS.format(change="model.body.weight.requires_grad_(bool(batch['x'].sum() > 0))"),
    )
    ring = {"strategy": Strategy.COLLECTIVE, "pservers": 0}
    for trainers, members, how in (
        (1, cluster, {}),
        (2, cluster, {}),
        (2, collective.cluster, ring),
        (2, collective.cluster, {**ring, "exchange": "native"}),
    ):
        folder = tmp_path / f"{trainers}{len(how)}"
        spec = spec_for(script, **{**FOUR, **how, "trainers": trainers, "storage": str(folder)})
        async with members(spec, trainers) as made:
            state = await made.ended()
        assert state.phase is Phase.FAILED
        assert "the parameter body.weight requires a gradient" in state.failure.message


async def test_what_is_frozen_is_exported_in_full_though_it_travels_in_half(tmp_path):
    """Trainers compute with rounded parameters; the export takes none of them for want of a change."""
    script = script_with(tmp_path, "never")
    spec = spec_for(script, parameter_dtype="bfloat16", **ONE)
    body = load(script)
    torch.manual_seed(spec.seed)
    first = body.call("model").body.state_dict()
    made = await trained(spec)
    assert differing({name: made[f"body.{name}"] for name in first}, first) == []
