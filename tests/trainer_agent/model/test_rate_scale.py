"""Learning rates times the ratio of the global batch to the one that they were chosen for."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.trainer_agent.cluster import trained
from tests.trainer_agent.own_loop.scripts import write_loop
from tests.trainer_agent.scripts import differing, spec_for, write_script
from trainer_agent.model.torch_compute import TorchCompute
from trainer_agent.script.user_module import load
from trireme.plain import run
from trireme_shared.protocol.errors import InvalidArgument

SCALED = {"lr_scale": "linear", "lr_base_batch_size": 2}  # the scripts' steps have 8 records
TWO_GROUPS = """
    def optimizer(model):
        first, *rest = model.parameters()
        return torch.optim.SGD([{"params": [first]}, {"params": rest, "lr": 0.001}], lr=0.01, momentum=0.9)
"""
STEPS = "def scheduler(optimizer):\n    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)\n"
ONE_CYCLE = "torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 100)"
IN_A_ROW = (
    # one of them would be enough
    f"torch.optim.lr_scheduler.SequentialLR(optimizer, [{ONE_CYCLE}, {ONE_CYCLE}], [5])"
)


def test_each_group_is_scaled_and_the_schedule_goes_on_from_there(build):
    compute = build(SCALED, optimizer=TWO_GROUPS, scheduler=STEPS)
    assert [group["lr"] for group in compute.optimizer.param_groups] == [0.04, 0.004]
    assert [group["lr"] for group in compute.layout.optimizer.groups] == [0.04, 0.004]
    rates = [[each["lr"] for each in compute.begin_step().options] for _ in range(4)]
    assert rates == [[0.04, 0.004]] * 2 + [[0.02, 0.002]] * 2


@pytest.mark.parametrize("scheduler", [ONE_CYCLE, IN_A_ROW, ONE_CYCLE.replace("OneCycle", "Cyclic")])
def test_a_scheduler_with_rates_of_its_own_is_refused(build, scheduler):
    text = f"def scheduler(optimizer):\n    return {scheduler}\n"
    with pytest.raises(InvalidArgument, match=r"lr_scale is linear, and \w+LR has rates of its own"):
        build(SCALED, scheduler=text)
    build({}, scheduler=text)


async def test_it_is_the_script_with_the_rate_multiplied_to_the_bit(tmp_path):
    """In a job, and in one process."""
    plain = tmp_path / "plain"
    plain.mkdir()
    script, by_hand = write_script(tmp_path, optimizer=TWO_GROUPS), TWO_GROUPS.replace("0.001", "0.004")
    other = write_script(plain, optimizer=by_hand.replace("lr=0.01", "lr=0.04"))
    wanted = await trained(spec_for(other, lanes=4))
    assert differing(await trained(spec_for(script, lanes=4, **SCALED)), wanted) == []
    assert differing(await trained(spec_for(script, lanes=4)), wanted) != []
    alone = await trained(spec_for(other))
    user = load(script)
    sentences: list[str] = []
    spec = spec_for(script, **SCALED)
    assert differing(dict(run(user, spec, sentences.append).model.state_dict()), alone) == []
    assert sentences[0] == (
        "learning rates are 4 times the script's: 8 records a step instead of 2 (lr_scale linear)"
    )


async def test_the_optimizer_of_a_loop_of_ones_own_is_scaled_unless_it_has_a_scheduler(tmp_path):
    loop, functions = write_loop(tmp_path), write_script(tmp_path)
    found = await trained(spec_for(loop, **SCALED, storage=str(tmp_path / "loop")))
    assert (
        differing(found, await trained(spec_for(functions, **SCALED, storage=str(tmp_path / "functions"))))
        == []
    )
    prepare = """
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        model, optimizer, batches = trireme.prepare(model, optimizer, dataset, scheduler=scheduler)
    """
    scheduled = spec_for(write_loop(tmp_path, prepare=prepare), **SCALED)
    user = load(Path(scheduled.script))
    try:
        with (
            ThreadPoolExecutor(1) as executor,
            pytest.raises(InvalidArgument, match="has a scheduler already"),
        ):
            executor.submit(TorchCompute, user, scheduled, executor).result()
    finally:
        user.loop.close()
