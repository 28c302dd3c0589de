"""`precision = "bf16"`: plain PyTorch under autocast, in a trainer, in a loop of one's own and in one
process; the same bits whoever computes."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from tests.trainer_agent.cluster import cluster, trained
from tests.trainer_agent.done_blocks import DoneBlocks
from tests.trainer_agent.own_loop.scripts import write_loop
from tests.trainer_agent.scripts import differing, records, spec_for, train_plainly, write_script
from trainer_agent.script.user_module import load
from trireme.plain import run
from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.records import Phase

EVALUATED = """
    def evaluate(model, batch):
        out = model(batch["x"])
        assert out.dtype is torch.bfloat16
        return {"loss": F.cross_entropy(out, batch["y"]) * len(out), "records": len(out)}
"""
FOUR = {
    "lanes": 4,
    "global_batch_size": 12,
    "records_per_task": 6,
    "pservers": 2,
    "epochs": 3,
    "precision": "bf16",
}


async def test_one_lane_has_the_bits_of_plain_pytorch_under_autocast(tmp_path):
    script = write_script(tmp_path)
    spec = spec_for(script, precision="bf16")
    ours = await trained(spec)
    assert {values.dtype for name, values in ours.items() if name.endswith("weight")} == {torch.float32}
    assert differing(ours, train_plainly(script, spec)) == []
    assert differing(ours, train_plainly(script, spec_for(script))) != []


async def test_a_loop_of_ones_own_has_the_same_bits(tmp_path):
    loop, script = write_loop(tmp_path), write_script(tmp_path)
    ours = await trained(spec_for(loop, precision="bf16", storage=str(tmp_path / "loop")))
    assert differing(ours, train_plainly(script, spec_for(script, precision="bf16"))) == []


async def test_one_process_has_the_same_bits_and_evaluates_in_the_same_precision(tmp_path):
    script = write_script(
        tmp_path, evaluate=EVALUATED, evaluation="def evaluation_dataset():\n    return dataset()\n"
    )
    spec = spec_for(script, precision="bf16", evaluation_dataset=spec_for(script).dataset)
    result = run(load(script), spec)
    async with cluster(spec, 1) as made:
        state = await made.ended()
        assert state.result.metrics == result.metrics
        assert differing(made.exported(), dict(result.model.state_dict())) == []


async def test_neither_trainers_nor_a_kill_show_in_the_bits(tmp_path):
    script = write_script(tmp_path)
    alone = await trained(spec_for(script, **FOUR, storage=str(tmp_path / "alone")))
    async with cluster(spec_for(script, **FOUR), 3) as made:
        await made.version(3)
        await made.kill("trainer-0-x")
        await made.version(6)
        made.add_trainer("trainer-3-x")
        assert (await made.ended()).phase is Phase.COMPLETED
        assert differing(made.exported(), alone) == []


async def test_backward_and_what_follows_is_not_under_autocast(build):
    compute = build({"precision": "bf16"})
    await compute.gradient((0, 1), 0, 0, records(4), DoneBlocks())
    assert {view.dtype for view in compute.minibatch.gradient_views} == {torch.float32}
    assert not torch.is_autocast_enabled("cpu")


def test_a_model_without_float32_parameters_is_refused(build):
    model = "def model():\n    return nn.Linear(5, 3).bfloat16()\n"
    with pytest.raises(
        InvalidArgument, match="float32 parameters in bfloat16, and those of the model are bfloat16"
    ):
        build({"precision": "bf16"}, model=model)


def test_float16_is_refused_with_the_reason(tmp_path):
    script = write_script(tmp_path)
    with pytest.raises(ValidationError, match=r"float16 need a scaled loss, .*; use bf16 or fp32"):
        spec_for(script, precision="fp16")
    with pytest.raises(ValidationError, match="'fp32' or 'bf16'"):
        spec_for(script, precision="int8")
