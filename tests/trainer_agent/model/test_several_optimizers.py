"""Several optimizers of one model: each steps its own parameters by its own class, with the gradients of its
own loss, and rests in a step without one. Whole jobs: tests/zoo."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from tests.trainer_agent.done_blocks import DoneBlocks
from tests.trainer_agent.model.test_freezing import POSITIONS, InReplica, OnServers, parameters, trained
from tests.trainer_agent.own_loop.scripts import write_loop
from tests.trainer_agent.scripts import differing, lane_batches, spec_for, write_script
from tests.zoo.training import imported
from trainer_agent.model import losses
from trainer_agent.model.block_states import BlockStates, write_training
from trainer_agent.model.compute import BeforeStep
from trainer_agent.model.torch_compute import TorchCompute
from trainer_agent.model.watch.freezing import FrozenParameters
from trainer_agent.script.user_module import load
from trireme.plain import run
from trireme_shared.protocol.errors import FrozenDiffer, InvalidArgument, TriremeError, UserCodeError
from trireme_shared.protocol.lanes import step_seed
from trireme_shared.protocol.records import Mode
from trireme_shared.protocol.records.step import LanePosition, NodeResult, StepRecord
from trireme_shared.protocol.wire.messages import PushBlock, PushHeader

MODEL = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(5, 24), nn.Linear(24, 3)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

def model():
    return Net()
"""
PARTS_OF_LOSS = """
def both(model, batch):
    if model.training:
        model.steps += 1
    seen = model.body(batch["x"]).tanh()
    of_head = F.cross_entropy(model.head(seen), batch["y"])
    return of_head * 0.5 + seen.square().mean(), of_head
"""
LOSSES = {
    "one for all": """
def loss(model, batch):
    return {"loss": both(model, batch)[0], "head_loss": 0.5}
""",
    "each its own": """
def loss(model, batch):
    return {**dict(zip(("body", "head"), both(model, batch))), "half": 0.5}
""",
    "in turns": """
def loss(model, batch):
    of_body, of_head = both(model, batch)
    turn = int(model.steps) % 3
    return {"head": of_head} if turn == 1 else {"body": of_body, "head": None if turn == 2 else of_head}
""",
}
CLASSES = {
    "Adam and SGD": ("Adam({body}, lr=0.02, weight_decay=0.1)", "SGD({head}, lr=0.1, momentum=0.9)"),
    "RMSprop and AdamW": ("RMSprop({body}, lr=0.01)", "AdamW({head}, lr=0.03, fused=True)"),
    "twice Adam": ("Adam({body}, lr=0.02, betas=(0.5, 0.99))", "Adam({head}, lr=0.05, eps=1e-5)"),
}
SCHEDULERS = """
def scheduler(optimizer):
    made = torch.optim.lr_scheduler
    body, head = optimizer["body"], optimizer["head"]
    return {"head": made.StepLR(head, 4, 0.5), "body": made.ExponentialLR(body, 0.9)}
"""
ONE = {"block_bytes": 1024}


def script_with(folder, loss="each its own", classes=CLASSES["Adam and SGD"], **more):
    body, head = (
        text.format(body="model.body.parameters()", head="model.head.parameters()") for text in classes
    )
    made = [each if each.startswith("trireme") else f"torch.optim.{each}" for each in (body, head)]
    return write_script(
        folder,
        model=MODEL,
        loss=PARTS_OF_LOSS + LOSSES.get(loss, loss),
        optimizer=f"\ndef optimizer(model):\n    return {{'body': {made[0]}, 'head': {made[1]}}}\n",
        **more,
    )


def trained_plainly(script, spec):
    """The gradients of each loss by torch.autograd.grad, then all steps, then the schedulers."""
    user = imported(script)
    torch.set_num_threads(1)
    torch.manual_seed(spec.seed)
    net = user.model()
    optimizers = user.optimizer(net)
    schedulers = user.scheduler(optimizers) if hasattr(user, "scheduler") else {}
    for number, (batch,) in enumerate(lane_batches(script, spec)):
        torch.manual_seed(step_seed(spec.seed, number, 0))
        found = user.loss(net.train(), batch)
        given = {name: found.get("loss", found.get(name)) for name in optimizers}
        gradients = {}
        for name, loss in given.items():
            held = [p for group in optimizers[name].param_groups for p in group["params"]]
            made = (
                torch.autograd.grad(loss, held, retain_graph=True) if loss is not None else [None] * len(held)
            )
            gradients |= zip(held, made, strict=True)
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        for one in optimizers.values():
            one.step()
        for one in schedulers.values():
            one.step()
    return dict(net.state_dict()), optimizers


def spec_of(script, kind=OnServers, **values):
    return spec_for(
        script, **({"strategy": "collective", "pservers": 0} if kind is InReplica else {}), **ONE, **values
    )


@pytest.fixture
def executor():
    with ThreadPoolExecutor(1) as made:
        yield made


def without_counter(state):
    return {name: value for name, value in state.items() if name != "steps"}


@pytest.mark.parametrize("kind", [OnServers, InReplica])
@pytest.mark.parametrize(
    ("loss", "classes"),
    [*((loss, "Adam and SGD") for loss in LOSSES), *(("in turns", each) for each in CLASSES)],
)
async def test_the_bits_are_those_of_plain_pytorch(tmp_path, executor, kind, loss, classes):
    """Alone, in a job, and where others go on from a copy of each version."""
    script = script_with(tmp_path, loss, CLASSES[classes], scheduler=SCHEDULERS)
    spec = spec_of(script, kind)
    plain, _ = trained_plainly(script, spec)
    assert differing(dict(run(load(script), spec).model.state_dict()), plain) == []
    plain = without_counter(plain)
    assert differing(parameters(await trained(kind, script, spec, executor)), plain) == []
    assert differing(parameters(await trained(kind, script, spec, executor, range(1, 14, 3))), plain) == []


async def test_a_rule_of_whole_parameters_may_stand_beside_one_of_elements(tmp_path, executor):
    classes = "trireme.optim.LAMB({body}, lr=0.02)", "SGD({head}, lr=0.1)"
    script = script_with(tmp_path, "in turns", classes)
    spec = spec_of(script, InReplica)
    plain, _ = trained_plainly(script, spec)
    assert (
        differing(parameters(await trained(InReplica, script, spec, executor)), without_counter(plain)) == []
    )
    with pytest.raises(InvalidArgument, match="LAMB needs the norm of each whole parameter"):
        TorchCompute(load(script), spec_of(script), executor)


async def test_a_loss_that_trained_all_parameters_would_show(tmp_path, executor, monkeypatch):
    """Ablation: backward without `inputs`."""
    script = script_with(tmp_path)
    spec = spec_of(script)
    plain, _ = trained_plainly(script, spec)
    real = torch.autograd.backward
    monkeypatch.setattr(losses.torch.autograd, "backward", lambda loss, inputs, **more: real(loss, **more))
    assert differing(dict(run(load(script), spec).model.state_dict()), plain)


async def test_a_step_that_stepped_all_optimizers_would_show(tmp_path, executor, monkeypatch):
    """Ablation: nobody tells which optimizers rest. Their blocks are sent here, as in exchange native."""
    script = script_with(tmp_path, "in turns")
    spec = spec_of(script)
    plain = without_counter(trained_plainly(script, spec)[0])
    monkeypatch.setattr(
        FrozenParameters, "idle", property(lambda _: frozenset(), lambda *_: None), raising=False
    )
    assert differing(parameters(await trained(OnServers, script, spec, executor)), plain) == []
    monkeypatch.setattr(
        NodeResult, "model_construct", lambda **fields: NodeResult(**fields | {"resting": ()})
    )
    assert differing(parameters(await trained(OnServers, script, spec, executor)), plain)


async def test_blocks_of_an_optimizer_that_rests_are_not_sent(tmp_path, executor):
    script = script_with(tmp_path, "in turns")
    compute = TorchCompute(load(script), spec_of(script), executor)
    compute.begin_step(BeforeStep(version=StepRecord(version=0, positions=POSITIONS)))
    rows = [{"x": np.zeros(5, np.float32), "y": np.int64(1)}] * 4
    done = DoneBlocks()
    result = await compute.gradient((0, 1), 0, 0, rows, done)
    sent = {block for block in done if compute.contribution((0, 1), block).nbytes}
    of = {place.name: set(compute.plan.blocks_of(place)) for place in compute.places}
    assert not sent & (of["body.weight"] | of["body.bias"])
    assert sent >= of["head.weight"] | of["head.bias"]
    assert result.resting == ((0, 2),)
    assert result.metrics.keys() == {"head"}
    assert result.loss_sum == result.metrics["head"].total


async def test_losses_are_metrics_and_add_up_to_the_loss(tmp_path, executor):
    script = script_with(tmp_path)
    compute = TorchCompute(load(script), spec_of(script), executor)
    compute.begin_step()
    rows = [{"x": np.ones(5, np.float32), "y": np.int64(1)}] * 4
    result = await compute.gradient((0, 1), 0, 0, rows, DoneBlocks())
    found = {name: value.total for name, value in result.metrics.items()}
    assert found.keys() == {"body", "head", "half"}
    assert result.loss_sum == pytest.approx(found["body"] + found["head"], rel=1e-6)
    sums = await compute.evaluate(rows)
    assert sums["loss"] == pytest.approx(sums["body"] + sums["head"], rel=1e-6)
    assert (sums["half"], sums["records"]) == (2.0, 4)


async def test_the_state_is_that_of_each_optimizer_and_a_job_begins_with_it(tmp_path, executor):
    script = script_with(tmp_path, "in turns", scheduler=SCHEDULERS)
    spec = spec_of(script)
    _, plain = trained_plainly(script, spec)
    made = await trained(OnServers, script, spec, executor)
    compute = made.compute
    states = BlockStates(compute.plan, compute.model, compute.optimizer)
    for number, block in made.store.blocks.items():
        for name, tensor in block.optimizer_state().items():
            into = states.into(number, name)
            assert into is not None
            into[:] = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
    states.give_back()
    url = str(tmp_path / "training.pt")
    write_training(url, compute.model, compute.optimizer, made.record.lane_zero)
    saved = torch.load(url, weights_only=True)
    for name, one in plain.items():
        mine, theirs = saved["optimizer"][name], one.state_dict()
        assert str(mine["state"]) == str(theirs["state"])
    assert saved["scheduler"].keys() == {"head", "body"}
    again = spec_of(script, init_from=url, init_optimizer=True)
    expected = dict(run(load(script), again).model.state_dict())
    assert (
        differing(parameters(await trained(OnServers, script, again, executor)), without_counter(expected))
        == []
    )
    saved["optimizer"].pop("head")
    torch.save(saved, url)
    with pytest.raises(
        InvalidArgument, match="it has states of body, and those of the script are body, head"
    ):
        TorchCompute(load(script), again, executor)


async def test_lanes_that_disagree_on_who_rests_are_told(tmp_path, executor):
    by_records = LOSSES["in turns"].replace("int(model.steps) % 3", "len(batch['y']) - 3")
    script = script_with(tmp_path, by_records)
    compute = TorchCompute(load(script), spec_of(script, lanes=2), executor)
    row = {"x": np.zeros(5, np.float32), "y": np.int64(1)}
    compute.begin_step()
    await compute.gradient((0, 2), 0, 0, [row] * 4, DoneBlocks())
    with pytest.raises(
        UserCodeError, match=r"the optimizer of the parameter body\.weight has a loss"
    ) as caught:
        await compute.gradient((0, 2), 1, 0, [row] * 5, DoneBlocks())
    assert caught.value.details["fatal"]


def test_servers_refuse_lanes_that_disagree_on_who_rests(tmp_path, executor):
    script = script_with(tmp_path)
    compute = TorchCompute(load(script), spec_of(script, lanes=2), executor)
    positions = tuple(LanePosition(lane=lane) for lane in range(2))
    first = StepRecord(version=0, positions=positions, lane_zero=compute.initial_lane_zero())
    store = OnServers(compute, first, lanes=2).store
    for lane, resting in enumerate(((), ((0, 2),))):
        header = PushHeader(
            job="j",
            generation=0,
            mode=Mode.SYNC,
            trainer=f"t{lane}",
            positions=(positions[lane],),
            lane_zero=first.lane_zero if not lane else None,
        )
        push = store.admit(header)
        push.results[lane, lane + 1] = NodeResult(frozen=(), resting=resting)
        item = PushBlock(block=0, lanes=(lane, lane + 1), count=1)
        if not lane:
            store.apply(push, item, compute.current(0))
            continue
        with pytest.raises(FrozenDiffer) as caught:
            store.apply(push, item, compute.current(0))
        assert caught.value.details["parameter"] == 0
        assert caught.value.details["kind"] == "resting"


OTHERS = "\ndef optimizer(model):\n    return {}\n"
HEAD, BODY = "torch.optim.SGD(model.head.parameters(), 0.1)", "torch.optim.Adam(model.body.parameters())"
REFUSED = {
    "a parameter of both": (
        {"optimizer": OTHERS.format(f"[{HEAD}, torch.optim.Adam(model.parameters())]")},
        r"optimizers 0 and 1, which both hold a parameter \(number 2 of 1, of shape \[3, 24\]\)",
    ),
    "a name of the job": (
        {"optimizer": OTHERS.format(f"{{'loss': {HEAD}, 'body': {BODY}}}")},
        "an optimizer with the name 'loss': the name of an optimizer is also that of its loss",
    ),
    "no optimizer": (
        {"optimizer": OTHERS.format(f"[{HEAD}, 1]")},
        "optimizer.model. returned list, not a torch.optim optimizer",
    ),
    "a class of ones own": (
        {
            "optimizer": OTHERS.format(
                f"[{HEAD}, type('Mine', (torch.optim.Adam,), {{}})(model.body.parameters())]"
            )
        },
        r"Mine cannot run on parameter servers",
    ),
    "a hook of one": (
        {
            "optimizer": f"""
def optimizer(model):
    made = [{HEAD}, {BODY}]
    made[1].register_step_post_hook(lambda *_: None)
    return made
"""
        },
        "the optimizer Adam has a hook",
    ),
    "too few losses": (
        {
            "optimizer": OTHERS.format(f"[{HEAD}, {BODY}]"),
            "loss": "\ndef loss(m, b):\n    return both(m, b)[:1]\n",
        },
        "the script gave 1 losses, and it has 2 optimizers",
    ),
    "no loss at all": (
        {"loss": "\ndef loss(m, b):\n    return {'half': both(m, b)[0]}\n"},
        "the script gave no loss, and its optimizers are body, head",
    ),
    "one loss and one of an optimizer": (
        {"loss": "\ndef loss(m, b):\n    return {'loss': both(m, b)[0], 'head': both(m, b)[1]}\n"},
        'the script gave "loss" and head, the loss of an optimizer',
    ),
    "a loss of the others' parameters": (
        {"loss": "\ndef loss(m, b):\n    return {'head': m.body(b['x']).mean(), 'body': both(m, b)[0]}\n"},
        r"the loss of the optimizer head depends on none of its parameters \(head.weight, ...\)",
    ),
    "a loss without a gradient": (
        {"loss": "\ndef loss(m, b):\n    return {'head': torch.zeros(()), 'body': both(m, b)[0]}\n"},
        "a scalar that does not depend on the parameters as the loss of the optimizer head",
    ),
    "backward in loss": (
        {"loss": "\ndef loss(m, b):\n    both(m, b)[1].backward()\n    return {'body': both(m, b)[0]}\n"},
        "give the losses in turns, one in this step and the other in the next",
    ),
    "a scheduler that is none": (
        {"scheduler": "\ndef scheduler(optimizer):\n    return [1, None]\n"},
        "scheduler.optimizer. returned int, not a scheduler",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_it_is_refused_in_jobs_and_alone(tmp_path, executor, name):
    changes, message = REFUSED[name]
    script = script_with(tmp_path)
    parts = {"model": MODEL, "loss": PARTS_OF_LOSS + LOSSES["each its own"]}
    parts["optimizer"] = OTHERS.format(f"{{'body': {BODY}, 'head': {HEAD}}}")
    parts |= changes
    parts["loss"] = PARTS_OF_LOSS * ("def both" not in parts["loss"]) + parts["loss"]
    script = write_script(tmp_path, **parts)
    spec = spec_of(script)
    with pytest.raises(TriremeError, match=message):
        run(load(script), spec)
    with pytest.raises(TriremeError, match=message):
        compute = TorchCompute(load(script), spec, executor)
        compute.begin_step()
        rows = [{"x": np.zeros(5, np.float32), "y": np.int64(1)}] * 4
        await compute.gradient((0, 1), 0, 0, rows, DoneBlocks())


async def test_in_an_asynchronous_job_all_are_stepped(tmp_path, executor):
    rows = [{"x": np.zeros(5, np.float32), "y": np.int64(1)}] * 4
    compute = TorchCompute(
        load(script_with(tmp_path)), spec_of(script_with(tmp_path), mode="async"), executor
    )
    compute.begin_step()
    assert (await compute.gradient((0, 1), 0, 0, rows, DoneBlocks())).metrics.keys() == {
        "body",
        "head",
        "half",
    }
    script = script_with(tmp_path, "in turns")
    compute = TorchCompute(load(script), spec_of(script, mode="async"), executor)
    compute.begin_step()
    with pytest.raises(UserCodeError, match="no loss for the optimizer body"):
        await compute.gradient((0, 1), 0, 0, rows, DoneBlocks())


IN_LOOP = {
    "model": """
        torch.manual_seed(7)
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.head = nn.Linear(5, 24), nn.Linear(24, 3)
        model = Net()
        first = torch.optim.Adam(model.body.parameters(), lr=0.02)
        second = torch.optim.SGD(model.head.parameters(), lr=0.1)
        dataset = trireme.data.Npy({folder!r} + "/x.npy", {folder!r} + "/y.npy", aligned=True)
    """,
    "prepare": """
        model, (first, second), batches = trireme.prepare(model, [first, second], dataset)
        turn = 0
    """,
}
LOOPS = {
    "of both": """
        for batch in batches:
            first.zero_grad()
            second.zero_grad()
            seen = model.body(batch["x"]).tanh()
            trireme.backward([seen.square().mean(), F.cross_entropy(model.head(seen), batch["y"])])
            first.step()
            second.step()
    """,
    "without a step": """
        for batch in batches:
            seen = model.body(batch["x"]).tanh()
            trireme.backward([seen.square().mean(), F.cross_entropy(model.head(seen), batch["y"])])
            first.step()
    """,
    "in two phases": """
        for batch in batches:
            trireme.backward([model.body(batch["x"]).square().mean(), None])
            first.step()
            trireme.backward([None, model.head(model.body(batch["x"]).detach()).square().mean()])
            second.step()
    """,
    "a step that is not due": """
        for batch in batches:
            trireme.backward([model.body(batch["x"]).square().mean(), None])
            second.step()
    """,
}


def test_a_loop_of_ones_own_steps_both(tmp_path):
    script = write_loop(tmp_path, **IN_LOOP, loop=LOOPS["of both"])
    spec = spec_for(script, **ONE)
    user = load(script)
    found = run(user, spec)
    user.loop.close()
    torch.manual_seed(7)
    body, head = torch.nn.Linear(5, 24), torch.nn.Linear(24, 3)
    optimizers = torch.optim.Adam(body.parameters(), lr=0.02), torch.optim.SGD(head.parameters(), lr=0.1)
    for ((batch),) in lane_batches(script, spec):
        seen = body(batch["x"]).tanh()
        of_body = seen.square().mean()
        of_head = torch.nn.functional.cross_entropy(head(seen), batch["y"])
        of_body.backward(inputs=list(body.parameters()), retain_graph=True)
        of_head.backward(inputs=list(head.parameters()))
        for one in optimizers:
            one.step()
            one.zero_grad()
    assert torch.equal(found.model.body.weight, body.weight)
    assert torch.equal(found.model.head.weight, head.weight)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("without a step", "asks for the next batch, and optimizer.step was not called"),
        ("in two phases", "trireme.backward was called twice|without a batch"),
        ("a step that is not due", "for an optimizer that has no loss in it"),
    ],
)
def test_a_loop_of_ones_own_is_told_what_it_does_wrong(tmp_path, name, message):
    script = write_loop(tmp_path, **IN_LOOP, loop=LOOPS[name])
    user = load(script)
    with pytest.raises(TriremeError, match=message):
        run(user, spec_for(script, **ONE))
    user.loop.close()
