"""`buffers` of a script: what it may say, and what it means for the buffers of a model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.trainer_agent.scripts import write_script
from trainer_agent.model.buffer_policies import checked, policies_of
from trainer_agent.script.user_module import load
from trireme_shared.protocol.errors import InvalidArgument


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("queue", torch.zeros(4))
        self.register_buffer("at", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.zeros(4, dtype=torch.bool))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Part(), Part()


def test_patterns_name_buffers():
    found = policies_of(Model(), {"left.*": "first", "*.at": "first", "right.queue": "mean"})
    assert found == {
        "left.queue": "first",
        "left.at": "first",
        "left.mask": "first",
        "right.at": "first",
        "right.queue": "mean",
    }
    assert policies_of(Model(), {}) == {}


@pytest.mark.parametrize(
    ("said", "message", "hint"),
    [
        (
            {"queue": "first"},
            "buffers says 'first' for 'queue', and the model has no such buffer",
            "the nearest are left.queue, right.queue",
        ),
        ({"left.qeue": "mean"}, "for 'left.qeue', and the model has no such", "the nearest are left.queue"),
        (
            {"xyz": "mean"},
            "no such buffer",
            "its buffers are left.queue, left.at, left.mask, right.queue and 2 more",
        ),
        ({"left.weight": "mean"}, "no such buffer", "left.weight is a parameter"),
        (
            {"left.*": "first", "*.queue": "mean"},
            "'first' for 'left.*' and 'mean' for '*.queue', and both fit the buffer left.queue",
            "let only one",
        ),
        (
            {"*.mask": "first"},
            "the buffer left.mask is torch.bool",
            "make it a floating-point or int64 buffer",
        ),
        ({"*.at": "mean"}, "the buffer left.at is torch.int64: integers have no mean", 'say "first"'),
    ],
)
def test_what_means_nothing_is_refused_with_what_to_do(said, message, hint):
    with pytest.raises(InvalidArgument) as raised:
        policies_of(Model(), said)
    assert message in raised.value.message
    assert hint in raised.value.hint


def test_a_model_without_buffers_is_told_so():
    with pytest.raises(InvalidArgument) as raised:
        policies_of(nn.Linear(2, 2), {"queue": "first"})
    assert raised.value.hint == "the model has no buffers at all; one is made by register_buffer"


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (["queue"], "buffers is list"),
        ({1: "first"}, "buffers has keys that are no text"),
        (
            {"queue": "frist"},
            "buffers says 'frist' for 'queue': expected 'first' or 'mean'; did you mean 'first'?",
        ),
        ({"queue": None}, "buffers says None for 'queue': expected 'first' or 'mean'"),
    ],
)
def test_what_is_no_dict_of_policies_is_refused(said, message):
    with pytest.raises(InvalidArgument) as raised:
        checked(said, "buffers")
    assert raised.value.message == message


def test_a_script_gives_them_and_its_errors_name_it(tmp_path):
    assert load(write_script(tmp_path, "silent")).buffers == {}
    assert load(write_script(tmp_path, "module", buffers="import math as buffers")).buffers == {}
    assert load(write_script(tmp_path, "good", buffers='buffers = {"a.*": "mean"}')).buffers == {
        "a.*": "mean"
    }
    script = write_script(tmp_path, "bad", buffers="def buffers(): ...")
    with pytest.raises(InvalidArgument) as raised:
        load(script)
    assert raised.value.message == f"buffers in {script} is function"
    assert "give it another name" in raised.value.hint
