"""What people bring and a job cannot take yet is refused by name, with the way that it can take: word by
word, and the same under `python script.py`."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.trainer_agent.own_loop.scripts import write_loop
from tests.trainer_agent.scripts import spec_for
from tests.zoo.models import ACTOR_CRITIC, ZOO, Model
from tests.zoo.training import spec_of, write_script
from trainer_agent.model.torch_compute import TorchCompute
from trainer_agent.script.inspect import first_records
from trainer_agent.script.user_module import load
from trireme.plain import run
from trireme_shared.protocol.errors import TriremeError

EMA = "averages of parameters are trireme.nn.Ema(module, decay)"
UPDATED = (
    "called update_parameters of an AveragedModel; that would run once for each minibatch that this trainer "
    f"computes, on averages that no other trainer gets and nobody saves: {EMA}, a part of the model "
    "(docs/buffers.md#ema)"
)
AVERAGED_INSIDE = """
class Averaged(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(5, 3)
        self.ema = copy.deepcopy(self.body)

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                for average, value in zip(self.ema.parameters(), self.body.parameters()):
                    average.lerp_(value, 0.1)
        return self.body(x)

def model():
    return Averaged()

def loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])

def optimizer(model):
    return torch.optim.SGD(model{of}.parameters(), lr=0.1)
"""
BY_TORCH_INSIDE = """
class Averaged(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(5, 3)
        self.ema = AveragedModel(self.body)

    def forward(self, x):
        if self.training:
            self.ema.update_parameters(self.body)
        return self.body(x)

def model():
    return Averaged()

def loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])

def optimizer(model):
    return torch.optim.SGD(model.body.parameters(), lr=0.1)
"""
BY_TORCH_BESIDE = """
averages = []

def loss(model, batch):
    if not averages:
        averages.append(AveragedModel(model))
    averages[0].update_parameters(model)
    return F.cross_entropy(model(batch["x"]), batch["y"])
"""
AVERAGED_BESIDE = """
def optimizer(model):
    averaged = AveragedModel(model)
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    made.register_step_post_hook(lambda *_: averaged.update_parameters(model))
    return made
"""
ONE = (
    ACTOR_CRITIC
    + "both = loss\n\ndef optimizer(model):\n    return torch.optim.Adam(model.parameters(), lr=0.01)\n"
)
REFUSED = {
    "a loss for each of one optimizer": (
        ONE + "def loss(model, batch):\n    return dict(zip(('actor', 'critic'), both(model, batch)))\n",
        (
            'InvalidArgument: loss returned a dict with actor, critic; its entry "loss" is what is trained: '
            "of several losses their sum; or let optimizer(model) return a dict with an optimizer for each "
            "(docs/habits.md)"
        ),
        "",
    ),
    "a tuple of losses": (
        ONE,
        (
            "TypeError: loss(model, batch) returned tuple; return the minibatch's mean loss, a scalar with a "
            "gradient; other numbers stand beside it in a dict: {'loss': loss, 'accuracy': accuracy}; "
            "several losses are for as many optimizers, in a list as well (docs/habits.md)"
        ),
        "",
    ),
    "torch's averages in the model": (
        BY_TORCH_INSIDE,
        f"RuntimeError: loss(model, batch) {UPDATED}",
        "",
    ),
    "torch's averages beside the model": (
        ZOO["LoRA"].script + BY_TORCH_BESIDE,
        f"RuntimeError: loss(model, batch) {UPDATED}",
        "",
    ),
    "averages in the model": (
        AVERAGED_INSIDE.replace("{of}", ""),
        (
            "RuntimeError: loss(model, batch) changed the parameter ema.weight; "
            "only the optimizer may "
            "change parameters, because trainers do not share other changes (nn.Embedding "
            "does it with max_norm: "
            f"leave that out; {EMA}, docs/buffers.md; a second optimizer stands beside the first one in what "
            "optimizer(model) returns, and neither is stepped by the script, docs/habits.md)"
        ),
        "",
    ),
    "averages in the model, not in the optimizer": (
        AVERAGED_INSIDE.replace("{of}", ".body"),
        (
            "RuntimeError: loss(model, batch) changed the parameter ema.weight, "
            "which ...; trainers do "
            "not share such changes: make it a floating-point buffer (register_buffer), which they share; "
            f"{EMA} "
            "(docs/buffers.md); those of a second optimizer stand with it in what optimizer(model) "
            "returns (docs/habits.md)"
        ),
        "",
    ),
    "torch's averages by a hook": (
        ZOO["LoRA"].script + AVERAGED_BESIDE,
        (
            "the optimizer SGD has a hook (optimizer.<locals>.<lambda>, by "
            "register_step_post_hook); a job steps "
            "parameters by optimizers that it makes of the same class and options, without it"
        ),
        (
            "leave it out: limit parameters where forward uses them, keep averages of parameters by "
            "trireme.nn.Ema(module, decay) (docs/buffers.md), and change gradients by hooks "
            "of parameters or in "
            "a loop of your own"
        ),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_it_is_refused_word_by_word_in_jobs_and_alone(tmp_path: Path, name: str):
    script, message, hint = REFUSED[name]
    model = Model(script, falls=1)
    path = write_script(tmp_path, model)
    spec = spec_of(path)
    with ThreadPoolExecutor(1) as executor, pytest.raises(TriremeError) as in_job:
        compute = executor.submit(TorchCompute, load(path), spec, executor).result()
        compute.begin_step()
        records = first_records(spec.dataset, spec.minibatch_size)
        await compute.gradient((0, 1), 0, 1, records, Nothing())
    with pytest.raises(TriremeError) as alone:
        run(load(path), spec)
    for raised in (in_job.value, alone.value):
        begins, _, ends = message.partition("...")
        assert raised.message.startswith(begins)
        assert raised.message == message or (ends and raised.message.endswith(ends))
        assert (raised.hint or "") == hint


class Nothing:
    def done(self, block: int) -> None:
        pass


SECOND = "second = torch.optim.SGD(model[4].parameters(), lr=0.1)\n"
BATCHES = (
    "for batch in batches:\n"
    "    optimizer.zero_grad()\n"
    "    trireme.backward(F.cross_entropy(model(batch['x']), batch['y']))\n"
    "    optimizer.step()\n"
)
LOOPS = {
    "a parameter in two optimizers": (
        {
            "prepare": SECOND
            + "model, optimizer, batches = trireme.prepare(model, [optimizer, second], dataset)"
        },
        (
            "InvalidArgument: trireme.prepare got optimizers 0 and 1, which both hold a parameter (number 0 "
            "of 1, of shape [24, 24]); give each parameter to one of them; a parameter that two losses train "
            "belongs to one optimizer, with the sum of both losses"
        ),
    ),
    "a second optimizer beside": (
        {
            "loop": SECOND + BATCHES + "    second.step()\n",
        },
        (
            "RuntimeError: the script's loop changed the parameter 4.weight; only the optimizer may change "
            "parameters, because trainers do not share other changes (nn.Embedding does "
            "it with max_norm: leave "
            f"that out; {EMA}, docs/buffers.md; a second optimizer stands beside the first one in "
            "what optimizer(model) returns, and neither is stepped by the script, docs/habits.md)"
        ),
    ),
    "torch's averages": (
        {
            "loop": "averages = torch.optim.swa_utils.AveragedModel(model)\n"
            + BATCHES
            + "    averages.update_parameters(model)\n",
        },
        f"RuntimeError: the script's loop {UPDATED}",
    ),
}


@pytest.mark.parametrize("name", LOOPS)
async def test_a_loop_of_ones_own_is_told_the_same(tmp_path: Path, name: str):
    parts, message = LOOPS[name]
    script = write_loop(tmp_path, "script_loop", **parts)
    spec = spec_for(script)
    in_job, alone = load(script), load(script)
    with ThreadPoolExecutor(1) as executor, pytest.raises(TriremeError) as raised_in_job:
        compute = executor.submit(TorchCompute, in_job, spec, executor).result()
        for number in range(2):  # what follows a step is done before the next one
            compute.forget_nodes()
            compute.begin_step()
            records = first_records(spec.dataset, spec.minibatch_size)
            await compute.gradient((0, 1), 0, number, records, Nothing())
    with pytest.raises(TriremeError) as raised_alone:
        run(alone, spec)
    in_job.loop.close()
    alone.loop.close()
    assert raised_in_job.value.message == raised_alone.value.message == message


async def test_a_copy_that_a_loop_averages_itself_is_told(tmp_path: Path):
    """The parameters are right, and the copy is one trainer's alone."""
    script = write_loop(
        tmp_path,
        "script_loop",
        loop="import copy\n\nema, teacher = copy.deepcopy(model), copy.deepcopy(model)\n"
        + BATCHES
        + "    for average, value in zip(ema.parameters(), model.parameters()):\n"
        "        average.data.lerp_(value.data, 0.1)\n",
    )
    told: list[str] = []
    user = load(script)
    run(user, spec_for(script, epochs=1), report=told.append)
    user.loop.close()
    (warning,) = [text for text in told if text.startswith("warning: ")]
    names = r"ema\.0\.weight of {0}, ema\.1\.bias of {0}, ema\.1\.weight of {0} and \d more"
    assert re.fullmatch(
        f"warning: each minibatch changes {names.format('script_loop.py')} of a module beside the model: "
        "each trainer changes a copy of its own, which no other trainer gets and nobody saves; make the "
        r"module a part of the model, averages of parameters by trireme\.nn\.Ema\(module, decay\) "
        r"\(docs/buffers\.md\)",
        warning,
    )
