"""Collective jobs as real processes with gradients in narrow dtypes, and with optimizers that need whole
parameters: the bits of the other strategy, or of another number of trainers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.end_to_end.local_cluster import STEPS, cluster_of, completed, reach_step, same_bits, spec_of

pytestmark = [pytest.mark.processes, pytest.mark.soak, pytest.mark.timeout(240)]

COLLECTIVE = {"strategy": "collective", "pservers": 0}
ADAM = "torch.optim.Adam(model.parameters(), lr=0.01)"
LAYERWISE = "trireme.optim.{}(model.parameters(), lr=0.05, weight_decay=0.01)"


async def trained(
    folder: Path, *, kill: bool = False, optimizer: str = ADAM, **options
) -> dict[str, torch.Tensor]:
    folder.mkdir()
    spec = spec_of(folder, **options)
    script = Path(spec.script)
    text = script.read_text()
    assert ADAM in text
    script.write_text(text.replace(ADAM, optimizer))
    async with cluster_of(spec, folder) as cluster:
        if kill:
            await reach_step(cluster, STEPS // 5)
            cluster.kill("trainer-1")
            await reach_step(cluster, 2 * STEPS // 5)
        return await completed(cluster)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
async def test_narrow_gradients_give_the_bits_of_parameter_servers(tmp_path, undisturbed, dtype):
    servers = await trained(tmp_path / "a", gradient_dtype=dtype)
    found = await trained(tmp_path / "b", **COLLECTIVE, gradient_dtype=dtype, kill=True)
    assert same_bits(found, servers)
    assert not same_bits(found, undisturbed)


@pytest.mark.parametrize("name", ["LARS", "LAMB"])
async def test_rules_that_need_whole_parameters_give_the_bits_of_one_trainer(tmp_path, undisturbed, name):
    optimizer = LAYERWISE.format(name)
    one = await trained(tmp_path / "a", **COLLECTIVE, optimizer=optimizer, trainers=1)
    found = await trained(tmp_path / "b", **COLLECTIVE, optimizer=optimizer, trainers=3, kill=True)
    assert same_bits(found, one)
    assert not same_bits(found, undisturbed)
