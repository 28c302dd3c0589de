"""`python script.py` refuses what `trireme run` refuses, in the same words, before it trains; what the script
prints meanwhile is shown."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.equipment.forked import clean_environment
from tests.trainer_agent.cluster import trained
from tests.trainer_agent.scripts import differing, spec_for, train_plainly, write_script
from trainer_agent.script.user_module import load
from trireme.plain import run
from trireme.preflight import ScriptError, inspect
from trireme.script_trial import say
from trireme.settings import UsageError

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

SCRIPT = """
    import numpy as np, torch, trireme
    from torch import nn

    config = trireme.Config(epochs=1, global_batch_size=8)
    def model(): return nn.Linear(3, 1)
    def dataset(): return trireme.data.Npy("{data}/x.npy")
    def loss(model, batch): return model(batch["x"]).square().mean()
    def optimizer(model): return torch.optim.SGD(model.parameters(), lr=0.05)
    def evaluation_dataset(): return dataset()
"""
MAIN = """
    if __name__ == "__main__":
        trireme.train(__name__)
"""
OWN_GENERATOR = """
    RNG = np.random.default_rng(3)
    def loss(model, batch): return model(batch["x"]).square().mean() * RNG.random()
"""


def script(folder: Path, extra: str = "", main: str = MAIN) -> Path:
    np.save(folder / "x.npy", np.random.default_rng(0).standard_normal((32, 3)).astype(np.float32))
    path = folder / "mine.py"
    path.write_text("".join(textwrap.dedent(part) for part in (SCRIPT.format(data=folder), extra, main)))
    return path


def python(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(path), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=250, env=clean_environment(), check=False
    )


def refused_by_run(path: Path, **given: Any) -> UsageError:
    with pytest.raises(UsageError) as refused:
        asyncio.run(inspect(path, given))
    return refused.value


def test_what_a_job_refuses_is_refused_in_the_same_words_before_training(tmp_path: Path) -> None:
    path = script(tmp_path, OWN_GENERATOR)
    done, refusal = python(path), refused_by_run(path)
    assert "RNG of mine.py: a random generator of the script's own" in refusal.message
    assert done.returncode == 2
    assert done.stderr.startswith("checking mine.py\nerror: mine.py: RNG of mine.py")
    assert done.stderr.splitlines()[2:] == [f"hint: {refusal.hint}"]
    unchecked = python(path, "--no-check")
    assert unchecked.returncode == 0, unchecked.stderr
    assert "32/32 records" in unchecked.stderr


def test_an_error_in_the_evaluation_is_told_before_training_and_not_after_it(tmp_path: Path) -> None:
    done = python(script(tmp_path, 'def evaluate(model, batch): return {"n": batch["none"]}\n'))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-2:] == [
        "KeyError: 'none'",
        "in the first minibatch of the evaluation, where batch = {'x': float32 (1, 3)}",
    ]
    assert "epoch" not in done.stderr


def test_settings_that_a_job_refuses_are_told_and_one_lane_trains(tmp_path: Path) -> None:
    """Four records are too few for the eight lanes that a job has."""
    done = python(script(tmp_path), "--global-batch-size", "4")
    assert done.returncode == 0, done.stderr
    told, checking, *_ = done.stderr.splitlines()
    assert told.startswith("`trireme run` refuses these settings: ")
    assert "lanes" in told
    assert checking == "checking mine.py"
    assert "32/32 records" in done.stderr


def test_a_script_that_trains_while_a_job_imports_it_is_refused_and_does_not_start_itself(
    tmp_path: Path,
) -> None:
    path = script(tmp_path, main="trireme.train(__name__)\n")
    with pytest.raises(ScriptError) as refused:
        asyncio.run(inspect(path, {}))
    assert 'put the call under `if __name__ == "__main__":`' in refused.value.failure.message
    done = python(path)
    assert done.returncode == 1
    assert 'put the call under `if __name__ == "__main__":`' in done.stderr


def test_what_the_script_prints_while_it_is_tried_is_shown(tmp_path: Path, capsys) -> None:
    extra = """
        print("imported")
        for number in range(1000): print(number)
    """
    asyncio.run(inspect(script(tmp_path, extra), {}))
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["check │ imported", "check │ 0"]
    assert any("lines are left out here" in line for line in lines)
    assert not any("all are in" in line for line in lines), "the file is gone"


def test_a_script_that_prints_and_fails_is_shown_with_both(tmp_path: Path) -> None:
    done = python(script(tmp_path, 'def model():\n    print("a shape")\n    return 1 / 0\n'))
    assert done.returncode == 1
    assert done.stderr.splitlines()[:2] == ["checking mine.py", "check │ a shape"]
    assert done.stderr.splitlines()[-1] == "ZeroDivisionError: division by zero"


UNUSED = """
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(5, 3), nn.Linear(5, 3)

        def forward(self, x):
            return self.used(x)

    def model():
        return Two()
"""
ADAMW = "def optimizer(model):\n    return torch.optim.AdamW(model.parameters(), lr=0.1)\n"


async def test_a_parameter_that_nothing_uses_is_left_alone_here_and_in_a_job(tmp_path: Path) -> None:
    path, told = write_script(tmp_path, model=UNUSED, optimizer=ADAMW), list[str]()
    spec = spec_for(path)
    alone = run(load(path), spec, told.append)
    assert differing(await trained(spec), dict(alone.model.state_dict())) == []
    assert differing(train_plainly(path, spec), dict(alone.model.state_dict())) == []
    assert not any("no gradient" in line for line in told)


LAST = "return self.used(x) + (self.unused(x) if self.training and next(self.calls) < 2 else 0)"
COUNTED = UNUSED.replace("return self.used(x)", LAST).replace(
    "nn.Linear(5, 3)\n", "nn.Linear(5, 3)\n            self.calls = itertools.count()\n"
)


async def test_a_parameter_that_is_not_used_any_more_is_stepped_as_a_job_steps_it_and_told(
    tmp_path: Path,
) -> None:
    """It was left alone here, and a job with one lane decayed it: other bits, and no word of it."""
    path, told = (
        write_script(tmp_path, model="    import itertools\n" + COUNTED, optimizer=ADAMW),
        list[str](),
    )
    spec = spec_for(path)
    alone = run(load(path), spec, told.append)
    assert differing(await trained(spec), dict(alone.model.state_dict())) == []
    assert sum("the parameters unused.weight, unused.bias got no gradient" in line for line in told) == 1


def test_lines_are_said_above_progress_bars(monkeypatch, capsys) -> None:
    """By tqdm itself, if the script has loaded it."""
    say("plain")
    tqdm = type("tqdm", (), {"write": staticmethod(lambda text, file: print(f"above: {text}", file=file))})
    monkeypatch.setitem(sys.modules, "tqdm", type(sys)("tqdm"))
    monkeypatch.setattr(sys.modules["tqdm"], "tqdm", tqdm, raising=False)
    say("told")
    assert capsys.readouterr().err.splitlines() == ["plain", "above: told"]
