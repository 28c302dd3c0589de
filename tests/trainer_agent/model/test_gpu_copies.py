"""A GPU's vectors are copied as a whole: two copies a step, and numbers that are read, however many blocks
there are.

No GPU is needed: the memory of the CPU is declared to be a GPU's, so all that pushes and pulls use has to be
copied.
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Executor, Future

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.trainer_agent.done_blocks import DoneBlocks
from tests.trainer_agent.scripts import records, spec_for, write_script
from trainer_agent.model.torch_compute import TorchCompute
from trainer_agent.script.user_module import load
from trireme_shared.protocol.errors import UserCodeError

NODE = (0, 4)
READS = 3  # of numbers by a lane: the loss, which buffers changed, whether gradients are finite


class Inline(Executor):
    """Runs in the caller's thread, where dispatch modes see it."""

    def submit(self, work, /, *arguments, **options):
        future = Future()
        try:
            future.set_result(work(*arguments, **options))
        except Exception as error:
            future.set_exception(error)
        return future


class Transfers(TorchDispatchMode):
    """Counts copies into and out of `host` memories, and scalars that are read."""

    def __init__(self, hosts):
        super().__init__()
        self.counts = Counter()
        self._hosts = {host.flat.untyped_storage().data_ptr() for host in hosts}

    def watch(self, values):
        self._hosts.add(values.untyped_storage().data_ptr())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name == "copy_":
            into, out_of = (tensor.untyped_storage().data_ptr() in self._hosts for tensor in args[:2])
            self.counts["copies"] += into or out_of
        self.counts["reads"] += name == "_local_scalar_dense"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def make(tmp_path, monkeypatch):
    def build(*, gpu, parts=None, **spec):
        script = write_script(tmp_path, **(parts or {}))
        monkeypatch.setattr("trainer_agent.model.torch_compute.is_host", lambda _: not gpu)
        return TorchCompute(load(script), spec_for(script, **spec), Inline())

    return build


async def step(compute, number=0):
    """The blocks that are sent, by number."""
    compute.forget_nodes()
    announced = DoneBlocks()
    for lane in range(*NODE):
        await compute.gradient(NODE, lane, 7 + lane, records(4 - lane % 2, 10 * number + lane), announced)
    assert sorted(announced) == [block.number for block in compute.plan.blocks]
    return [bytes(compute.contribution(NODE, block)) for block in range(len(announced))]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_what_is_sent_has_the_bits_of_a_cpus(make, mode, dtype):
    spec = {"mode": mode, "gradient_dtype": dtype, "block_bytes": 1024}
    on_host, on_gpu = make(gpu=False, **spec), make(gpu=True, **spec)
    for number in range(3):
        assert await step(on_gpu, number) == await step(on_host, number)
        for compute in (on_host, on_gpu):  # as a pull does
            for block in compute.plan.blocks:
                kind = {"float32": np.float32, "int64": np.int64}[block.dtype]
                values = np.frombuffer(compute.current(block.number), kind)
                compute.staging(block.number)[:] = (values * 2).astype(kind).tobytes()
            compute.swap()
        assert all(
            bytes(on_gpu.current(b)) == bytes(on_host.current(b)) for b in range(len(on_host.plan.blocks))
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("block_bytes", [256, 1 << 20])
async def test_a_step_makes_two_copies_however_many_blocks_there_are(make, monkeypatch, dtype, block_bytes):
    compute = make(gpu=True, gradient_dtype=dtype, block_bytes=block_bytes)
    for number in range(4):  # the first ones look at parameters too
        await step(compute, number)
    hosts = [host for host, _ in compute.send_buffers.hosts.values()]
    staging = torch.frombuffer(compute.staging(0), dtype=torch.uint8)
    lists = Counter()
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: lists.update(["reads"]) or tolist(self))
    with Transfers(hosts) as seen:
        seen.watch(staging)
        await step(compute)
        assert seen.counts["copies"] == 1
        compute.swap()
    assert seen.counts["copies"] == 2
    assert seen.counts["reads"] + lists["reads"] == READS * (NODE[1] - NODE[0])


async def test_kept_blocks_are_not_copied_one_by_one(make):
    """The staging vector of a GPU has the values that went there last."""
    compute = make(gpu=True, block_bytes=256)
    blocks = range(len(compute.plan.blocks))
    for block in blocks:
        compute.staging(block)[:] = bytes([block % 7]) * len(compute.staging(block))
    staging = torch.frombuffer(compute.staging(0), dtype=torch.uint8)
    compute.swap()
    compute.staging(1)[:] = bytes(len(compute.staging(1)))  # of a pull that broke off
    with Transfers([]) as seen:
        seen.watch(staging)
        for block in blocks:
            compute.keep(block)
    assert seen.counts["copies"] == 1
    compute.swap()
    assert {block: set(bytes(compute.current(block))) for block in blocks} == {
        block: {block % 7} for block in blocks
    }


NAN = "torch.sqrt(0 * sum(p.sum() for p in model.parameters()))"  # its value is 0, its gradient is not finite


@pytest.mark.parametrize(
    ("loss", "error"), [("1e9 * mean", "float16"), (f"mean + {NAN}", "the gradient of 0.weight")]
)
async def test_what_does_not_fit_or_is_not_finite_is_refused_before_it_is_announced(make, loss, error):
    head = 'def loss(model, batch):\n    mean = F.cross_entropy(model(batch["x"]), batch["y"])\n'
    compute = make(gpu=True, parts={"loss": f"{head}    return {loss}\n"}, gradient_dtype="float16")
    announced = DoneBlocks()
    for _ in range(2):
        with pytest.raises(UserCodeError, match=error):
            await compute.gradient((0, 1), 0, 1, records(4), announced)
        compute.forget_nodes()
    assert announced == []
