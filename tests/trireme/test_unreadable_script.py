"""A script that this user may not read is told in a sentence; root reads everything, so the refusal is made
here."""

from __future__ import annotations

from pathlib import Path

import pytest

from trireme.cli.options import say_checking
from trireme.preflight import check_path
from trireme.settings import UsageError


@pytest.fixture(params=["its folder may not be entered", "the file may not be read"])
def script(request, tmp_path, monkeypatch):
    path = tmp_path / "mine.py"
    path.write_text("")

    def refuse(self, *_):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "is_file" if "folder" in request.param else "open", refuse)
    return path


def test_a_script_that_may_not_be_read_is_told_with_what_to_do(script, capsys):
    say_checking(script)
    with pytest.raises(UsageError, match=r"mine.py cannot be read by this user \(\d+\): Permission") as error:
        check_path(script)
    assert "chmod -R a+rX FOLDER" in error.value.hint
    assert "Traceback" not in capsys.readouterr().err
