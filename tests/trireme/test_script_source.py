"""What is sent with a job: the script and the modules beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.errors import InvalidArgument
from shared.records.cluster import SOURCE_BYTES
from trireme.script_source import read_source

EXAMPLES = Path(__file__).parents[2] / "examples"


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return folder / "train.py"


def test_modules_and_packages_beside_the_script_go_with_it_and_nothing_else(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        train="import os, prepare\nimport features.text as t\n",
        prepare="def f():\n    from deep import g\n",
        deep="import train\n",
        unused="",
        features__text="from . import words\n",
        features__words="x = 1\n",
    )
    source = read_source(script)
    assert source.file_name == "train.py"
    assert sorted(source.modules) == ["deep.py", "features/text.py", "features/words.py", "prepare.py"]
    other = read_source(write(tmp_path, deep="import train\ny = 2\n"))
    assert other.digest != source.digest


def test_a_script_in_a_checkout_of_trireme_does_not_take_trireme_along(tmp_path: Path) -> None:
    script = write(tmp_path, train="import trireme\nfrom shared import lanes\n", trireme__data="", shared__lanes="")
    assert read_source(script).modules == {}


def test_the_example_goes_with_the_module_that_prepares_its_data() -> None:
    assert list(read_source(EXAMPLES / "digits" / "digits.py").modules) == ["prepare.py"]


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"train": "import big", "big": "x=1\n" * (SOURCE_BYTES // 4)}, "at most"),
        ({"train": "def f(:\n"}, "line 1"),
    ],
)
def test_what_cannot_be_sent_is_one_clear_error(tmp_path: Path, files: dict[str, str], told: str) -> None:
    with pytest.raises(InvalidArgument, match=told):
        read_source(write(tmp_path, **files))
