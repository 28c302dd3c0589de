"""The tree over lanes has the same bits whether a node is computed by a trainer's GPU or by a parameter
server's CPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
import torch

from tests.equipment.gpu_arithmetic import GpuArithmetic
from tests.trainer_agent.done_blocks import DoneBlocks
from trainer_agent.model.devices import HOST, device_of, number_of, use_deterministic_kernels
from trainer_agent.model.gradient_tree import Entry, GradientTree, TreeRules
from trireme_shared.blocks.buffers import BufferPool
from trireme_shared.serving.core.blocks import Accumulator

LANES = 4
COUNTS = [(4, 4, 4, 4), (4, 4, 4, 3), (5, 3, 7, 1), (0, 6, 5, 2)]
CUTS = {  # by the lanes of each trainer: the nodes that the trainers compute
    "1": [(0, 4)],
    "2 + 2": [(0, 2), (2, 4)],
    "3 + 1": [(0, 2), (2, 3), (3, 4)],
    "1 + 1 + 1 + 1": [(0, 1), (1, 2), (2, 3), (3, 4)],
}
MODELS = {
    "float32": "nn.Linear(5, 300)",
    "bfloat16": "nn.Linear(5, 300).bfloat16()",
    "float16": "nn.Linear(5, 300).half()",
}


def node_on_gpu(plan, rounded, node, counts):
    """The node's blocks, as a trainer with a GPU computes them."""
    tree = GradientTree(plan, HOST, None, TreeRules(rounded))
    for lane in range(*node):
        entry = Entry(1, counts[lane], tree.take() if counts[lane] else None)
        if entry.slot is not None:
            source = torch.Generator().manual_seed(lane)
            for segment in tree.vector(entry.slot).segments:
                segment.copy_(torch.randn(len(segment), generator=source))
        with GpuArithmetic():
            if lane < node[1] - 1:
                tree.add(entry)
            else:
                tree.open(node, entry, DoneBlocks())
                tree.close()
    found = [bytearray(tree.contribution(node, block.number)) for block in plan.blocks]
    return [
        torch.frombuffer(part, dtype=getattr(torch, b.dtype)) if part else None
        for part, b in zip(found, plan.blocks, strict=True)
    ]


def whole(compute, travels_as, cut, counts):
    """The roots of all blocks: what the parameter servers make of the trainers' nodes."""
    plan, payloads = compute.plan, compute.layout.payloads(travels_as)
    trees = [Accumulator(BufferPool(), LANES, block.dtype, block.elements) for block in plan.blocks]
    roots = []
    for node in cut:
        count = sum(counts[slice(*node)])
        values = node_on_gpu(plan, payloads, node, counts)
        roots = [
            tree.add(node, value, count, payload=payload)
            for tree, value, payload in zip(trees, values, payloads, strict=True)
        ]
    return [root.value for root in roots]


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize(
    ("own", "travels_as"),
    [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "float32")],
)
def test_who_computes_a_node_changes_no_bit(build, own, travels_as, counts):
    compute = build({"block_bytes": 1024}, model=f"def model():\n    return {MODELS[own]}\n")
    roots = {name: whole(compute, travels_as, cut, counts) for name, cut in CUTS.items()}
    for name, found in roots.items():
        assert all(map(torch.equal, found, roots["1"])), f"{name} trainers differ from 1"


def test_the_emulation_divides_as_a_gpu_does():
    values = torch.arange(1.0, 100.0)
    with GpuArithmetic():
        by_gpu = values.clone().div_(7)
    assert torch.equal(by_gpu, values * torch.tensor(1 / 7))
    assert not torch.equal(by_gpu, values / 7)
    with GpuArithmetic(), pytest.raises(AssertionError, match="may depend on the device"):
        values.lerp(values, 0.3)
    with GpuArithmetic(), pytest.raises(AssertionError, match="may be a fused multiply-add"):
        values.add(values, alpha=0.3)


def test_deterministic_kernels_are_torchs_own(monkeypatch):
    """No GPU is needed to see the settings; what they do on one is torch's promise."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    filled = torch.utils.deterministic.fill_uninitialized_memory
    try:
        use_deterministic_kernels()
        assert torch.are_deterministic_algorithms_enabled()
        assert (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark) == (True, False)
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before
        torch.utils.deterministic.fill_uninitialized_memory = filled
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


def test_a_cpu_stays_as_it_was():
    assert device_of("cpu", deterministic=True) == HOST
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_each_trainer_of_a_host_takes_its_own_gpu(monkeypatch, name):
    current = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)  # those that CUDA_VISIBLE_DEVICES leaves
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    trainers = ["trainer-0", "trainer-1", "trainer-2", "trainer-11", "trainer"]
    found = [device_of(name, deterministic=False, number=number_of(trainer)) for trainer in trainers]
    assert found == [torch.device("cuda", index) for index in (0, 1, 0, 1, 0)]
    assert current == found


COMPILED = """
import sys
import torch
from torch import nn
from trainer_agent.model.devices import compile_each_shape_alone

torch.set_num_threads(1)
torch.manual_seed(0)
body = nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))
model = torch.compile(body, backend={backend!r})
if {alike}:
    compile_each_shape_alone()
batches = {{size: torch.randn(size, 5) for size in range(2, 17)}}
for size in {sizes}:
    model.zero_grad()
    model(batches[size]).square().sum().backward()
print(*(parameter.grad.flatten().tolist() for parameter in model.parameters()))
"""


def gradients_of(sizes, *, alike=True, backend="inductor"):
    """Of the last batch, in a process of its own that computes batches of these sizes."""
    code = COMPILED.format(sizes=sizes, alike=alike, backend=backend)
    own = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_DYNAMO")}
    ran = subprocess.run([sys.executable, "-c", code], env=own, capture_output=True, text=True, timeout=240)
    return ran.stdout or ran.stderr


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler, and none is here")
def test_the_kernel_of_a_batch_does_not_depend_on_the_batches_that_a_process_has_met_before():
    assert gradients_of([4]) == gradients_of([16, 4])
    assert gradients_of([4]) != gradients_of([16, 4], alike=False), "what the safeguard is for"


def test_more_shapes_than_the_compiler_keeps_are_an_error():
    found = gradients_of(list(range(2, 17)), backend="aot_eager")
    assert "FailOnRecompileLimitHit" in found
