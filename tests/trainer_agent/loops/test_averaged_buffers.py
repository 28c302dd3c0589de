"""Buffers that hold no statistics, and whose mean over lanes is taken all the same, are told by name;
statistics never are."""

from __future__ import annotations

import pytest
import torch

from tests.trainer_agent.cluster import cluster
from tests.trainer_agent.collective.cluster import cluster as collective_cluster
from tests.trainer_agent.done_blocks import DoneBlocks
from tests.trainer_agent.scripts import records, spec_for, write_script
from trireme_shared.protocol.records import Phase

MODEL = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 3)
        INIT

    def forward(self, x):
        h = torch.relu(self.body(x))
        FORWARD
        return self.head(h)

def model():
    return Model()
"""
NO_STATISTICS = {
    "queue": (  # MoCo
        (
            "self.register_buffer('queue', F.normalize(torch.randn(16, WIDTH), dim=1))\n"
            "self.register_buffer('at', torch.zeros((), dtype=torch.int64))"
        ),
        (
            "keys, first = F.normalize(h.detach() + 0.01, dim=1), int(self.at) % 16\n"
            "self.queue[[(first + n) % 16 for n in range(len(keys))]] = keys\n"
            "self.at += len(keys)"
        ),
    ),
    "codebook": (  # of a VQ-VAE, by moving averages
        (
            "self.register_buffer('codebook', torch.randn(4, WIDTH))\n"
            "self.register_buffer('used', torch.ones(4))\n"
            "self.register_buffer('sums', self.codebook.clone())"
        ),
        (
            "hot = F.one_hot(torch.cdist(h.detach(), self.codebook).argmin(1), 4).float()\n"
            "self.used.mul_(0.9).add_(hot.sum(0), alpha=0.1)\n"
            "self.sums.mul_(0.9).add_(hot.t() @ h.detach(), alpha=0.1)\n"
            "self.codebook = self.sums / self.used.clamp(min=1e-3)[:, None]"
        ),
    ),
    "quantile": (
        "self.register_buffer('quantile', torch.zeros(()))",
        (
            "self.quantile.add_(torch.sign(h.detach().mean() - self.quantile), alpha=0.05 * "
            "float(h.detach().max()))"
        ),
    ),
    "hidden": (
        "self.register_buffer('hidden', torch.zeros(WIDTH))",
        "self.hidden = torch.tanh(self.hidden + h.detach().mean(0))",
    ),
}
STATISTICS = {
    "batch norm": ("self.norm = nn.BatchNorm1d(WIDTH)", "h = self.norm(h)"),
    "batch norm, cumulative": ("self.norm = nn.BatchNorm1d(WIDTH, momentum=None)", "h = self.norm(h)"),
    "batch norm, fast": ("self.norm = nn.BatchNorm1d(WIDTH, momentum=1.0)", "h = self.norm(h)"),
    "instance norm": (
        "self.norm = nn.InstanceNorm1d(1, track_running_stats=True)",
        "h = self.norm(h.view(len(h), 1, -1)).flatten(1)",
    ),
    "its own norm": (
        "self.register_buffer('running_mean', torch.zeros(WIDTH))",
        "self.running_mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)",
    ),
    "a copy of parameters": (
        "self.register_buffer('slow', self.body.weight.detach().clone())",
        "self.slow.mul_(0.9).add_(self.body.weight.detach(), alpha=0.1)",
    ),
    "constants": (
        "self.register_buffer('mask', torch.full((WIDTH,), float('-inf')))",
        "h = h + 0 * self.mask.exp()",
    ),
}


def model_with(init, forward, width=8):
    def indented(text):
        return text.replace("\n", "\n        ")

    text = MODEL.replace("INIT", indented(init)).replace("FORWARD", indented(forward))
    return text.replace("WIDTH", str(width))


async def warnings_of(spec, trainers, make=cluster):
    async with make(spec, trainers) as made:
        state = await made.ended()
        assert state.phase is Phase.COMPLETED, state
        return [event.message for event in made.master.events.after(0, 1000) if event.name == "warning"]


@pytest.mark.parametrize("name", list(NO_STATISTICS))
async def test_a_buffer_that_holds_no_statistics_is_told_once(tmp_path, name):
    script = write_script(tmp_path, model=model_with(*NO_STATISTICS[name]))
    told = [
        text
        for text in await warnings_of(spec_for(script, lanes=4, epochs=1, global_batch_size=16), 2)
        if f"buffer {name} " in text
    ]
    assert len(told) == 1
    assert "differs between lanes" in told[0]
    assert f'buffers = {{"{name}": "first"}}' in told[0]


@pytest.mark.parametrize(
    ("make", "values"), [(cluster, {}), (collective_cluster, {"strategy": "collective", "pservers": 0})]
)
async def test_trainers_with_one_lane_each_find_it_in_the_next_version(tmp_path, make, values):
    script = write_script(tmp_path, model=model_with(*NO_STATISTICS["queue"]))
    (told,) = await warnings_of(spec_for(script, lanes=2, epochs=1, **values), 2, make)
    assert "the buffer queue differs between lanes" in told


@pytest.mark.parametrize(("lanes", "told"), [(4, [0, 1, 0, 0] + [0] * 4), (1, [0, 0])])
async def test_lanes_of_one_trainer_are_compared_at_once_and_one_lane_has_nothing_to_differ_from(
    build, lanes, told
):
    """Also where the next version is another one, as in asynchronous jobs of several trainers."""
    compute, found = build({"lanes": lanes}, model=model_with(*NO_STATISTICS["hidden"])), []
    for step in range(2):
        compute.forget_nodes()
        compute.begin_step()
        for lane in range(lanes):
            result = await compute.gradient((0, lanes), lane, lane, records(4, step * lanes + lane), bool)
            found.append(len(result.warnings))
        another_version(compute)
    assert found == told


@pytest.mark.parametrize("width", [2, 8, 64])
@pytest.mark.parametrize("name", list(STATISTICS))
async def test_statistics_are_never_told(build, name, width):
    """Also those of tiny minibatches, which differ most."""
    compute = build({"lanes": 4}, model=model_with(*STATISTICS[name], width))
    for step in range(20):  # 80 minibatches: three and one are looked at
        compute.forget_nodes()
        compute.begin_step()
        for lane in range(4):
            found = await compute.gradient(
                (0, 4), lane, step * 4 + lane, records(2, step * 4 + lane), DoneBlocks()
            )
            assert found.warnings == ()
        pulled(compute)


def pulled(compute):
    """The next version has the mean of the buffers, as parameter servers would give it."""
    for block in compute.plan.blocks:
        mean = compute.contribution((0, 4), block.number)
        if compute.layout.segments[block.segment].kind == "buffer" and len(mean):
            compute.staging(block.number)[:] = mean
        else:
            compute.keep(block.number)
    compute.swap()


def another_version(compute):
    """The next version has buffers that are no lane's."""
    for block in compute.plan.blocks:
        compute.keep(block.number)
        if compute.layout.segments[block.segment].kind == "buffer":
            torch.frombuffer(compute.staging(block.number), dtype=torch.float32).add_(1)
    compute.swap()


async def test_what_was_left_out_or_belongs_to_another_history_is_not_compared(build):
    """A lane with a loss that is not finite; a step that was left out; a trainer that joins again."""
    model = model_with(*NO_STATISTICS["hidden"])
    loss = (
        "def loss(model, batch):\n"
        "    return model(batch['x']).mean() * (float('nan') if len(batch['x']) == 3 else 1)\n"
    )
    compute = build({"lanes": 2, "on_nonfinite": "skip"}, model=model, loss=loss)
    told = []

    async def step(number, *sizes, then):
        compute.forget_nodes()
        compute.begin_step()
        for lane, size in enumerate(sizes):
            told.extend(
                (
                    await compute.gradient(
                        (lane, lane + 1), lane, number, records(size, number), DoneBlocks()
                    )
                ).warnings
            )
        then()

    def nothing():
        for block in compute.plan.blocks:
            compute.keep(block.number)
        compute.swap()

    def another():
        another_version(compute)
        compute.restore(compute.initial_lane_zero())

    await step(0, 3, then=another)
    await step(1, 4, then=nothing)
    await step(2, 4, then=another)
    await step(3, 4, then=nothing)
    assert told == []
