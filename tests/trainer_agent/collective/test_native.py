"""Jobs whose trainers exchange gradients by native groups (real ones of Gloo, in threads)."""

from __future__ import annotations

import asyncio

import pytest
import torch

from shared.records import Phase, Strategy
from tests.trainer_agent.collective.cluster import cluster, trained
from tests.trainer_agent.scripts import differing, spec_for, write_script

COLLECTIVE = {"strategy": Strategy.COLLECTIVE, "pservers": 0, "lanes": 4, "global_batch_size": 12, "records_per_task": 6}
NATIVE = {**COLLECTIVE, "exchange": "native", "bucket_bytes": 4096}


@pytest.mark.parametrize("options", [{}, {"gradient_dtype": "bfloat16"}])
async def test_canonical_reduction_gives_the_bits_of_direct_exchange_to_three_trainers_with_uneven_lanes(
    tmp_path, options
):
    script = write_script(tmp_path)
    direct = await trained(spec_for(script, epochs=1, **COLLECTIVE, **options, storage=str(tmp_path / "a")), 1)
    native = await trained(spec_for(script, epochs=1, **NATIVE, **options, storage=str(tmp_path / "b")), 3)
    assert differing(direct, native) == []
