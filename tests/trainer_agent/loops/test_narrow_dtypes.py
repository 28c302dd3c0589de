"""Gradients and parameters that travel as bfloat16 or float16: what stays exact, what is lost, and what gets
through."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from tests.trainer_agent.cluster import TorchCluster, cluster, trained
from tests.trainer_agent.scripts import differing, spec_for, write_script
from trainer_agent.model.gradient_tree import GradientTree
from trireme_shared.protocol.records import JobState, Mode, Phase
from trireme_shared.serving.core.blocks import Accumulator

COMMON = {"lanes": 8, "global_batch_size": 24, "records_per_task": 5, "epochs": 3}


BOTH = [("bfloat16", "bfloat16"), ("float16", "bfloat16")]


async def with_faults(spec) -> dict[str, torch.Tensor]:
    """The owner of lane 0 dies in the middle of something, a trainer joins, another dies."""
    async with cluster(spec, 2) as made:
        await made.version(2)
        await made.kill("trainer-0-x")
        await made.version(4)
        made.add_trainer("trainer-2-x")
        await made.version(6)
        await made.kill("trainer-1-x")
        assert (await made.ended()).phase is Phase.COMPLETED
        return made.exported()


@pytest.mark.parametrize(("gradients", "parameters"), BOTH)
async def test_synchronous_bits_depend_neither_on_the_number_of_trainers_nor_on_kills(
    tmp_path, gradients, parameters
):
    script = write_script(tmp_path)  # with BatchNorm: float32 and int64 buffers beside the parameters

    def spec(name, **values):
        narrow = {"gradient_dtype": gradients, "parameter_dtype": parameters}
        return spec_for(script, **COMMON, storage=str(tmp_path / name), **(narrow | values))

    alone = await trained(spec("alone"), 1)
    assert differing(alone, await trained(spec("three", pservers=2), 3)) == []
    assert differing(alone, await with_faults(spec("faults"))) == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
async def test_what_is_lost_in_synchronous_mode_is_rounding(tmp_path, dtype):
    smooth = "def model():\n    return nn.Sequential(nn.Linear(5, 24), nn.Tanh(), nn.Linear(24, 3))\n"
    script = write_script(tmp_path, model=smooth)
    narrow = {"gradient_dtype": dtype, "parameter_dtype": dtype}
    exact = await trained(spec_for(script, **COMMON, storage=str(tmp_path / "exact")), 1)
    found = await trained(spec_for(script, **COMMON, **narrow, storage=str(tmp_path / "narrow")), 2)
    assert differing(found, exact) != []
    for name, values in exact.items():
        torch.testing.assert_close(found[name], values, rtol=0, atol=0.004 * float(values.abs().max()))


@pytest.mark.parametrize("unrounded", [Accumulator, GradientTree])
async def test_without_rounding_at_every_node_the_number_of_trainers_shows_in_the_bits(
    tmp_path, monkeypatch, unrounded
):
    script = write_script(tmp_path)
    spec = {**COMMON, "gradient_dtype": "bfloat16"}
    alone = await trained(spec_for(script, **spec, storage=str(tmp_path / "alone")), 1)
    if unrounded is GradientTree:
        monkeypatch.setattr(GradientTree, "round_node", lambda *_: None)
    else:
        monkeypatch.setattr("trireme_shared.serving.core.blocks.round_to", lambda *_: None)
    assert differing(alone, await trained(spec_for(script, **spec, storage=str(tmp_path / "three")), 3)) != []


async def test_the_export_has_the_parameter_servers_full_precision(tmp_path):
    spec = spec_for(write_script(tmp_path), **COMMON, parameter_dtype="bfloat16")
    async with cluster(spec, 2) as made:
        assert (await made.ended()).phase is Phase.COMPLETED
        exported = made.exported()
        assert differing(exported, {name: held_at(made, name) for name in exported}) == []
        assert any(not torch.equal(value, value.bfloat16().float()) for value in exported.values())


def held_at(made: TorchCluster, name: str) -> torch.Tensor:
    """A parameter or buffer as it lies at the parameter servers."""
    compute = next(iter(made.computes.values()))
    values = {number: state.current.tensor for p in made.pservers for number, state in p.store.blocks.items()}
    place = next(p for p in (*compute.plan.parameters, *compute.plan.buffers) if p.name == name)
    blocks = [values[block.number] for block in compute.plan.blocks if block.segment == place.segment]
    return torch.cat(blocks).as_strided(place.shape, place.stride, place.first)


DRIFT = """
def model():
    found = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(found.weight)
    return found

def loss(model, batch):
    return model.weight.sum() * 1e-8

def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=1.0)
"""


async def moved(tmp_path, **values) -> tuple[float, int]:
    """How far a gradient of 1e-8 in each minibatch has moved the parameter, and how many minibatches there
    were."""
    empty = dict.fromkeys(("model", "loss", "optimizer"), "")
    script = write_script(tmp_path, **empty, drift=DRIFT)
    common = {"mode": Mode.ASYNC, "global_batch_size": 3, "records_per_task": 20, "gradient_dtype": "float16"}
    async with cluster(spec_for(script, **(common | values)), 1) as made:
        assert (await made.ended()).phase is Phase.COMPLETED
        job = [book for pserver in made.pservers for book in (await pserver.info()).ledger]
        return -float(made.exported()["weight"]), sum(book.applied_lowest for book in job)


async def test_what_a_cast_leaves_out_gets_through_with_the_next_pushes(tmp_path):
    """float16 has nothing between 0 and 6e-8: 1e-8 is rounded to 0 each time."""
    far, minibatches = await moved(tmp_path)
    # half of the smallest step, which is still with the trainer
    assert abs(far - minibatches * 1e-8) <= 2**-25


async def test_without_error_feedback_gradients_below_the_smallest_step_are_lost_for_ever(tmp_path):
    far, minibatches = await moved(tmp_path, error_feedback=False)
    assert (far, minibatches > 0) == (0.0, True)


async def test_a_killed_trainer_takes_at_most_one_rounding_error_with_it(tmp_path):
    empty = dict.fromkeys(("model", "loss", "optimizer"), "")
    script = write_script(tmp_path, **empty, drift=DRIFT)
    common = {"mode": Mode.ASYNC, "global_batch_size": 3, "records_per_task": 20, "gradient_dtype": "float16"}
    async with cluster(spec_for(script, **common), 1) as made:
        await made.version(5)
        await made.kill("trainer-0-x")
        made.add_trainer("trainer-1-x")
        assert (await made.ended()).phase is Phase.COMPLETED
        job = [book for pserver in made.pservers for book in (await pserver.info()).ledger]
        minibatches = sum(book.applied_lowest for book in job)
        far = -float(made.exported()["weight"])
    assert abs(far - minibatches * 1e-8) <= 2 * 2**-25


async def test_asynchronous_training_with_both_narrowed_pulls_what_everybody_pulls(tmp_path):
    script = write_script(tmp_path)
    spec = spec_for(
        script,
        mode="async",
        global_batch_size=6,
        pservers=2,
        gradient_dtype="bfloat16",
        parameter_dtype="float16",
    )
    async with cluster(spec, 2) as made:
        assert (await made.ended()).phase is Phase.COMPLETED
        exported = made.exported()
        assert differing(exported, {name: held_at(made, name) for name in exported}) == []
        assert all(torch.isfinite(value).all() for value in exported.values())


def test_error_feedback_in_synchronous_mode_is_refused(tmp_path):
    script = write_script(tmp_path)
    with pytest.raises(
        ValidationError, match="error_feedback is True, which only asynchronous jobs can have"
    ):
        spec_for(script, gradient_dtype="bfloat16", error_feedback=True)
    with pytest.raises(ValidationError, match="'float32', 'bfloat16' or 'float16'"):
        spec_for(script, gradient_dtype="float8")


async def ends(script, **values) -> JobState:
    async with cluster(spec_for(script, **values), 1) as made:
        return await made.ended()


@pytest.mark.parametrize("lanes", [1, 4])
async def test_a_gradient_beyond_float16_fails_the_task_with_what_to_do(tmp_path, lanes):
    script = write_script(
        tmp_path, loss="def loss(model, batch):\n    return model(batch['x']).sum() * 1e6\n"
    )
    state = await ends(script, gradient_dtype="float16", max_user_failures=1, lanes=lanes)
    assert state.phase is Phase.FAILED
    assert state.failure is not None
    assert (
        "does not fit float16, which ends at 65504; use gradient_dtype bfloat16, or scale the loss down"
        in (state.failure.message)
    )


async def test_a_parameter_beyond_float16_fails_the_job_with_what_to_do(tmp_path):
    script = write_script(
        tmp_path,
        model="def model():\n    found = nn.Linear(5, 3)\n    nn.init.constant_(found.weight, 1e5)\n"
        "    return found\n",
    )
    state = await ends(script, parameter_dtype="float16", max_user_failures=1)
    assert state.phase is Phase.FAILED
    assert state.failure is not None
    assert "100000 does not fit float16, which ends at 65504" in state.failure.message
