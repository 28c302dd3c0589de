"""A loop of one's own gives the bits of the same script with functions, whoever computes the lanes and who
dies."""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import runpy
import sys

import pytest
import torch

from tests.trainer_agent.cluster import cluster, trained
from tests.trainer_agent.own_loop.scripts import PARTS, write_loop
from tests.trainer_agent.scripts import differing, spec_for, write_script
from trainer_agent.script.user_module import load
from trireme.plain import plain_spec, run
from trireme_shared.platform.runtime.service import LEASE_LOST
from trireme_shared.protocol.errors import DatasetError, InvalidArgument
from trireme_shared.protocol.records import JobSpec, Phase

FOUR = {"lanes": 4, "global_batch_size": 12, "records_per_task": 6, "pservers": 2}
SCHEDULE = "torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)"
SCHEDULED = {
    "prepare": f"""
        scheduler = {SCHEDULE}
        model, optimizer, batches = trireme.prepare(model, optimizer, dataset, scheduler=scheduler)
    """,
    "loop": """
        for batch in batches:
            loss = F.cross_entropy(model(batch["x"]), batch["y"])
            trireme.backward(loss)
            optimizer.step()
            scheduler.step()
            model(batch["x"])  # random numbers and statistics of this are nobody's
            optimizer.zero_grad()
    """,
}
SCHEDULER = f"def scheduler(optimizer):\n    return {SCHEDULE}\n"


def specs(tmp_path, loop_parts=None, function_parts=None, **values) -> tuple[JobSpec, JobSpec]:
    """Of the script with a loop, and of the one with functions."""
    loop, functions = (
        write_loop(tmp_path, **(loop_parts or {})),
        write_script(tmp_path, **(function_parts or {})),
    )
    return (
        spec_for(loop, **values, storage=str(tmp_path / "loop")),
        spec_for(functions, **values, storage=str(tmp_path / "functions")),
    )


@pytest.mark.parametrize("values", [{}, FOUR, {"mode": "async"}], ids=["one lane", "four lanes", "async"])
async def test_the_bits_are_those_of_functions(tmp_path, values):
    loop, functions = specs(tmp_path, SCHEDULED, {"scheduler": SCHEDULER}, **values)
    found = await trained(loop)
    assert differing(found, await trained(functions)) == []
    after = torch.load(tmp_path / "after.pt", weights_only=True)  # by the script's last line, once
    assert differing(found, after) == []


@pytest.mark.parametrize("trainers", [2, 3])
async def test_the_lanes_owners_do_not_show_in_the_bits(tmp_path, trainers):
    loop, functions = specs(tmp_path, **FOUR)
    assert differing(await trained(loop, trainers), await trained(functions, 1)) == []


async def test_a_trainer_killed_in_mid_epoch_does_not_show_in_the_bits(tmp_path):
    loop, functions = specs(tmp_path, SCHEDULED, {"scheduler": SCHEDULER}, **FOUR, epochs=4)
    async with cluster(loop, 2) as made:
        await made.version(3)
        await made.kill("trainer-0-x")
        await made.version(6)
        made.add_trainer("trainer-2-x")
        state = await made.ended()
        assert state.phase is Phase.COMPLETED, state
        found = made.exported()
    assert differing(found, await trained(functions, 1)) == []


async def test_an_error_behind_the_loop_fails_the_job_and_leaves_the_model(tmp_path):
    loop, functions = specs(tmp_path, {"after": "raise ValueError('behind')\n"})
    async with cluster(loop, 2) as made:
        state = await made.ended()
        assert (state.phase, state.failure.error_type, state.failure.message) == (
            Phase.FAILED,
            "ValueError",
            "behind",
        )
        assert "raise ValueError('behind')" in state.failure.traceback
        found = made.exported()
    assert differing(found, await trained(functions)) == []


async def test_a_trainer_whose_script_is_behind_its_loop_starts_again_when_there_is_training_to_do(tmp_path):
    loop, functions = specs(tmp_path)
    async with cluster(loop) as made:
        made.add_trainer("trainer-0-x")
        made.computes["trainer-0-x"].is_finished = True  # the job went back to a checkpoint meanwhile
        assert await asyncio.wait_for(made.running["trainer-0-x"], 30) == LEASE_LOST
        made.add_trainer("trainer-1-x")
        assert (await made.ended()).phase is Phase.COMPLETED
        found = made.exported()
    assert differing(found, await trained(functions)) == []


@pytest.fixture
def plainly(monkeypatch):
    """Run a script as `python script.py`. The result is called as at the interpreter's end."""
    at_exit = []
    monkeypatch.setattr(atexit, "register", at_exit.append)

    def run_script(script):
        monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
        contextvars.copy_context().run(runpy.run_path, str(script), run_name="__main__")
        return at_exit[0]

    return run_script


SUMS = """
def evaluate(model, batch):
    return {'right': (model(batch['x']).argmax(1) == batch['y']).sum()}
"""
OBJECTS = """
def evaluation_metrics():
    import trireme.metrics

    return {'right': trireme.metrics.RecallAtK(1)}


def evaluate(model, batch, metrics):
    metrics['right'].update(model(batch['x']), batch['y'])
"""


@pytest.mark.parametrize(
    ("evaluate", "given"), [(SUMS, ""), (OBJECTS, ", evaluation_metrics=evaluation_metrics")]
)
def test_under_plain_python_the_bits_are_those_of_trireme_train(tmp_path, plainly, capsys, evaluate, given):
    settings = (
        "config = trireme.Config(epochs=2, global_batch_size=8, records_per_task=16, seed=7, lanes=4)\n"
    )
    prepare = SCHEDULED["prepare"].replace(
        "=scheduler)", f"=scheduler, evaluation_dataset=dataset, evaluate=evaluate{given})"
    )
    head = LOOP_HEAD + settings + "torch.manual_seed(7)\n" + evaluate
    loop = write_loop(tmp_path, **SCHEDULED | {"head": head, "prepare": prepare})
    functions = write_script(
        tmp_path,
        evaluate=evaluate,
        scheduler=SCHEDULER,
        config="import trireme\n" + settings,
        evaluation="def evaluation_dataset():\n    return dataset()\n",
    )
    user = load(functions)
    expected = run(user, plain_spec(user, {}))
    plainly(loop)()
    assert differing(torch.load(tmp_path / "after.pt", weights_only=True), expected.model.state_dict()) == []
    said = capsys.readouterr()
    assert (said.out, "left its loop" in said.err) == (f"right {expected.metrics['right']:.6g}\n", False)


LOOP_HEAD = "import torch, trireme\nfrom torch import nn\nfrom torch.nn import functional as F\n"


@pytest.mark.parametrize(
    ("parts", "error", "message", "hint"),
    [
        (
            {"model": PARTS["model"].replace("x.npy", "none.npy")},
            DatasetError,
            "none.npy does not exist",
            "check",
        ),
        (
            {"loop": "for epoch in range(2):\n    for batch in batches:\n        pass\n"},
            InvalidArgument,
            "of all epochs",
            "remove",
        ),
        ({"loop": "for batch in batches:\n    {}['x']\n"}, KeyError, "x", ""),
        (
            {"loop": "for batch in batches:\n    continue\n"},
            RuntimeError,
            "trireme.backward was not called",
            "",
        ),
    ],
)
def test_under_plain_python_errors_are_raised_in_the_script(tmp_path, plainly, parts, error, message, hint):
    loop = write_loop(tmp_path, **parts)
    with pytest.raises(error, match=message) as caught:
        plainly(loop)
    assert "".join(getattr(caught.value, "__notes__", [])).startswith(hint)
    assert str(loop) in {
        frame.path.__fspath__() for frame in caught.traceback if hasattr(frame.path, "__fspath__")
    }


COUNTED = PARTS["loop"].replace("loss = F", "seen.append(torch.get_num_threads())\n            loss = F")


@pytest.fixture
def seven_threads():
    """As many as torch chooses in some process."""
    before = torch.get_num_threads()
    torch.set_num_threads(7)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [None, 5])
def test_under_plain_python_the_script_computes_with_the_threads_of_the_setting(
    tmp_path, plainly, capsys, monkeypatch, seven_threads, threads
):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    asked = f"torch.set_num_threads({threads})\n" if threads else ""
    config = "config = trireme.Config(epochs=1, threads_per_trainer=3)\nseen = []\n"
    after = 'torch.save(seen, {folder!r} + "/seen.pt")\n'
    plainly(write_loop(tmp_path, head=LOOP_HEAD + asked + config, loop=COUNTED, after=after))()
    assert set(torch.load(tmp_path / "seen.pt", weights_only=True)) == {3}
    said = capsys.readouterr().err
    assert (
        said.count("torch.set_num_threads(5)")
        == said.count("set threads_per_trainer = 5")
        == (1 if threads else 0)
    )
    assert "torch.set_num_threads(7)" not in said


async def test_in_a_job_it_is_told_that_another_number_of_threads_is_overruled(tmp_path):
    after = 'torch.save(seen, {folder!r} + "/seen.pt")\n'
    head = LOOP_HEAD + "torch.set_num_threads(1 + 2 * (os.cpu_count() or 1))\nseen = []\n"
    loop, functions = specs(
        tmp_path,
        {"head": "import os\n" + head, "loop": COUNTED, "after": after},
        {"config": "import os, torch\ntorch.set_num_threads(1 + 2 * (os.cpu_count() or 1))\n"},
    )
    for spec in (loop, functions):
        async with cluster(spec, 1) as made:
            assert (await made.ended()).phase is Phase.COMPLETED
            told = [event.message for event in made.master.events.after(0, 1000) if event.name == "warning"]
        assert sum("set threads_per_trainer =" in text for text in told) == 1, told
    assert set(torch.load(tmp_path / "seen.pt", weights_only=True)) == {1}


def test_under_plain_python_a_loop_that_was_left_is_told_at_the_end(tmp_path, plainly, capsys):
    plainly(write_loop(tmp_path, loop="for batch in batches:\n    break\n"))()
    assert "the script has left its loop before training was over" in capsys.readouterr().err
