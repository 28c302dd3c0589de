"""`init_optimizer`: a job starts with the state of an optimizer and a scheduler, with the bits of plain
training that does."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.equipment.cluster.direct_ports import DirectPserver
from tests.equipment.etcd.simulated import SimulatedEtcd
from tests.trainer_agent.cluster import trained
from tests.trainer_agent.scripts import differing, spec_for, write_script
from trainer_agent.membership.lease import Membership, ensure_initialised
from trainer_agent.model.torch_compute import TorchCompute
from trainer_agent.script.user_module import load
from trainer_agent.start_values import TrainingState, load_training_state, read_training_state
from trireme.plain import run
from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.membership.directory import Directory
from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import TrainerMember

SCHEDULER = (
    "def scheduler(optimizer):\n    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [4, 12], 0.5)\n"
)
GROUPS = """
def optimizer(model):
    first, rest = list(model[0].parameters()), list(model[1:].parameters())
    groups = [{"params": first}, {"params": rest, "momentum": 0.0}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)
"""


def written(folder: Path, optimizer: str, scheduler: str = SCHEDULER) -> Path:
    if not optimizer.lstrip().startswith("def"):
        optimizer = f"def optimizer(model):\n    return {optimizer}\n"
    return write_script(folder, optimizer=optimizer, scheduler=scheduler)


def saved(script: Path, name: str = "begun.pt", **changes) -> str:
    """What plain PyTorch has after two epochs of the script, as people save it."""
    user = load(script)
    result = run(user, spec_for(script))
    schedule = None
    if user.has("scheduler"):
        stepped = user.call("optimizer", user.call("model"))
        schedule = user.call("scheduler", stepped)
        for _ in range(result.steps):
            stepped.step()
            schedule.step()
    content = {"model": result.model.state_dict(), "optimizer": result.optimizer.state_dict()}
    content |= {"scheduler": schedule.state_dict()} if schedule is not None else {}
    path = script.parent / name
    torch.save({key: value for key, value in (content | changes).items() if value is not None}, path)
    return str(path)


@pytest.mark.parametrize(
    "optimizer",
    [
        "torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True)",
        "torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)",
        "torch.optim.Adagrad(model.parameters(), lr=0.05, initial_accumulator_value=0.1)",
        "torch.optim.NAdam(model.parameters(), lr=0.01)",
        "trireme.optim.Lion(model.parameters(), lr=0.001)",
        GROUPS,
    ],
    ids=["Adam", "AdamW", "Adagrad", "NAdam", "Lion", "SGD with two groups"],
)
async def test_one_lane_has_the_bits_of_plain_training_with_that_state(tmp_path, optimizer):
    script = written(tmp_path, optimizer)
    spec = spec_for(script, init_from=saved(script), init_optimizer=True, pservers=2)
    plain = dict(run(load(script), spec).model.state_dict())
    assert differing(await trained(spec, trainers=2), plain) == []
    fresh = spec.model_copy(update={"init_optimizer": False})
    assert differing(dict(run(load(script), fresh).model.state_dict()), plain) != []


def test_options_stay_as_the_script_sets_them_unless_a_scheduler_goes_on(tmp_path):
    adam = "torch.optim.Adam(model.parameters(), lr={})"
    script = written(tmp_path, adam.format(0.01), "")
    found = read_training_state(saved(script))
    user = load(written(tmp_path, adam.format(0.5), ""))
    model = user.call("model")
    optimizer = user.call("optimizer", model)
    load_training_state(model, optimizer, None, found, "begun.pt")
    assert optimizer.param_groups[0]["lr"] == 0.5
    script = written(tmp_path, adam.format(0.01))
    found = read_training_state(saved(script))
    user = load(script)
    model = user.call("model")
    optimizer = user.call("optimizer", model)
    schedule = user.call("scheduler", optimizer)
    load_training_state(model, optimizer, schedule, found, "begun.pt")
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * 0.25)
    assert schedule.last_epoch == 16
    assert next(iter(optimizer.state.values()))["step"] == 16


def refusal(script: Path, path: str) -> str:
    with pytest.raises(InvalidArgument) as caught:
        run(load(script), spec_for(script, init_from=path, init_optimizer=True))
    assert caught.value.hint
    return caught.value.message


def test_a_state_that_does_not_fit_is_refused_with_what_differs(tmp_path):
    adam, sgd = (
        "torch.optim.Adam(model.parameters())",
        "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)",
    )
    begun = saved(written(tmp_path, sgd))
    told = refusal(written(tmp_path, adam), begun)
    assert "0.weight has momentum_buffer, exp_avg, exp_avg_sq, step is needed" in told
    assert "and 3 more" in told
    groups = refusal(written(tmp_path, GROUPS), begun)
    assert "its groups have [8] parameters, those of the script's optimizer [2, 6]" in groups
    script = written(tmp_path, sgd)
    assert "has no state of an optimizer" in refusal(script, saved(script, optimizer=None))
    assert "is not what optimizer.state_dict() gives" in refusal(script, saved(script, optimizer={"lr": 0.1}))
    assert "no state of a scheduler, and the script has scheduler()" in refusal(
        script, saved(script, scheduler=None)
    )
    found = torch.load(begun, weights_only=True)["optimizer"]
    found["state"][0]["momentum_buffer"] = torch.zeros(3)
    assert "0.weight has momentum_buffer of shape [3], [24, 5] is needed" in refusal(
        script, saved(script, optimizer=found)
    )
    for state in found["state"].values():
        state.clear()
    assert "0.weight has no state, momentum_buffer is needed" in refusal(
        script, saved(script, optimizer=found)
    )


def test_a_parameter_that_had_no_gradient_has_no_state_and_asynchronous_jobs_refuse_it(tmp_path):
    """What synchronous jobs do is in model/test_freezing.py."""
    script = written(tmp_path, "torch.optim.Adam(model.parameters())")
    found = torch.load(saved(script), weights_only=True)["optimizer"]
    found["state"].pop(0)
    spec = spec_for(script, init_from=saved(script, optimizer=found), init_optimizer=True, mode="async")
    with ThreadPoolExecutor(1) as executor, pytest.raises(InvalidArgument) as caught:
        TorchCompute(load(script), spec, executor)
    assert "0.weight has no state, exp_avg, exp_avg_sq, step is needed" in caught.value.message


def test_other_ways_to_save_it_are_understood(tmp_path):
    script = written(tmp_path, "torch.optim.Adam(model.parameters())")
    content = torch.load(saved(script), weights_only=True)
    for state in content["optimizer"]["state"].values():
        state["step"] = int(state["step"])  # as torch kept it before 1.12
    lightning = tmp_path / "lightning.ckpt"
    names = {"state_dict": "model", "optimizer_states": "optimizer", "lr_schedulers": "scheduler"}
    values = {name: content[of] if of == "model" else [content[of]] for name, of in names.items()}
    torch.save(values, lightning)
    found = read_training_state(str(lightning))
    assert isinstance(found, TrainingState)
    spec = spec_for(script, init_from=str(lightning), init_optimizer=True)
    other = spec_for(script, init_from=saved(script), init_optimizer=True)
    bits = dict(run(load(script), spec).model.state_dict())
    assert differing(dict(run(load(script), other).model.state_dict()), bits) == []


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, "there is no init_from"),
        ({"init_from": "a.safetensors"}, "a.safetensors holds parameters alone"),
        ({"init_from": "a.pt", "init_partial": True}, "init_optimizer and init_partial are both set"),
    ],
)
def test_settings_that_cannot_go_together_are_refused(tmp_path, settings, told):
    with pytest.raises(ValueError, match=told):
        spec_for(write_script(tmp_path), init_optimizer=True, **settings)


async def test_a_model_made_for_a_job_that_had_begun_does_not_initialise_one_that_starts_over(tmp_path):
    """It has read the job's copy of the parameters alone: the optimizer would start fresh."""
    script = written(tmp_path, "torch.optim.Adam(model.parameters())")
    spec = spec_for(script, init_from=saved(script), init_optimizer=True)
    with ThreadPoolExecutor(1) as executor:
        first = TorchCompute(load(script), spec, executor)
        later = TorchCompute(load(script), spec, executor, initial=first.layout.initial)
        assert (first.may_initialise, later.may_initialise) == (True, False)
        assert [name for name, _ in first.initial_state(0)] == ["step", "exp_avg", "exp_avg_sq"]
        etcd = Etcd(SimulatedEtcd().transport("trainer"))
        member = TrainerMember(
            trainer="trainer-0", url="http://127.0.0.1:1", incarnation="x", host="here", pid=1
        )
        mine = Membership(etcd, member)
        async with asyncio.timeout(20):
            assert not await ensure_initialised(
                spec, Directory(etcd, Keys("test")), etcd, mine, later, DirectPserver
            )
