"""Gradients cast to a narrower dtype: what is sent, and the residuals."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.trainer_agent.done_blocks import DoneBlocks
from tests.trainer_agent.scripts import spec_for, write_script
from trainer_agent.model.torch_compute import TorchCompute
from trainer_agent.script.user_module import load


@pytest.fixture
def compute(tmp_path):
    script = write_script(tmp_path)
    spec = spec_for(script, mode="async", gradient_dtype="bfloat16", block_bytes=1024)
    with ThreadPoolExecutor(1) as executor:
        yield TorchCompute(load(script), spec, executor)


def records():
    return [{"x": torch.randn(5).numpy(), "y": 1} for _ in range(4)]


async def one_push(compute) -> dict[int, torch.Tensor]:
    """By block: what is sent."""
    compute.forget_nodes()
    blocks = DoneBlocks()
    await compute.gradient((0, 1), 0, 7, records(), blocks)
    names = compute.layout.payloads("bfloat16")
    own = [block.dtype for block in compute.layout.blocks()]
    return {
        number: torch.frombuffer(
            bytearray(compute.contribution((0, 1), number)),
            dtype=getattr(torch, names[number] or own[number]),
        )
        for number in sorted(blocks)
    }


async def test_buffers_travel_as_they_are_and_parameters_cast(compute):
    sent = await one_push(compute)
    kinds = {
        (compute.layout.segments[b.segment].kind, b.dtype): sent[b.number].dtype
        for b in compute.layout.blocks()
    }
    assert kinds == {
        ("param", "float32"): torch.bfloat16,
        ("buffer", "float32"): torch.float32,
        ("buffer", "int64"): torch.int64,
    }
    assert [len(sent[b.number]) for b in compute.layout.blocks()] == [
        b.elements for b in compute.layout.blocks()
    ]


async def test_all_pushes_and_the_rest_add_up_to_all_gradients(compute, monkeypatch):
    gradients: dict[int, torch.Tensor] = {}
    put = compute.send_buffers.put

    def seen(slot, block, values):
        gradients[block] = gradients.get(block, 0) + values.double()
        put(slot, block, values)

    monkeypatch.setattr(compute.send_buffers, "put", seen)
    totals: dict[int, torch.Tensor] = {}
    for _ in range(20):
        for block, values in (await one_push(compute)).items():
            totals[block] = totals.get(block, 0) + values.double()
    for block, residual in compute.send_buffers.residuals.items():
        torch.testing.assert_close(totals[block] + residual.double(), gradients[block], rtol=0, atol=1e-6)
    assert any(residual.any() for residual in compute.send_buffers.residuals.values())
    compute.restore(compute.initial_lane_zero())  # as after a rollback
    assert not any(residual.any() for residual in compute.send_buffers.residuals.values())


async def test_memory_of_casts_is_allocated_once(compute):
    def addresses():
        hosts = [
            segment.data_ptr() for host, _ in compute.send_buffers.hosts.values() for segment in host.segments
        ]
        return hosts, [residual.data_ptr() for residual in compute.send_buffers.residuals.values()]

    await one_push(compute)
    before = addresses()
    for _ in range(10):
        await one_push(compute)
    assert addresses() == before
    narrowed = sum(
        block.elements
        for block in compute.layout.blocks()
        if compute.layout.payloads("bfloat16")[block.number]
    )
    assert sum(residual.nbytes for residual in compute.send_buffers.residuals.values()) == 4 * narrowed
