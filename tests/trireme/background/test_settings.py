"""What trireme.run refuses at once, in words of Python."""

from __future__ import annotations

import pytest

import trireme
from trireme.background.errors import WaitTimedOut, in_python


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # no trireme.toml, and whatever is started writes here
    path = tmp_path / "script.py"
    path.touch()
    return path


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"epoch": 3}, "trireme.run: there is no setting 'epoch'; did you mean epochs?"),
        ({"trainers": 0}, "trainers = 0: input should be greater than or equal to 1"),
        ({"epochs": "many"}, "epochs = 'many': input should be a valid integer"),
        ({"seed": object}, "trireme.run: a setting is neither text, number nor a list or dict of them"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_before_anything_starts(script, settings, sentence):
    with pytest.raises(trireme.ConfigError) as caught:
        trireme.run(script, **settings)
    assert str(caught.value).startswith(sentence)
    assert isinstance(caught.value, trireme.TriremeError)
    assert list(script.parent.iterdir()) == [script]


def test_a_script_that_does_not_exist_is_named(script):
    with pytest.raises(
        trireme.ConfigError, match=r"nowhere\.py does not exist; give the path of a Python file"
    ):
        trireme.run("nowhere.py")


def test_what_the_command_refuses_before_it_imports_a_script_is_the_same_error(script, capsys):
    (script.parent / "trireme.toml").write_text("epochs = 0\n")
    with pytest.raises(trireme.ConfigError, match=r"trireme\.toml epochs = 0"):
        trireme.run(script, progress=False)
    assert capsys.readouterr() == ("", "")


def test_sentences_about_flags_are_written_in_python():
    assert (
        in_python("job a is completed; --fresh trains it again")
        == "job a is completed; fresh=True trains it again"
    )
    assert (
        in_python("use another name (--job NAME), or --fresh") == "use another name (job=NAME), or fresh=True"
    )
    assert (
        in_python("use --pservers 2; choose another with --data-dir")
        == "use pservers=2; choose another with data_dir"
    )
    assert in_python("--no-check skips this check") == "check=False skips this check"


def test_a_wait_that_is_too_long_is_a_timeout_for_python_too():
    error = WaitTimedOut("job a has not ended", hint="wait again")
    assert isinstance(error, TimeoutError)
    assert (str(error), error.hint, error.code) == ("job a has not ended", "wait again", "DEADLINE_EXCEEDED")


def test_tracebacks_name_errors_as_users_import_them():
    for name in ("InvalidSetting", "JobFailed", "JobStopped", "WaitTimedOut"):
        kind = getattr(trireme, name)
        assert (kind.__module__, kind.__qualname__) == ("trireme", name)
