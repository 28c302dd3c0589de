"""What a script does wrong in a loop of its own is told with its own line, and ends the job."""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.trainer_agent.done_blocks import DoneBlocks
from tests.trainer_agent.own_loop.scripts import PARTS, write_loop
from tests.trainer_agent.scripts import records, spec_for
from trainer_agent.model.torch_compute import TorchCompute
from trainer_agent.script.user_module import load
from trireme_shared.datasets.user_modules import load_custom
from trireme_shared.protocol.errors import DatasetError, InvalidArgument, UserCodeError

BODY = (
    "    optimizer.zero_grad()\n    loss = F.cross_entropy(model(batch['x']), batch['y'])\n"
    "    trireme.backward(loss)\n    optimizer.step()\n"
)
LOOP = "for batch in batches:\n" + BODY


@pytest.fixture
def passes(tmp_path):
    """Train some minibatches of a script, and end it."""
    with ThreadPoolExecutor(1) as executor:
        made = []

        def run(minibatches: int = 3, *, finish: bool = True, **parts: str) -> TorchCompute:
            script = write_loop(tmp_path, **{"after": ""} | parts)
            compute = executor.submit(TorchCompute, load(script), spec_for(script), executor).result()
            made.append(compute)
            for number in range(minibatches):
                compute.forget_nodes()
                compute.begin_step()
                asyncio.run(compute.gradient((0, 1), 0, number, records(8, number), DoneBlocks()))
            if finish:
                asyncio.run(compute.finish())
            return compute

        yield run
        for compute in made:
            compute.close()


WRONG = {
    "step without backward": (
        "for batch in batches:\n    optimizer.step()\n",
        r"optimizer\.step\(\) was called without trireme\.backward\(loss\)",
        "optimizer.step()",
    ),
    "two backwards": (
        LOOP.replace("    optimizer.step", "    trireme.backward(loss)\n    optimizer.step"),
        "called twice for one batch",
        "trireme.backward(loss)",
    ),
    "no step": (
        LOOP.replace("    optimizer.step()", "    pass"),
        r"optimizer\.step was not called",
        "for batch in batches",
    ),
    "a batch left out": (
        "for batch in batches:\n    continue\n",
        "trireme.backward was not called",
        "for batch in batches",
    ),
    "its own backward": (
        LOOP.replace("trireme.backward(loss)", "loss.backward()"),
        r"calls backward\(\) itself; call trireme\.backward\(loss\)",
        "loss.backward()",
    ),
    "a break": (LOOP + "    break\n", "left its loop after 1 batches", ""),
    "no loop": ("", "left its loop after 0 batches", ""),
    "prepare twice": (
        "trireme.prepare(model, optimizer, dataset)\n" + LOOP,
        r"trireme\.prepare was called twice",
        "trireme.prepare(model",
    ),
    "iterated twice": (LOOP + "list(batches)\n", "batches has ended", "list(batches)"),
    "a step after the end": (LOOP + "optimizer.step()\n", "the script is after its loop", "optimizer.step()"),
    "another exception": (LOOP + "    {}['nothing']\n", "KeyError: 'nothing'", "{}['nothing']"),
    "an exit": (LOOP + "    raise SystemExit(3)\n", "SystemExit: 3", "raise SystemExit(3)"),
    "no tensor": (
        LOOP.replace("(loss)", "(loss.item())"),
        "got float; give it the minibatch's mean",
        "trireme.backward",
    ),
    "a dict without a loss": (
        LOOP.replace("(loss)", "({'a': 1})"),
        'its entry "loss" is what is trained',
        "trireme.backward",
    ),
    "no scalar": (LOOP.replace("(loss)", "(loss + torch.zeros(2))"), r"shape \(2,\)", "trireme.backward"),
    "no gradient": (
        LOOP.replace("(loss)", "(loss.detach())"),
        "does not depend on the parameters",
        "trireme.backward",
    ),
    "gradients set to zero": (
        LOOP.replace("    optimizer.step", "    optimizer.zero_grad()\n    optimizer.step"),
        r"zero_grad\(\) was called between",
        "optimizer.zero_grad()",
    ),
    "gradients of the batch before": (
        LOOP.replace("    optimizer.zero_grad()\n", ""),
        r"still have gradients of an earlier batch; call optimizer\.zero_grad\(\) before trireme\.backward",
        "trireme.backward(loss)",
    ),
    "another loss than the scaled one": (
        "scaler = torch.amp.GradScaler('cpu')\n"
        + LOOP.replace("backward(loss)", "backward(scaler.scale(loss) / 2)"),
        r"call trireme\.backward\(scaler\.scale\(loss\)\)",
        "trireme.backward(scaler",
    ),
    "another learning rate": (
        LOOP + "    optimizer.param_groups[0]['lr'] = 0.01\n",
        r"changed the optimizer's options.*scheduler=scheduler",
        "",
    ),
    "a later scheduler": (
        "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 30)\n" + LOOP,
        "changed the optimizer's options",
        "",
    ),
    "another layer": (
        "model.append(nn.Linear(3, 3))\n" + LOOP,
        r"changed the model: the parameter 7\.weight was added since training began",
        "",
    ),
    "another layer instead": (
        LOOP + "    model[0] = nn.Linear(5, 24)\n",
        r"changed the model: the parameter 0\.weight was replaced",
        "",
    ),
    "a layer that is frozen later": (
        LOOP + "    model[0].requires_grad_(False)\n",
        (
            r"changed requires_grad of the parameter 0\.weight: it was True when training began, and "
            r"now it is False"
        ),
        "",
    ),
    "a mode that is another one later": (
        LOOP + "    model[1].eval()\n",
        r"forward had 1 in evaluation mode, and in an earlier minibatch it was in training mode",
        "",
    ),
    "parameters written": (
        LOOP + "    with torch.no_grad():\n        model[0].weight.clamp_(-1, 1)\n",
        "the script's loop changed the parameter 0.weight",
        "",
    ),
    "logged too late": (
        LOOP + "    trireme.log(right=1)\n",
        r"right is logged outside of a step; log it in the loop, before optimizer\.step\(\)",
        "trireme.log",
    ),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_what_is_wrong_in_the_loop_is_told_with_the_scripts_line(passes, name):
    loop, message, line = WRONG[name]
    with pytest.raises(UserCodeError, match=message) as caught:
        passes(loop=loop)
    assert caught.value.details["fatal"]
    assert line in caught.value.details["traceback"]
    assert "trainer_agent" not in caught.value.details["traceback"]


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        ("3, optimizer, dataset", "got int as the model"),
        ("model, model, dataset", "got Sequential as the optimizer"),
        ("model, optimizer, dataset, epoch=3", "got 'epoch', which is no setting; did you mean epochs?"),
        ("model, optimizer, dataset, epochs=0", "epochs = 0"),
        ("model, optimizer, dataset, evaluation_dataset=dataset", "got evaluation_dataset and no evaluate"),
        ("model, optimizer, dataset, collate=3", "got int as collate"),
    ],
)
def test_what_is_wrong_with_the_arguments_is_told_with_the_scripts_line(passes, prepare, message):
    with pytest.raises(UserCodeError, match=message) as caught:
        passes(prepare=f"model, optimizer, batches = trireme.prepare({prepare})\n")
    assert f"trireme.prepare({prepare})" in caught.value.details["traceback"]


def test_a_scheduler_that_trireme_does_not_know_is_refused(passes):
    scheduler = "torch.optim.lr_scheduler.StepLR(optimizer, 3)\n"
    with pytest.raises(UserCodeError, match=r"the optimizer has a scheduler; .*scheduler=scheduler"):
        passes(prepare=scheduler + PARTS["prepare"].strip())


def test_a_script_without_a_call_of_prepare_is_told_so(passes):
    with pytest.raises(InvalidArgument, match=r"ended without calling trireme\.prepare"):
        passes(prepare="def main():\n    trireme.prepare(model, optimizer, dataset)\n", loop="")


@pytest.mark.parametrize("outer", ["for epoch in range(3):", "while True:"])
def test_a_loop_over_epochs_around_it_is_refused_before_anything_runs(passes, outer):
    indented = "".join(f"    {line}\n" for line in LOOP.splitlines())
    with pytest.raises(
        InvalidArgument, match=r"loop\.py, line \d+: the loop over the batches is in the loop of line \d+"
    ):
        passes(loop=f"{outer}\n{indented}")


def test_the_script_ends_in_its_own_functions_as_under_python(passes, tmp_path):
    parts = f"""
        def main(arguments):
            made, steps, taken = trireme.prepare(model, optimizer, dataset)
            with open({str(tmp_path / "said")!r}, "w") as file:
                for batch in taken:
                    steps.zero_grad()
                    trireme.backward(F.cross_entropy(made(batch["x"]), batch["y"]))
                    steps.step()
                print(__name__, arguments, made.training, file=file)

        if __name__ == "__main__":
            import sys
            main(sys.argv[1:])
    """
    before = sys.modules["__main__"], sys.argv
    passes(prepare=parts, loop="")
    assert (tmp_path / "said").read_text() == "__main__ [] True\n"
    assert (sys.modules["__main__"], sys.argv) == before


def test_a_script_that_does_not_come_to_its_end_is_left_as_by_an_exit(passes, tmp_path):
    left = f"""
        try:
            for batch in batches:
                optimizer.zero_grad()
                trireme.backward(F.cross_entropy(model(batch["x"]), batch["y"]))
                optimizer.step()
        finally:
            open({str(tmp_path / "left")!r}, "w").close()
    """
    compute = passes(finish=False, loop=left)
    assert not (tmp_path / "left").exists()
    compute.close()
    assert (tmp_path / "left").exists()


def test_modules_have_the_modes_that_the_loop_gives_them(passes):
    loop = (
        LOOP.replace("    optimizer.zero", "    model.train()\n    model[1].eval()\n    optimizer.zero")
        + "    model.eval()\n"
    )
    compute = passes(finish=False, prepare=PARTS["prepare"].strip() + "\nmodel[1].eval()\n", loop=loop)
    assert compute.model[1].num_batches_tracked == 0
    assert compute.model[3].training


def test_what_is_logged_in_the_body_belongs_to_its_minibatch(passes):
    logs = (
        "    trireme.log(before=1)\n    trireme.backward({'loss': loss, 'with': 3})\n"
        "    trireme.log(after=2)\n"
    )
    compute = passes(finish=False, loop=LOOP.replace("    trireme.backward(loss)\n", logs))
    assert {name: value.total for name, value in compute.minibatch.logged.items()} == {
        "before": 1.0,
        "with": 24.0,
        "after": 2.0,
    }


def test_the_callers_autocast_is_that_of_the_forward_pass(tmp_path):
    said = "said.append(torch.is_autocast_enabled('cpu'))"
    loop = f"for batch in batches:\n    {said}\n" + BODY.replace(
        "    optimizer.step", f"    {said}\n    optimizer.step"
    )
    prepare = "said = torch.said = []\n" + PARTS["prepare"].strip()
    user = load(write_loop(tmp_path, prepare=prepare, loop=loop, after=""))
    model, batch = user.call("model"), {"x": torch.randn(4, 5), "y": torch.zeros(4, dtype=torch.int64)}
    for autocast in (False, True):
        user.loop.next_pass()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            user.call("loss", model, batch).backward()
        user.loop.end_pass()
    user.loop.close()
    assert vars(torch).pop("said") == [False, False, True, False]


def test_a_script_that_is_imported_for_the_reader_in_it_does_not_train(tmp_path, monkeypatch):
    write_loop(tmp_path, "with_reader")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        DatasetError, match=r"with_reader calls trireme\.prepare when it is imported; put the loop under"
    ):
        load_custom("with_reader:Reader")
    write_loop(
        tmp_path,
        "guarded",
        prepare="if __name__ == '__main__':\n    trireme.prepare(1, 2, 3)\n",
        loop="",
        after="",
    )
    with pytest.raises(DatasetError, match="no attribute 'Reader'"):
        load_custom("guarded:Reader")
