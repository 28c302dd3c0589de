"""Losses and gradients that are NaN or infinite: the job fails before they are pushed, or leaves the
minibatch out, or trains it."""

from __future__ import annotations

import pytest

from tests.trainer_agent.cluster import cluster
from tests.trainer_agent.scripts import differing, spec_for, train_plainly, write_script
from trireme_shared.protocol.records import Phase

HEAD = """
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from trireme_shared.protocol.records.datasets import Npy
X = np.load({folder!r} + "/x.npy")
BAD = float(X[BAD_RECORD][0])
"""
BAD_LOSS = """
def loss(model, batch):
    mean = F.cross_entropy(model(batch["x"]), batch["y"])
    return mean * float("nan") if (batch["x"][:, 0] == BAD).any() else mean
"""
BAD_GRADIENT = """
class Cube(torch.autograd.Function):
    @staticmethod
    def forward(context, x, bad):
        context.bad = bad
        return x.clone()
    @staticmethod
    def backward(context, gradient):
        gradient = gradient.clone()
        if context.bad:
            gradient[0, 1] = float("inf")
        return gradient, None

def loss(model, batch):
    bad = bool((batch["x"][:, 0] == BAD).any())
    hidden = model[3](model[2](model[1](model[0](batch["x"]))))
    return F.cross_entropy(model[6](model[5](Cube.apply(model[4](hidden), bad))), batch["y"])
"""
KINDS = {"loss": BAD_LOSS, "gradient": BAD_GRADIENT}
BAD_RECORD = 43  # of task 2
COMMON = {"shuffle": False, "lanes": 2, "epochs": 1}


def script_with(folder, kind, bad=BAD_RECORD):
    return write_script(folder, head=HEAD.replace("BAD_RECORD", str(bad)), loss=KINDS[kind])


async def ended(spec, trainers=1):
    async with cluster(spec, trainers) as made:
        state = await made.ended()
        blocks = [block for pserver in made.pservers for block in pserver.store.blocks.values()]
        kinds = made.pservers[0].store.layout.segments
        parameters = [
            block.current.tensor.clone() for block in blocks if kinds[block.place.segment].kind == "param"
        ]
        exported = made.exported() if state.phase is Phase.COMPLETED else {}
    return state, parameters, exported


@pytest.mark.parametrize("clip_lane_norm", [None, 1.0])
@pytest.mark.parametrize("trainers", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
async def test_the_job_fails_before_it_is_pushed_with_step_lane_task_and_parameter(
    tmp_path, kind, trainers, clip_lane_norm
):
    spec = spec_for(script_with(tmp_path, kind), **COMMON, clip_lane_norm=clip_lane_norm)
    state, parameters, _ = await ended(spec, trainers)
    assert state.phase is Phase.FAILED
    what = {"loss": "the loss is nan", "gradient": "the gradient of 0.weight has "}[kind]
    assert state.failure.message.startswith(what)
    assert state.failure.error_type == "NonFiniteError"
    assert state.failure.task == f"task 2 ({tmp_path}/x.npy records 32-47), step 6, lane 0"
    assert state.reason.startswith("NonFiniteError in task 2 (")
    assert state.failure.traceback.count("trainer_agent") == 0
    assert all(bool(values.isfinite().all()) for values in parameters)


@pytest.mark.parametrize("kind", KINDS)
async def test_an_asynchronous_job_fails_too(tmp_path, kind):
    spec = spec_for(script_with(tmp_path, kind), mode="async", shuffle=False, epochs=1, push_every=2)
    state, parameters, _ = await ended(spec)
    assert state.phase is Phase.FAILED
    assert state.failure.task == f"task 2 ({tmp_path}/x.npy records 32-47), minibatch 1"
    assert all(bool(values.isfinite().all()) for values in parameters)


@pytest.mark.parametrize("clip_lane_norm", [None, 1.0])
@pytest.mark.parametrize("kind", KINDS)
async def test_skipped_minibatches_change_nothing_and_any_number_of_trainers_agrees(
    tmp_path, kind, clip_lane_norm
):
    """With one lane: as if the step had been left out."""
    script = script_with(tmp_path, kind)
    found = []
    for trainers in (1, 2):
        spec = spec_for(
            script,
            **COMMON,
            on_nonfinite="skip",
            clip_lane_norm=clip_lane_norm,
            storage=str(tmp_path / f"{trainers}"),
        )
        async with cluster(spec, trainers) as made:
            state = await made.ended()
            assert state.phase is Phase.COMPLETED, state
            found.append(made.exported())
            assert made.master.metrics.skipped == 4
            assert made.master.metrics.records == 56
    assert differing(*found) == []
    assert all(bool(values.isfinite().all()) for values in found[0].values())


async def test_a_step_in_which_all_is_skipped_leaves_parameters_and_buffers(tmp_path):
    script = script_with(tmp_path, "gradient", bad=59)  # the last minibatch of the only lane
    spec = spec_for(script, shuffle=False, lanes=1, epochs=1, on_nonfinite="skip", global_batch_size=4)
    _, _, exported = await ended(spec)
    shorter = write_script(tmp_path, name="shorter")
    plain = spec_for(shorter, shuffle=False, lanes=1, epochs=1, global_batch_size=4)
    expected = train_plainly(shorter, plain, steps=14)
    assert differing(exported, expected) == []


async def test_an_asynchronous_job_skips_too(tmp_path):
    script = script_with(tmp_path, "gradient")
    spec = spec_for(script, mode="async", shuffle=False, epochs=1, push_every=2, on_nonfinite="skip")
    state, parameters, _ = await ended(spec)
    assert state.phase is Phase.COMPLETED, state
    assert all(bool(values.isfinite().all()) for values in parameters)


async def test_ignored_values_are_trained(tmp_path):
    spec = spec_for(script_with(tmp_path, "gradient"), **COMMON, on_nonfinite="ignore")
    state, parameters, _ = await ended(spec)
    assert state.phase is Phase.COMPLETED, state
    assert not all(bool(values.isfinite().all()) for values in parameters)
