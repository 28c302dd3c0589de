"""What a loop of one's own does to gradients before its optimizer.step() counts as in plain PyTorch."""

from __future__ import annotations

import textwrap
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from tests.trainer_agent.cluster import cluster, trained
from tests.trainer_agent.collective.cluster import trained as trained_collectively
from tests.trainer_agent.own_loop.scripts import PARTS, write_loop
from tests.trainer_agent.scripts import differing, lane_batches, spec_for
from trainer_agent.own_loop.source import run_as_main
from trainer_agent.script.user_module import LoopModule
from trireme.plain import run
from trireme_shared.protocol.lanes import step_seed
from trireme_shared.protocol.records import Phase, Strategy

FOUR = {"lanes": 4, "global_batch_size": 12, "records_per_task": 6, "pservers": 2}
SCALED = """
    scaler = torch.amp.GradScaler("cpu", init_scale=1000.0, growth_interval=3)
    for batch in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch["x"]), batch["y"])
        trireme.backward(scaler.scale(loss))
        CHANGE
        scaler.step(optimizer)
        scaler.update()
"""
CHANGED = """
    for batch in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch["x"]), batch["y"])
        trireme.backward(loss)
        CHANGE
        optimizer.step()
"""
FUSED = PARTS["model"].replace(
    "SGD(model.parameters(), lr=0.1, momentum=0.9)", "Adam(model.parameters(), fused=True)"
)
CHANGES = {
    "a norm": "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)",
    "values": "torch.nn.utils.clip_grad_value_(model.parameters(), 0.001)",
    "through data": "[p.grad.data.clamp_(-0.001, 0.001) for p in model.parameters()]",
    "in place": "[p.grad.mul_(3) for p in model.parameters()]",
    "another tensor": "model[0].weight.grad = torch.ones_like(model[0].weight)",
    "another order in memory": "model[0].weight.grad = torch.randn(5, 24).t()",
    "none": "model[0].weight.grad = None; model[6].bias.grad = None",
    "noise": "[p.grad.add_(torch.randn_like(p)) for p in model.parameters()]",
    "set to zero in place": "",
}
LOOPS = {name: CHANGED.replace("CHANGE", change) for name, change in CHANGES.items()} | {
    "set to zero in place": CHANGED.replace("zero_grad()", "zero_grad(set_to_none=False)").replace(
        "CHANGE", ""
    ),
    "scaled": SCALED.replace("CHANGE", ""),
    "scaled and clipped": SCALED.replace(
        "CHANGE", "scaler.unscale_(optimizer); torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)"
    ),
    "scaled for a kernel that unscales": SCALED.replace("CHANGE", ""),
    "scaled by hand": CHANGED.replace("backward(loss)", "backward(loss * 1000)").replace(
        "CHANGE", "[p.grad.div_(1000) for p in model.parameters()]"
    ),
}


class Stand(SimpleNamespace):
    """Plain PyTorch in place of trireme, for one lane: the batches with their seeds, and
    `loss.backward()`."""

    def __init__(self, script, spec):
        self.data = SimpleNamespace(Npy=lambda *_, **__: None)
        self.batches = [batches[0] for batches in lane_batches(script, spec)]
        self.seed, self.gradients, self.losses = spec.seed, [], []

    def prepare(self, model, optimizer, _dataset, **_):
        self.model = model
        real = optimizer.step

        def note_and_step():
            self.gradients.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
            real()

        optimizer.step = note_and_step
        return model, optimizer, self.seeded()

    def seeded(self):
        for step, batch in enumerate(self.batches):
            torch.manual_seed(step_seed(self.seed, step, 0))
            yield batch

    def backward(self, loss):
        loss.backward()


def plainly(script, spec):
    """The state_dict after the script's loop in plain PyTorch."""
    torch.set_num_threads(1)
    torch.manual_seed(spec.seed)
    stand = Stand(script, spec)
    text = script.read_text().replace("import torch, trireme", "import torch")
    exec(compile(text, str(script), "exec"), {"trireme": stand, "__name__": "__main__"})
    return dict(stand.model.state_dict())


def alone(script, spec):
    """As `python script.py`, by the code that trains it there."""
    user = LoopModule(script, script=partial(run_as_main, script))
    torch.manual_seed(spec.seed)
    try:
        return run(user, spec)
    finally:
        user.loop.close()


@pytest.mark.parametrize("name", list(LOOPS))
def test_alone_the_bits_are_those_of_plain_pytorch(tmp_path, name):
    script = write_loop(
        tmp_path, loop=LOOPS[name], after="", **({"model": FUSED} if "kernel" in name else {})
    )
    spec = spec_for(script)
    found = alone(script, spec)
    assert differing(found.model.state_dict(), plainly(script, spec)) == []
    if "scaler" in LOOPS[name]:
        assert all(0.5 < loss < 2 for loss in found.losses)  # not the scaled ones


@pytest.mark.parametrize(
    "name", ["through data", "another order in memory", "noise", "set to zero in place", "scaled and clipped"]
)
async def test_with_one_lane_the_bits_are_those_of_plain_pytorch(tmp_path, name):
    script = write_loop(tmp_path, loop=LOOPS[name])
    spec = spec_for(script)
    assert differing(await trained(spec), plainly(script, spec)) == []


async def test_with_more_lanes_each_lanes_gradients_are_changed_whoever_computes_them(tmp_path):
    script = write_loop(tmp_path, loop=LOOPS["through data"])
    spec = spec_for(script, **FOUR)
    expected = await trained(spec)
    assert differing(await trained(spec, 3), expected) == []
    collective = spec.model_copy(update={"strategy": Strategy.COLLECTIVE, "pservers": 0})
    assert differing(await trained_collectively(collective, 2), expected) == []
    assert differing(await trained(spec_for(write_loop(tmp_path), **FOUR)), expected) != []


async def test_an_asynchronous_job_trains_with_the_changed_gradients_too(tmp_path):
    changed, scaled = (
        LOOPS["in place"].replace("mul_(3)", "mul_(4)"),
        CHANGED.replace("backward(loss)", "backward(4 * loss)"),
    )
    found = []
    for loop in (changed, scaled.replace("CHANGE", "")):
        script = write_loop(tmp_path, loop=loop)
        found.append(await trained(spec_for(script, mode="async", push_every=2)))
    assert differing(*found) == []


@pytest.mark.parametrize("setting", ["clip_lane_norm", "clip_grad_norm"])
async def test_the_settings_clip_what_the_loop_leaves(tmp_path, setting):
    """A gradient that the loop makes longer than the limit; without the loop it would be shorter."""
    loop = CHANGED.replace("CHANGE", "[p.grad.data.mul_(1000) for p in model.parameters()]")
    script = write_loop(tmp_path, loop=loop)
    spec = spec_for(script, **{setting: 50.0})
    clipped = loop.replace(
        "optimizer.step", "torch.nn.utils.clip_grad_norm_(model.parameters(), 50.0)\n        optimizer.step"
    )
    expected = plainly(write_loop(tmp_path, name="clipping", loop=clipped), spec)
    found, by_itself = await trained(spec), alone(script, spec).model.state_dict()
    assert differing(found, by_itself) == []
    if setting == "clip_lane_norm":
        assert differing(found, expected) == []
    for name, value in found.items():  # clip_grad_norm adds squares in another order
        torch.testing.assert_close(value, expected[name], rtol=1e-2, atol=1e-2)


BAD = """
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for batch in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch["x"]), batch["y"])
        bad = bool((batch["x"][:, 0] == BAD).any())
        trireme.backward(scaler.scale(loss * float("inf") if bad else loss))
        scaler.step(optimizer)
        scaler.update()
"""


@pytest.mark.parametrize("model", ["plain", "fused"])
async def test_a_batch_that_a_scaler_leaves_out_is_counted_and_changes_nothing(tmp_path, model):
    parts = {"model": FUSED if model == "fused" else PARTS["model"], "after": ""}
    left_out = write_loop(tmp_path, loop=BAD.replace("BAD", "float(BAD)"), **parts)
    spec = spec_for(left_out, shuffle=False, epochs=1, global_batch_size=4)
    bad = float(
        next(reversed([batch[0] for batch in lane_batches(left_out, spec_for(left_out, epochs=1))]))["x"][
            -1, 0
        ]
    )
    left_out = write_loop(tmp_path, loop=f"BAD = {bad!r}\n" + textwrap.dedent(BAD), **parts)
    async with cluster(spec, 1) as made:
        state = await made.ended()
        assert state.phase is Phase.COMPLETED, state
        assert (made.master.metrics.skipped, made.master.metrics.records) == (4, 56)
        found = made.exported()
    assert all(bool(values.isfinite().all()) for values in found.values())
    assert differing(found, alone(left_out, spec).model.state_dict()) == []


@pytest.mark.parametrize(
    ("name", "lanes", "said"),
    [
        (
            "a norm",
            2,
            ["a step takes the mean over 2 minibatches, and the gradient of each is changed before that"],
        ),
        ("through data", 2, ["a step takes the mean over 2 minibatches"]),
        ("a norm", 1, []),
        ("set to zero in place", 2, []),
        ("scaled", 1, ["each trainer has a GradScaler of its own"]),
        (
            "buffers behind the step",
            1,
            ["changes the buffer 1.num_batches_tracked behind optimizer.step(), and that is undone"],
        ),
    ],
)
async def test_what_means_something_else_in_a_job_is_an_event_of_it(tmp_path, name, lanes, said):
    behind = CHANGED.replace("CHANGE", "") + "        model(batch['x'])\n"
    spec = spec_for(write_loop(tmp_path, loop=LOOPS.get(name, behind)), lanes=lanes, epochs=1)
    async with cluster(spec, lanes) as made:
        state = await made.ended()
        assert state.phase is Phase.COMPLETED, state
        told = {event.message for event in made.master.events.after(0, 1000) if event.name == "warning"}
    # the loop of the other trainer, in this process, has a model of its own
    told = {message for message in told if "of a module beside the model" not in message}
    assert len(told) == len(said)
    assert all(part in text for part, text in zip(said, told, strict=True)), told
