"""What is wrong with a script is told in one message that says what to do; what it raises keeps only its own
frames."""

from __future__ import annotations

import os
import py_compile
import re
import sys

import pytest

from tests.trainer_agent.scripts import write_script
from trainer_agent.script.user_module import load
from trireme_shared.protocol.errors import InvalidArgument, UserCodeError
from trireme_shared.protocol.records.datasets import Npy


def test_hooks_are_found_and_the_main_part_is_not_run(tmp_path):
    user = load(
        write_script(tmp_path, main='if __name__ == "__main__":\n    raise SystemExit("ran as main")\n')
    )
    assert [user.has(hook) for hook in ("model", "loss", "collate", "metrics")] == [True, True, False, False]
    assert user.dataset() == Npy(f"{tmp_path}/x.npy", f"{tmp_path}/y.npy", aligned=True)
    assert user.config == {}


def test_a_script_finds_its_neighbours(tmp_path):
    (tmp_path / "user_neighbour.py").write_text("WIDTH = 5\n")
    user = load(
        write_script(tmp_path, config="import user_neighbour\nconfig = {'epochs': user_neighbour.WIDTH}\n")
    )
    assert user.config == {"epochs": 5}


def test_an_edit_of_the_same_second_and_size_counts(tmp_path):
    """Python takes compiled bytecode for its source by time and size."""
    script = write_script(tmp_path, config="config = {'epochs': 5}\n")
    py_compile.compile(str(script))
    times = script.stat()
    script.write_text(script.read_text().replace("'epochs': 5", "'epochs': 6"))
    os.utime(script, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert load(script).config == {"epochs": 6}


@pytest.mark.parametrize("hook", ["model", "dataset", "loss", "optimizer"])
def test_a_missing_hook_is_named_with_its_shape(tmp_path, hook):
    script = write_script(tmp_path, **{hook: ""})
    with pytest.raises(InvalidArgument) as raised:
        load(script)
    assert raised.value.message == f"{script} has no function {hook!r}"
    assert f"def {hook}(" in raised.value.hint


@pytest.mark.parametrize(
    ("part", "text", "message"),
    [
        ("loss", "loss = 3", "'loss' in {path} is int, not a function"),
        ("loss", "def loss(model): ...", "loss(model) in {path} does not take 2 arguments"),
        ("collate", "def collate(): ...", "collate() in {path} does not take 1 argument"),
        ("config", "config = 7", "config in {path} is int"),
    ],
)
def test_a_hook_of_the_wrong_kind_is_refused(tmp_path, part, text, message):
    script = write_script(tmp_path, **{part: text})
    with pytest.raises(InvalidArgument) as raised:
        load(script)
    assert raised.value.message == message.format(path=script)


def test_a_dataset_must_be_a_description(tmp_path):
    user = load(write_script(tmp_path, dataset="def dataset():\n    return {1: 2}\n"))
    with pytest.raises(InvalidArgument, match=r"dataset\(\) of .* returned dict, not a dataset"):
        user.dataset()


def test_a_script_at_home_of_a_user_without_one_is_missing(monkeypatch):
    def unknown(_: int) -> None:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    with pytest.raises(InvalidArgument, match=r"there is no script .*/~/train\.py"):
        load("~/train.py")


def test_a_missing_script_is_named(tmp_path):
    with pytest.raises(InvalidArgument, match=r"there is no script .*nowhere\.py"):
        load(tmp_path / "nowhere.py")


def test_an_error_while_loading_shows_the_line_of_the_script_and_leaves_no_module(tmp_path):
    script = write_script(tmp_path, name="user_broken", model="1 / 0")
    with pytest.raises(UserCodeError, match=r"user_broken.py cannot be loaded: ZeroDivisionError") as raised:
        load(script)
    assert "1 / 0" in raised.value.details["traceback"]
    assert "importlib" not in raised.value.details["traceback"]
    assert "user_broken" not in sys.modules


def test_a_syntax_error_shows_where(tmp_path):
    with pytest.raises(UserCodeError, match="SyntaxError") as raised:
        load(write_script(tmp_path, model="def model(:"))
    assert "def model(:" in raised.value.details["traceback"]
    assert "trainer_agent" not in raised.value.details["traceback"]


def functions_in(trace: str) -> list[str]:
    """The last frame's comes last; "..." where frames are left out."""
    places = [line for line in trace.splitlines() if line.startswith(("  File", "  ..."))]
    return [place.strip() if "..." in place else place.rpartition(" in ")[2] for place in places]


def test_a_hooks_error_has_the_users_frames_and_the_innermost_ones_of_libraries(tmp_path):
    user = load(
        write_script(
            tmp_path,
            model="""
            def model():
                return deeper()

            def deeper():
                return nn.Linear("a", "b")
            """,
            loss="""
            def loss(model, batch):
                return nn.Sequential(nn.Sequential(nn.Linear(3, 4)))(torch.zeros(2, 5))
            """,
        )
    )
    with pytest.raises(UserCodeError) as raised:
        user.call("model")
    trace = raised.value.details["traceback"]
    assert trace.startswith("Traceback (most recent call last):\n")
    assert functions_in(trace) == ["model", "deeper", "__init__"]
    assert any(line.startswith("TypeError:") for line in trace.splitlines())
    with pytest.raises(UserCodeError) as raised:
        user.call("loss", None, None)
    trace = raised.value.details["traceback"]
    first, left_out, *innermost = functions_in(trace)
    assert (first, innermost) == ("loss", ["_wrapped_call_impl", "_call_impl", "forward"])
    assert re.fullmatch(r"\.\.\. \d+ frames of libraries", left_out)
    assert "F.linear(input, self.weight, self.bias)" in trace
    assert "trainer_agent" not in trace


def test_what_an_error_was_raised_from_comes_first(tmp_path):
    user = load(
        write_script(
            tmp_path,
            loss="""
            def loss(model, batch):
                try:
                    return {}["x"]
                except KeyError as error:
                    raise ValueError("no x") from error
            """,
        )
    )
    with pytest.raises(UserCodeError) as raised:
        user.call("loss", None, None)
    before, after = raised.value.details["traceback"].split(
        "\nThe above exception was the direct cause of the following exception:\n\n"
    )
    assert before.endswith("KeyError: 'x'\n")
    assert after.endswith("ValueError: no x\n")
    assert functions_in(before) == functions_in(after) == ["loss"]


def test_a_script_named_like_a_library_does_not_shadow_it(tmp_path):
    import json

    load(write_script(tmp_path, name="json"))
    assert sys.modules["json"] is json
