"""Hooks of the optimizer's step and replaced steps are refused wherever a script is trained: nobody would
call them in a job."""

from __future__ import annotations

import contextlib

import pytest
from torch.optim import optimizer as torch_optimizer  # type: ignore[attr-defined]

from tests.trainer_agent.done_blocks import DoneBlocks
from tests.trainer_agent.own_loop.scripts import write_loop
from tests.trainer_agent.scripts import records, spec_for, write_script
from trainer_agent.script.user_module import load
from trireme import plain
from trireme_shared.protocol.errors import InvalidArgument, UserCodeError

OPTIMIZER = """
def average(*_):
    pass

def replace(owner):
    step = owner.step
    owner.step = lambda *a: step(*a)

def optimizer(model):
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    ADD
    return made
"""
SCHEDULER = """
def scheduler(optimizer):
    made = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    ADD
    return made
"""
ADDED = {
    "made.register_step_post_hook(average)": r"SGD has a hook \(average, by register_step_post_hook\)",
    "made.register_step_pre_hook(average)": r"SGD has a hook \(average, by register_step_pre_hook\)",
    "torch.optim.optimizer.register_optimizer_step_post_hook(average)": "SGD has a hook of all optimizers",
    "replace(made)": r"SGD has a step that was replaced \(replace",
}


@pytest.fixture(autouse=True)
def no_hooks_of_all():
    yield
    for hooks in ("pre", "post"):
        vars(torch_optimizer)[f"_global_optimizer_{hooks}_hooks"].clear()


@pytest.mark.parametrize("add", list(ADDED))
@pytest.mark.parametrize("strategy", ["parameter_server", "collective"])
def test_an_optimizer_with_a_step_of_its_own_is_refused_by_functions(build, tmp_path, add, strategy):
    added = add.replace("torch.optim.optimizer.", "__import__('torch.optim.optimizer', fromlist=['x']).")
    parts = {"optimizer": OPTIMIZER.replace("ADD", added)}
    with pytest.raises(InvalidArgument, match=ADDED[add]) as caught:
        build({"strategy": strategy, "pservers": int(strategy == "parameter_server")}, **parts)
    assert "trireme.nn.Ema" in caught.value.hint
    script = write_script(tmp_path, "alone", **parts)
    with pytest.raises(InvalidArgument, match=ADDED[add]):
        plain.run(load(script), spec_for(script))


@pytest.mark.parametrize("add", ["register_step_post_hook(print)", "step = lambda: None"])
def test_an_optimizer_with_a_step_of_its_own_is_refused_by_loops(tmp_path, add):
    script = write_loop(
        tmp_path,
        prepare=f"optimizer.{add}\nmodel, optimizer, batches = trireme.prepare(model, optimizer, dataset)\n",
    )
    user = load(script)
    with (
        contextlib.closing(user.loop),
        pytest.raises(UserCodeError, match=r"the optimizer SGD has a (hook|step that was replaced)"),
    ):
        user.call("model")


@pytest.mark.parametrize("add", ["OPTIMIZER[0].register_step_post_hook(print)", "OPTIMIZER[0].step = print"])
async def test_a_step_that_the_loss_changes_later_is_refused(build, tmp_path, add):
    loss = f"def loss(model, batch):\n    {add}\n    return F.cross_entropy(model(batch['x']), batch['y'])\n"
    optimizer = OPTIMIZER.replace("ADD", "OPTIMIZER.append(made)") + "\nOPTIMIZER = []\n"
    message = r"loss\(model, batch\) gave the optimizer a (hook|step that was replaced)"
    compute = build(optimizer=optimizer, loss=loss)
    with pytest.raises(UserCodeError, match=message) as caught:
        await compute.gradient((0, 1), 0, 0, records(8), DoneBlocks())
    assert caught.value.details["fatal"]
    script = write_script(tmp_path, "alone", optimizer=optimizer, loss=loss)
    with pytest.raises(UserCodeError, match=message):
        plain.run(load(script), spec_for(script))


@pytest.mark.parametrize(
    ("add", "message"),
    [
        ("made.step = lambda: None", "the step of the scheduler StepLR was replaced"),
        ("made.seen = open", "the scheduler's state holds builtin_function_or_method"),
    ],
)
def test_a_scheduler_that_no_other_trainer_would_have_is_refused(build, tmp_path, add, message):
    parts = {"scheduler": SCHEDULER.replace("ADD", add)}
    with pytest.raises(InvalidArgument, match=message):
        build(**parts)
    script = write_script(tmp_path, "alone", **parts)
    with pytest.raises(InvalidArgument, match=message):
        plain.run(load(script), spec_for(script))
