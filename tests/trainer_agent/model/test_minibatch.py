"""What the user's script does wrong is refused with one message."""

from __future__ import annotations

import collections
import dataclasses
import types
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
import torch

from tests.trainer_agent.done_blocks import DoneBlocks
from tests.trainer_agent.scripts import records
from trainer_agent.model.compute import metrics_of
from trainer_agent.model.devices import on_device
from trireme_shared.protocol.errors import InvalidArgument, UserCodeError
from trireme_shared.protocol.metrics import Logged
from trireme_shared.protocol.records.tasks import MetricValue

OWN = """
class NAME(torch.optim.SGD):
    pass

def optimizer(model):
    return NAME(model.parameters(), lr=0.1)
"""


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"model": "def model():\n    return 3\n"}, r"model\(\) returned int"),
        ({"model": "def model():\n    return nn.Linear(5, 3).double()\n"}, "weight has dtype torch.float64"),
        ({"model": "def model():\n    return nn.LazyLinear(3)\n"}, "weight is not initialised"),
        ({"optimizer": "def optimizer(model):\n    return 3\n"}, r"optimizer\(model\) returned int"),
        (
            {"optimizer": "def optimizer(model):\n    return torch.optim.LBFGS(model.parameters())\n"},
            "LBFGS cannot run on parameter servers: its rule needs whole parameters",
        ),
        (
            {"optimizer": OWN.replace("NAME", "Lamb")},
            r"Lamb cannot run on parameter servers: its rule needs whole parameters \(their norms",
        ),
        ({"optimizer": OWN.replace("NAME", "Lion")}, "script.Lion cannot run on parameter servers$"),
        (
            {
                "optimizer": "def optimizer(model):\n"
                "    return torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=1)\n"
            },
            "the optimizer holds 1 parameters that are not the model's",
        ),
        (
            {"model": "def model():\n    return nn.Linear(5, 3).requires_grad_(False)\n"},
            "the model has no parameter to train",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_what_cannot_be_trained_is_refused_with_one_message(build, parts, message):
    with pytest.raises(InvalidArgument, match=message):
        build(**parts)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (
            "def optimizer(model):\n    return torch.optim.LBFGS(model.parameters())\n",
            (
                r"LBFGS cannot run in a collective job: its step computes the loss several times "
                r"\(by a closure\)"
            ),
        ),
        (
            OWN.replace("NAME", "Lamb"),
            "script.Lamb cannot run in a collective job: each trainer makes the optimizer",
        ),
        ("def optimizer(model):\n    return 3\n", r"optimizer\(model\) returned int"),
    ],
)
def test_an_optimizer_that_a_collective_job_cannot_have_is_refused_with_its_reason(build, optimizer, message):
    with pytest.raises(InvalidArgument, match=message) as caught:
        build({"strategy": "collective", "pservers": 0}, optimizer=optimizer)
    assert "parameter server" not in str(caught.value)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"loss": "def loss(model, batch):\n    return 1.0\n"}, "returned float"),
        (
            {"loss": "def loss(model, batch):\n    return model(batch['x'])\n"},
            r"returned a tensor of shape \(4, 3\)",
        ),
        (
            {"loss": "def loss(model, batch):\n    return torch.ones(())\n"},
            "does not depend on the parameters",
        ),
        ({"loss": "def loss(model, batch):\n    return batch['z']\n"}, "KeyError: 'z'"),
        ({"collate": "def collate(records):\n    raise ValueError(len(records))\n"}, "ValueError: 4"),
    ],
)
async def test_what_goes_wrong_in_a_minibatch_is_the_users(build, parts, message):
    compute = build(**parts)
    with pytest.raises(UserCodeError, match=message):
        await compute.gradient((0, 1), 0, 0, records(4), DoneBlocks())


async def test_without_evaluate_the_loss_is_evaluated(build):
    compute = build()
    sums = await compute.evaluate(records(4))
    assert sums["records"] == 4
    assert await compute.metrics(sums) == {"loss": sums["loss"] / 4}


async def test_sums_that_are_no_numbers_are_refused(build):
    compute = build(evaluation="def evaluate(model, batch):\n    return [1]\n")
    with pytest.raises(
        UserCodeError, match=r"evaluate\(model, batch\) returned list; return a dict of numbers"
    ):
        await compute.evaluate(records(4))


LOSS = """
import contextlib

def loss(model, batch):
    if batch["x"].max() > 100:
        CALL
    return F.cross_entropy(model(batch["x"]), batch["y"])
"""
LARGE = [record | {"x": record["x"] + 1000} for record in records(4)]


@pytest.mark.parametrize(
    "call",
    [
        "model(batch['x']).sum().backward()",
        "model(batch['x']).sum().backward(); model.zero_grad()",
        "with contextlib.suppress(Exception): model(batch['x']).sum().backward()",
    ],
)
async def test_backward_in_the_users_loss_is_refused_and_no_block_is_finished(build, call):
    compute, finished = build(loss=LOSS.replace("CALL", call)), DoneBlocks()
    everything = [block.number for block in compute.plan.blocks]
    for _ in range(2):  # from the second backward on, blocks are finished while it runs
        await compute.gradient((0, 1), 0, 0, records(4), finished)
        expected = [bytes(compute.contribution((0, 1), block)) for block in everything]
        compute.forget_nodes()
    finished.clear()
    with pytest.raises(UserCodeError, match=r"the script calls backward\(\) itself; return the loss"):
        await compute.gradient((0, 1), 0, 0, LARGE, finished)
    assert finished == []
    compute.forget_nodes()
    await compute.gradient((0, 1), 0, 0, records(4), finished)
    assert sorted(finished) == everything
    assert [bytes(compute.contribution((0, 1), block)) for block in everything] == expected


async def test_the_users_loss_may_use_the_gradient_of_its_input(build):
    penalty = "torch.autograd.grad(model(batch['x'].requires_grad_()).sum(), batch['x'], create_graph=True)"
    compute = build(loss=LOSS.replace("CALL", penalty))
    result = await compute.gradient((0, 1), 0, 0, LARGE, DoneBlocks())
    assert result.records == 4


async def test_backward_in_the_users_evaluation_is_refused(build):
    code = """
        def evaluate(model, batch):
            with torch.enable_grad():
                model(batch["x"]).sum().backward()
            return {"n": 1}
        """
    compute = build(evaluation=code)
    with pytest.raises(UserCodeError, match=r"the script calls backward\(\) itself"):
        await compute.evaluate(records(4))


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: Any
    name: str = "batch"


@dataclasses.dataclass
class Padded:
    x: Any
    length: int = dataclasses.field(init=False, default=7)


class Encoding(collections.UserDict[str, Any]):
    """A mapping with an attribute and a `to` that returns nothing new, as those of tokenizers."""

    def to(self, device: torch.device) -> Encoding:
        self.data = {name: value.to(device) for name, value in self.data.items()}
        return self


@pytest.mark.parametrize(
    "pack",
    [
        lambda x: x,
        lambda x: [x, 3],
        lambda x: (x, "text"),
        lambda x: Pair(x, None),
        Frozen,
        Padded,
        lambda x: {"x": [Pair(x, 1)]},
        lambda x: collections.OrderedDict(x=x),
        lambda x: collections.defaultdict(list, x=x),
        lambda x: collections.UserDict(x=x),
        lambda x: Encoding(x=x),
    ],
)
def test_a_batch_moves_to_a_device_in_containers_of_the_same_kind(pack):
    here, there = torch.ones(3), torch.device("meta")
    moved, expected = on_device(pack(here), there), pack(here.to(there))
    assert described(moved) == described(expected)


def test_what_knows_how_to_move_itself_does():
    moved = on_device((torch.nn.utils.rnn.pack_sequence([torch.ones(3)]), 1), torch.device("meta"))[0]
    assert (moved.data.device.type, moved.batch_sizes.device.type) == ("meta", "cpu")


def described(batch):
    """Kinds, devices and other values, all the way down."""
    match batch:
        case torch.Tensor():
            return str(batch.device), tuple(batch.shape)
        case list() | tuple():
            return type(batch), [described(value) for value in batch]
        case Mapping():
            return type(batch), {name: described(value) for name, value in batch.items()}
        case Frozen() | Padded():
            return type(batch), [described(getattr(batch, f.name)) for f in dataclasses.fields(batch)]
    return batch


def test_the_users_own_containers_stay_as_they_are():
    batches = [Padded(torch.ones(3)), collections.UserDict(x=torch.ones(3)), [torch.ones(3)]]
    before = [described(batch) for batch in batches]
    for batch in batches:
        on_device(batch, torch.device("meta"))
    assert [described(batch) for batch in batches] == before
    assert (
        on_device(types.MappingProxyType({"x": torch.ones(3)}), torch.device("meta"))["x"].device.type
        == "meta"
    )
    assert on_device(Padded, torch.device("meta")) is Padded


LOGS = """
def loss(model, batch):
    import trireme
    found = F.mse_loss(model(batch['x']), torch.zeros(len(batch['x']), 3))
    trireme.log_metrics({"rows": len(batch['x']), "error": found})
    return found
"""


async def test_what_the_loss_logs_comes_with_the_lanes_result_and_a_step_sums_it(build):
    compute = build(loss=LOGS)
    compute.begin_step()
    node = (0, 2)
    results = [
        await compute.gradient(node, lane, 1, records(4 if lane == 0 else 2), DoneBlocks())
        for lane in range(*node)
    ]
    empty = await compute.gradient((2, 3), 2, 1, None, DoneBlocks())
    assert [result.metrics["rows"] for result in results] == [
        Logged(4.0, 1.0, 4.0, 4.0),
        Logged(2.0, 1.0, 2.0, 2.0),
    ]
    assert results[0].metrics["error"].total * 4 == pytest.approx(results[0].loss_sum)
    assert empty.metrics == {}
    share = metrics_of([*results, empty], 7, 0, 0)
    assert share.metrics["rows"] == MetricValue(total=6.0, weight=2.0, least=2.0, most=4.0)


DICT = """
def collate(records):
    import trireme
    trireme.log(collated=len(records))
    return {"x": torch.stack([torch.from_numpy(record["x"]) for record in records])}

def loss(model, batch):
    found = F.mse_loss(model(batch['x']), torch.zeros(len(batch['x']), 3))
    return {"loss": found, "twice": 2 * found, "rows": len(batch['x'])}
"""


async def test_a_dict_of_loss_and_metrics_is_trained_and_evaluated_by_records(build):
    plain, compute = (
        build(loss=DICT.replace('{"loss": found, "twice": 2 * found, "rows": len(batch[\'x\'])}', "found")),
        build(loss=DICT),
    )
    for each in (plain, compute):
        each.begin_step()
    node = (0, 2)
    results = [
        await compute.gradient(node, lane, 1, records(4 if lane == 0 else 2), DoneBlocks())
        for lane in range(*node)
    ]
    same = [
        await plain.gradient(node, lane, 1, records(4 if lane == 0 else 2), DoneBlocks())
        for lane in range(*node)
    ]
    assert [result.loss_sum for result in results] == [result.loss_sum for result in same]
    assert all(
        bytes(compute.contribution(node, block)) == bytes(plain.contribution(node, block))
        for block in range(len(compute.plan.blocks))
    )
    share = metrics_of(results, 7, 0, 0)
    assert share.metrics["rows"] == MetricValue(total=20.0, weight=6.0, least=2.0, most=4.0)
    assert share.metrics["collated"] == MetricValue(total=6.0, weight=2.0, least=2.0, most=4.0)
    assert share.metrics["twice"].total == pytest.approx(2 * share.loss_sum)
    sums = await compute.evaluate(records(4))
    assert sums["records"] == 4
    assert await compute.metrics(sums) == {"loss": sums["loss"] / 4, "twice": sums["twice"] / 4, "rows": 4.0}


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ('{"accuracy": model(batch["x"]).mean()}', 'its entry "loss" is what is trained'),
        ('{"loss": 1.0}', "returned float"),
        ('{"loss": model(batch["x"]).mean(), "logits": model(batch["x"])}', "the metric logits is"),
        ('{"loss": model(batch["x"]).mean(), "lr": 1}', "the job itself uses"),
    ],
)
async def test_a_dict_that_cannot_be_trained_is_the_users_error(build, found, message):
    compute = build(loss=f"def loss(model, batch):\n    return {found}\n")
    compute.begin_step()
    with pytest.raises(UserCodeError, match=message):
        await compute.gradient((0, 1), 0, 1, records(4), DoneBlocks())


async def test_a_name_that_cannot_be_logged_is_an_error_of_the_script(build):
    compute = build(loss=LOGS.replace("rows", "loss"))
    compute.begin_step()
    with pytest.raises(UserCodeError, match="the job itself uses"):
        await compute.gradient((0, 1), 0, 1, records(4), DoneBlocks())
