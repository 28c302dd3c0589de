"""Hooks of the script that change gradients while backward runs."""

from __future__ import annotations

import pytest
import torch

from tests.trainer_agent.done_blocks import DoneBlocks
from tests.trainer_agent.scripts import records
from trainer_agent.data import default_collate
from trainer_agent.model.watch.unshared_state import FIRST_LOOKS
from trainer_agent.script.user_module import load
from trireme_shared.protocol.errors import UserCodeError

HOOKED = """
def model():
    made = nn.Sequential(nn.Linear(5, 24), nn.ReLU(), nn.Linear(24, 3))
    BEFORE
    return made

def loss(model, batch):
    if not hasattr(model, "hooked"):
        model.hooked = True
        LATER
    hidden = model[1](model[0](batch["x"]))
    WITHIN
    return F.cross_entropy(model[2](hidden), batch["y"])
"""
TRIPLE = "lambda p: p.grad.data.mul_(3) is None or None"
HOOKS = {
    "of a parameter, before ours": {"BEFORE": f"made[0].weight.register_post_accumulate_grad_hook({TRIPLE})"},
    "of a parameter, after ours": {"LATER": f"model[0].weight.register_post_accumulate_grad_hook({TRIPLE})"},
    "of a gradient": {"BEFORE": "made[0].weight.register_hook(lambda gradient: gradient * 3)"},
    "of a module": {
        "LATER": "model[1].register_full_backward_hook(lambda m, _, __: model[2].weight.grad.data.mul_(3) "
        "is None or None)"
    },
    "that takes the gradient": {
        "BEFORE": "made[0].weight.register_post_accumulate_grad_hook(lambda p: setattr(p, 'grad', None))"
    },
    "that replaces it": {
        "LATER": "model[2].bias.register_post_accumulate_grad_hook(lambda p: setattr(p, 'grad', p.grad * 3))"
    },
}


def hooked(kind):
    text = HOOKED
    for place in ("BEFORE", "LATER", "WITHIN"):
        text = text.replace(
            place,
            HOOKS.get(kind, {}).get(place, "pass") if isinstance(kind, str) else kind.get(place, "pass"),
        )
    return {"model": text, "loss": ""}


@pytest.mark.parametrize("kind", list(HOOKS))
async def test_hooks_of_the_script_change_gradients_as_in_plain_pytorch(build, tmp_path, kind):
    compute = build(**hooked(kind))
    user = load(tmp_path / "script.py")
    model = user.call("model")
    model.load_state_dict(compute.model.state_dict())
    for number in range(3):
        batch = records(8, number)
        compute.forget_nodes()
        await compute.gradient((0, 1), 0, number, batch, DoneBlocks())
        model.zero_grad()
        user.call("loss", model, default_collate(batch)).backward()
        for place, parameter in zip(compute.plan.parameters, model.parameters(), strict=True):
            found = compute.tree.vector(0).view(place)
            assert torch.equal(
                found, torch.zeros_like(found) if parameter.grad is None else parameter.grad
            ), place.name


async def test_a_gradient_that_is_on_its_way_is_not_changed_without_a_word(build):
    compute = build(
        **hooked(
            {"WITHIN": "hidden.register_hook(lambda _: model[2].weight.grad.data.mul_(3) is None or None)"}
        )
    )
    with pytest.raises(
        UserCodeError, match=r"a hook changed the gradient of 2\.weight after backward had computed it"
    ):
        for number in range(FIRST_LOOKS):
            compute.forget_nodes()
            await compute.gradient((0, 1), 0, number, records(8, number), DoneBlocks())
