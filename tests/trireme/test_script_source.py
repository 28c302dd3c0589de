"""What is sent with a job: the script and the modules beside it."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest

from trireme.script_source import digests_of, read_source
from trireme_shared.platform.membership.local_script import MAX_FILES
from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.records import JobSpec
from trireme_shared.protocol.records.cluster import SOURCE_BYTES

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
    script = write(
        tmp_path,
        train="import trireme\nimport master_service.app\n",
        trireme__data="",
        master_service__app="",
    )
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


def test_digests_are_of_what_is_imported_from_beside_the_script(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        train="import os, prepare, torch\nimport features.text\nimport data\nimport broken\n",
        prepare="",
        broken="def f(:",
        unused="",
        reader="import deep",
        deep="",
        features__text="",
        data__picture="",
    )
    (tmp_path / "features" / "__init__.py").touch()
    found = digests_of(script, ["reader", "pyarrow.lib"])
    assert sorted(found) == [
        "deep.py",
        "features/__init__.py",
        "features/text.py",
        "prepare.py",
        "reader.py",
        "train.py",
    ]
    assert found["prepare.py"] == sha256(b"").hexdigest()
    write(tmp_path, prepare="x = 1")
    assert {name for name, digest in digests_of(script, ["reader"]).items() if found[name] != digest} == {
        "prepare.py"
    }


def test_digests_are_of_a_bounded_number_of_files(tmp_path: Path) -> None:
    script = write(
        tmp_path, train="import large", **{f"large__m{number}": "" for number in range(MAX_FILES + 10)}
    )
    (tmp_path / "large" / "__init__.py").touch()
    assert len(digests_of(script)) == MAX_FILES == JobSpec.model_fields["sources"].metadata[0].max_length
