"""`clip_grad_norm` limits the norm of the whole step's gradient: that of plain PyTorch, and the same bits
whoever computes it."""

from __future__ import annotations

import math

import pytest
import torch

from master_service.core.state.series import WholeSteps
from tests.equipment.replaced import replaced
from tests.trainer_agent.cluster import cluster, trained
from tests.trainer_agent.done_blocks import DoneBlocks
from tests.trainer_agent.scripts import (
    differing,
    lane_batches,
    records,
    spec_for,
    train_plainly,
    write_script,
)
from trainer_agent.script.user_module import load
from trireme.plain import run
from trireme_shared.blocks.gradient_norm import clip_factor, norm_of, squares_of
from trireme_shared.platform.runtime import ids
from trireme_shared.protocol.records import Mode, Phase

WITHOUT_NOISE = """
    def model():
        return nn.Sequential(nn.Linear(5, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 3))
"""
GROUPS = """
    def optimizer(model):
        first, *rest = model.parameters()
        return torch.optim.SGD([{"params": rest}, {"params": [first], "lr": 0.05}], lr=0.1, momentum=0.9)
"""
ADAMW = "def optimizer(model):\n    return torch.optim.AdamW(model.parameters(), lr=0.01)\n"
LIMIT = 0.3


@pytest.mark.parametrize("optimizer", [GROUPS, ADAMW], ids=["groups", "adamw"])
async def test_one_lane_has_the_bits_of_plain_training(tmp_path, optimizer):
    script = write_script(tmp_path, optimizer=optimizer)
    spec = spec_for(script, clip_grad_norm=LIMIT, pservers=2)
    clipped = dict(run(load(script), spec).model.state_dict())
    assert differing(await trained(spec), clipped) == []
    assert differing(dict(run(load(script), spec_for(script)).model.state_dict()), clipped) != []


async def test_one_lane_is_that_of_plain_pytorch_but_for_the_order_of_the_norms_sum(tmp_path):
    script = write_script(tmp_path)
    ours = await trained(spec_for(script, clip_grad_norm=LIMIT))
    plain = train_plainly(script, spec_for(script, clip_lane_norm=LIMIT))
    for name, values in plain.items():
        torch.testing.assert_close(ours[name], values, rtol=1e-5, atol=1e-6)


def train_full_batches(script, spec) -> dict[str, torch.Tensor]:
    """Plain PyTorch on the records of all lanes at once."""
    user = load(script)
    torch.manual_seed(spec.seed)
    model = user.call("model")
    optimizer = user.call("optimizer", model)
    clipped = 0
    for batches in lane_batches(script, spec):
        optimizer.zero_grad()
        user.call(
            "loss", model, {name: torch.cat([batch[name] for batch in batches]) for name in "xy"}
        ).backward()
        clipped += torch.nn.utils.clip_grad_norm_(model.parameters(), spec.clip_grad_norm).item() > LIMIT
        optimizer.step()
    assert clipped > 5
    return dict(model.state_dict())


async def test_four_lanes_clip_as_plain_pytorch_does_on_the_full_batch(tmp_path):
    script = write_script(tmp_path, model=WITHOUT_NOISE)
    spec = spec_for(script, lanes=4, records_per_task=8, clip_grad_norm=LIMIT)
    ours, plain = await trained(spec, trainers=2), train_full_batches(script, spec)
    for name, values in plain.items():
        torch.testing.assert_close(ours[name], values, rtol=1e-4, atol=1e-5)
    by_lane = await trained(spec.model_copy(update={"clip_grad_norm": None, "clip_lane_norm": LIMIT}))
    assert any((by_lane[name] - values).abs().max() > 1e-3 for name, values in plain.items())


async def test_the_bits_do_not_depend_on_how_many_trainers_and_parameter_servers_there_are(tmp_path):
    script = write_script(tmp_path)
    found = []
    for trainers, pservers in ((1, 1), (2, 3), (4, 2)):
        storage = str(tmp_path / f"{trainers}")
        spec = spec_for(script, lanes=4, pservers=pservers, clip_grad_norm=LIMIT, storage=storage)
        found.append(await trained(spec, trainers))
    assert [differing(found[0], other) for other in found[1:]] == [[], []]


async def test_a_killed_trainer_changes_no_bit(tmp_path):
    script = write_script(tmp_path)
    spec = spec_for(script, lanes=4, pservers=2, clip_grad_norm=LIMIT)
    undisturbed = await trained(spec, trainers=1)
    async with cluster(spec, trainers=3) as made:
        await made.version(2)
        await made.kill("trainer-1-x")
        await made.version(4)
        made.add_trainer("trainer-3-x")
        assert (await made.ended()).phase is Phase.COMPLETED
        assert differing(made.exported(), undisturbed) == []
        norms = [pserver.store.history.record(pserver.store.lowest).grad_norm for pserver in made.pservers]
        assert norms[0] == norms[1]
        assert math.isfinite(norms[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("push_every", [1, 3])
async def test_an_asynchronous_trainer_clips_what_it_pushes(build, dtype, push_every):
    values = {"mode": "async", "push_every": push_every, "gradient_dtype": dtype}
    plain, clipping = build(values), build({**values, "clip_grad_norm": LIMIT})
    node, batches = (4, 4 + push_every), [records(4, number) for number in range(push_every)]
    vectors = []
    for compute in (plain, clipping):
        announced = DoneBlocks()
        for number, batch in zip(range(*node), batches, strict=True):
            await compute.gradient(node, number, number, batch, announced)
        assert sorted(announced) == list(range(len(compute.plan.blocks)))
        segments = compute.layout.segments
        vectors.append([compute.tree.slots[0].blocks[b.number].clone() for b in compute.plan.blocks])
        sent = [bytes(compute.contribution(node, b.number)) for b in compute.plan.blocks]
        assert all(sent[b.number] for b in compute.plan.blocks if segments[b.segment].kind == "param")
    trained = [b.number for b in plain.plan.blocks if plain.layout.segments[b.segment].kind == "param"]
    norm = norm_of(squares_of(vectors[0][number]) for number in trained)
    assert norm > LIMIT
    for number, (whole, clipped) in enumerate(zip(*vectors, strict=True)):
        factor = clip_factor(norm, LIMIT) if number in trained else 1.0
        assert torch.equal(clipped, whole * factor if factor != 1.0 else whole), number


async def test_one_asynchronous_trainer_has_the_bits_of_plain_training(tmp_path):
    script = write_script(tmp_path, model=WITHOUT_NOISE)
    spec = spec_for(script, clip_grad_norm=LIMIT)
    ours = await trained(spec.model_copy(update={"mode": Mode.ASYNC, "checkpoint_kind": "independent"}))
    assert differing(ours, dict(run(load(script), spec).model.state_dict())) == []


async def reported_norms(spec, trainers):
    """By step, as the master takes them; each once."""
    count, found = WholeSteps.count, []

    def noted(self, share, values):
        if share.grad_norm is not None:
            found.append((share.step, share.grad_norm))
        count(self, share, values)

    storage = f"{spec.storage}/{ids.new_id('run')}"  # metrics of a run before would be known
    with replaced(WholeSteps, "count", noted):
        await trained(spec.model_copy(update={"storage": storage}), trainers)
    assert len(dict(found)) == len(found)
    return dict(sorted(found))


async def test_the_norm_is_a_metric_of_each_step_that_is_clipped_and_of_every_tenth_of_others(tmp_path):
    script = write_script(tmp_path)
    spec = spec_for(script, lanes=4, epochs=3, pservers=2, clip_grad_norm=LIMIT)
    clipped = await reported_norms(spec, trainers=2)
    steps = len(clipped)
    assert steps > 10
    assert list(clipped) == list(range(steps))
    assert await reported_norms(spec, trainers=1) == clipped
    plain = await reported_norms(spec.model_copy(update={"clip_grad_norm": None}), trainers=2)
    assert list(plain) == list(range(0, steps, 10))
    assert plain[0] == clipped[0] > LIMIT
    assert plain[10] != clipped[10]
    assert (
        await reported_norms(spec.model_copy(update={"clip_grad_norm": None, "grad_norm_every": 0}), 1) == {}
    )
