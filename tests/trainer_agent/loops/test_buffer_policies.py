"""What the script's `buffers` says of buffers that differ between lanes: "first" keeps the first lane's one,
"mean" the mean over the lanes. The examples of docs/buffers.md are trained as they stand there."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.trainer_agent.cluster import cluster, trained, trained_in
from tests.trainer_agent.collective.cluster import cluster as collective_cluster
from tests.trainer_agent.loops.test_averaged_buffers import warnings_of
from tests.trainer_agent.own_loop.scripts import write_loop
from tests.trainer_agent.scripts import differing, lane_batches, spec_for, train_plainly, write_script
from trainer_agent.model.torch_compute import TorchCompute
from trainer_agent.script.user_module import load
from trireme.plain import plain_spec, run
from trireme_shared.protocol.errors import InvalidArgument, UserCodeError
from trireme_shared.protocol.records import Phase

PAGE = Path(__file__).parents[3] / "docs" / "buffers.md"
EXAMPLES = ["EMA", "MoCo's queue", "A codebook (VQ-VAE)", "A running quantile"]
COLLECTIVE = {"strategy": "collective", "pservers": 0}
WAYS = [(cluster, {}), (collective_cluster, COLLECTIVE)]
# Its values do not depend on parameters, so what follows the first lane is known without training.
INPUTS = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(5, 3)
        self.register_buffer("queue", torch.zeros(40, 5))
        self.register_buffer("queue_ptr", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            rows = (self.queue_ptr + torch.arange(len(x))) % 40
            self.queue[rows] = x
            self.queue_ptr += len(x)
        return self.head(x)

def model():
    return Model()
"""
FIRST = 'buffers = {"queue*": "first"}\n'


def example(heading):
    """The code of a section."""
    of_section = rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)"
    (section,) = re.findall(of_section, PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return code


def written(folder, heading, **parts):
    return write_script(folder, model=example(heading), loss="", **parts)


def first_lane_rows(script, spec):
    """The queue of INPUTS when lane 0 alone has filled it."""
    queue, pointer = torch.zeros(40, 5), 0
    for batches in lane_batches(script, spec):
        x = batches[0]["x"]
        queue[(pointer + torch.arange(len(x))) % 40] = x
        pointer += len(x)
    return queue, pointer


@pytest.mark.parametrize("heading", EXAMPLES)
@pytest.mark.parametrize(("make", "values"), WAYS, ids=["pservers", "collective"])
async def test_the_examples_have_the_bits_of_plain_pytorch_with_one_lane(tmp_path, heading, make, values):
    script = written(tmp_path, heading)
    spec = spec_for(script, epochs=1, **values)
    exported, _ = await trained_in(make, spec)
    assert differing(exported, train_plainly(script, spec)) == []


@pytest.mark.parametrize("heading", EXAMPLES)
async def test_the_examples_have_the_same_bits_with_four_lanes_whoever_computes_them(tmp_path, heading):
    script = written(tmp_path, heading)
    found = []
    for name, (make, values), trainers in (
        ("one", WAYS[0], 1),
        ("three", WAYS[0], 3),
        ("collective", WAYS[1], 2),
    ):
        spec = spec_for(
            script, lanes=4, epochs=1, global_batch_size=16, storage=str(tmp_path / name), **values
        )
        exported, _ = await trained_in(make, spec, trainers)
        found.append(exported)
    assert [differing(found[0], other) for other in found[1:]] == [[], []]
    assert all(bool(value.isfinite().all()) for value in found[0].values())
    if heading == "MoCo's queue":
        assert torch.allclose(found[0]["queue"].norm(dim=1), torch.ones(32), atol=1e-6)


@pytest.mark.parametrize("heading", EXAMPLES)
async def test_the_examples_leave_no_warning(tmp_path, heading):
    script = written(tmp_path, heading)
    assert await warnings_of(spec_for(script, lanes=4, epochs=1, global_batch_size=16), 2) == []


@pytest.mark.parametrize(
    ("make", "values"),
    [*WAYS, (collective_cluster, COLLECTIVE | {"exchange": "native", "trainers": 3})],
    ids=["pservers", "collective", "native"],
)
async def test_what_follows_the_first_lane_has_its_values_alone(tmp_path, make, values):
    """Also if a trainer dies, and another one computes its lanes."""
    script = write_script(tmp_path, model=INPUTS, buffers=FIRST)
    spec = spec_for(script, lanes=4, epochs=3, records_per_task=7, global_batch_size=16, **values)
    exported, _ = await trained_in(make, spec, 3, death_at=5 if make is cluster else None)
    queue, pointer = first_lane_rows(script, spec)
    assert torch.equal(exported["queue"], queue)
    assert exported["queue_ptr"] == pointer


async def test_without_it_rows_are_means_of_rows(tmp_path):
    script = write_script(tmp_path, model=INPUTS)
    spec = spec_for(script, lanes=4, epochs=1, global_batch_size=16)
    assert not torch.equal((await trained(spec))["queue"], first_lane_rows(script, spec)[0])


async def test_only_what_the_script_does_not_name_is_told(tmp_path):
    two = INPUTS.replace(
        "self.queue_ptr += len(x)", "self.queue_ptr += len(x)\n            self.other.add_(x.mean())"
    )
    two = two.replace("self.head = ", 'self.register_buffer("other", torch.zeros(()))\n        self.head = ')
    script = write_script(tmp_path, model=two, buffers=FIRST)
    (told,) = await warnings_of(spec_for(script, lanes=4, epochs=1), 1)
    assert "the buffer other differs between lanes" in told
    assert 'buffers = {"other": "first"}' in told


async def test_a_trainer_with_another_policy_is_refused(tmp_path):
    script = write_script(tmp_path, model=INPUTS, buffers=FIRST)
    other = write_script(tmp_path, "other", model=INPUTS)
    async with cluster(spec_for(script, lanes=4, epochs=6), 1) as made:
        await made.version(1)
        made.add_trainer("trainer-1-x", other)
        error = await made.running["trainer-1-x"]
        assert "or what `buffers` says" in str(error)
        assert "200 float32 first" in str(error)
        assert (await made.ended()).phase is Phase.COMPLETED


async def test_asynchronous_jobs_refuse_what_needs_lanes(build):
    with pytest.raises(
        InvalidArgument, match="buffers says 'first' for 'queue\\*', and the job is asynchronous"
    ):
        build({"mode": "async"}, model=INPUTS, buffers=FIRST)


def test_a_loop_of_ones_own_gives_them_to_prepare(tmp_path):
    given = "model, optimizer, dataset, buffers={'1.running_*': 'first'}"
    call = f"model, optimizer, batches = trireme.prepare({given})"
    script = write_loop(tmp_path, prepare=call)
    with ThreadPoolExecutor(1) as executor:
        compute = executor.submit(TorchCompute, load(script), spec_for(script), executor).result()
        assert compute.plan.policies == {"1.running_mean": "first", "1.running_var": "first"}
        assert ("first", 56) in [(each.kind, each.elements) for each in compute.layout.segments]
        compute.close()
        wrong = write_loop(tmp_path, "wrong", prepare=call.replace("'first'", "'fist'"))
        with pytest.raises(
            UserCodeError, match=r"as trireme.prepare got it, says 'fist' .* did you mean 'first'"
        ):
            executor.submit(TorchCompute, load(wrong), spec_for(wrong), executor).result()


def test_plain_training_refuses_names_of_nothing_too(tmp_path):
    user = load(write_script(tmp_path, model=INPUTS, buffers='buffers = {"quue": "first"}'))
    with pytest.raises(InvalidArgument, match="buffers says 'first' for 'quue', and the model has no such"):
        run(user, plain_spec(user, {}))
