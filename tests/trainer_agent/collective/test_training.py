"""Trainers that exchange gradients among themselves train to the bits of parameter servers, and of one
process."""

from __future__ import annotations

import pytest

from tests.trainer_agent import cluster as with_pservers
from tests.trainer_agent.collective.cluster import trained
from tests.trainer_agent.scripts import differing, spec_for, train_plainly, write_script
from trireme_shared.protocol.records import Strategy

COLLECTIVE = {"strategy": Strategy.COLLECTIVE, "pservers": 0}


async def test_one_trainer_gives_the_bits_of_plain_pytorch(tmp_path):
    script = write_script(tmp_path)
    spec = spec_for(script, **COLLECTIVE)
    assert differing(await trained(spec), train_plainly(script, spec)) == []


@pytest.mark.parametrize("trainers", [2, 3])
async def test_several_trainers_give_the_bits_of_parameter_servers(tmp_path, trainers):
    script = write_script(tmp_path)
    common = {"lanes": 4, "global_batch_size": 12, "records_per_task": 6, "epochs": 2}
    servers = await with_pservers.trained(
        spec_for(script, **common, pservers=2, storage=str(tmp_path / "a")), 2
    )
    found = await trained(spec_for(script, **common, **COLLECTIVE, storage=str(tmp_path / "b")), trainers)
    assert differing(servers, found) == []


@pytest.mark.parametrize("options", [{"gradient_dtype": "bfloat16"}, {"clip_grad_norm": 0.3}])
async def test_narrow_gradients_and_clipped_ones_give_the_bits_of_parameter_servers(tmp_path, options):
    script = write_script(tmp_path)
    common = {"lanes": 4, "global_batch_size": 12, "records_per_task": 6, "epochs": 1, **options}
    servers = await with_pservers.trained(
        spec_for(script, **common, pservers=2, storage=str(tmp_path / "a")), 2
    )
    found = await trained(spec_for(script, **common, **COLLECTIVE, storage=str(tmp_path / "b")), 2)
    plain = {name: value for name, value in common.items() if name not in options}
    other = await trained(spec_for(script, **plain, **COLLECTIVE, storage=str(tmp_path / "c")), 2)
    assert differing(servers, found) == []
    assert differing(other, found) != []


@pytest.mark.parametrize("name", ["LARS", "LAMB"])
async def test_rules_that_need_whole_parameters_give_the_bits_of_plain_pytorch_and_of_any_number_of_trainers(
    tmp_path, name
):
    optimizer = (
        f"def optimizer(model):\n    return trireme.optim.{name}(model.parameters(), lr=0.05, "
        "weight_decay=0.01)\n"
    )
    script = write_script(tmp_path, optimizer=optimizer)
    alone = spec_for(script, **COLLECTIVE)
    assert differing(await trained(alone), train_plainly(script, alone)) == []
    common = {"lanes": 4, "global_batch_size": 12, "records_per_task": 6, "epochs": 1, **COLLECTIVE}
    one = await trained(spec_for(script, **common, storage=str(tmp_path / "a")), 1)
    for trainers in {"LARS": (3,), "LAMB": (2, 4)}[name]:
        found = await trained(spec_for(script, **common, storage=str(tmp_path / str(trainers))), trainers)
        assert differing(one, found) == []
