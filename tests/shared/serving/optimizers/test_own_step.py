"""What a script adds to the step of an optimizer or a scheduler is refused where the job would not have
it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.serving.optimizers.own_step import added_to_step, check_scheduler_step, check_step


def average(*_):
    pass


def replaced(optimizer):
    step = optimizer.step

    def clamped(closure=None):
        step(closure)

    optimizer.step = clamped


def replaced_of_class(optimizer, monkeypatch):
    real = torch.optim.SGD.step
    monkeypatch.setattr(torch.optim.SGD, "step", lambda self, closure=None: real(self, closure))
    return optimizer


@pytest.mark.parametrize(
    ("add", "added"),
    [
        (lambda o: o.register_step_post_hook(average), r"a hook \(average, by register_step_post_hook\)"),
        (lambda o: o.register_step_pre_hook(average), r"a hook \(average, by register_step_pre_hook\)"),
        (replaced, r"a step that was replaced \(replaced\.<locals>\.clamped\)"),
    ],
)
@pytest.mark.parametrize("scheduled", [False, True])
def test_hooks_and_a_replaced_step_are_named(add, added, scheduled):
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    if scheduled:  # a scheduler wraps the step
        torch.optim.lr_scheduler.StepLR(optimizer, 3)
    check_step(optimizer)
    add(optimizer)
    with pytest.raises(
        InvalidArgument, match=f"the optimizer SGD has {added}; a job steps parameters by optimizers"
    ) as caught:
        check_step(optimizer)
    assert "trireme.nn.Ema" in caught.value.hint


@pytest.mark.parametrize("kind", ["pre", "post"])
def test_a_hook_of_all_optimizers_is_named(kind):
    optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    register = getattr(
        __import__("torch.optim.optimizer", fromlist=["x"]), f"register_optimizer_step_{kind}_hook"
    )
    handle = register(average)
    try:
        assert (
            added_to_step(optimizer)
            == f"a hook of all optimizers (average, by register_optimizer_step_{kind}_hook)"
        )
    finally:
        handle.remove()
    assert added_to_step(optimizer) == ""


def test_a_step_that_was_replaced_for_the_whole_class_is_named(monkeypatch):
    optimizer = replaced_of_class(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), monkeypatch)
    assert added_to_step(optimizer).startswith("a step that was replaced")


def test_the_replaced_step_of_one_scheduler_is_refused_and_a_class_with_one_is_not():
    class Mine(torch.optim.lr_scheduler.StepLR):
        def step(self):
            super().step()

    scheduler = Mine(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), 3)
    check_scheduler_step(scheduler)
    scheduler.step = average
    with pytest.raises(InvalidArgument, match=r"the step of the scheduler Mine was replaced \(average\)"):
        check_scheduler_step(scheduler)
