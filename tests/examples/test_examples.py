"""The examples learn, under plain python; their data is the same wherever and however often it is
prepared."""

from __future__ import annotations

import difflib
import hashlib
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file

pytestmark = pytest.mark.timeout(180)  # processes that import torch, on a busy machine
EXAMPLES = Path(__file__).parents[2] / "examples"


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(
        command,
        env=os.environ | environment,
        cwd=EXAMPLES,
        capture_output=True,
        text=True,
        timeout=150,
        check=True,
    )


def metrics(output: str) -> dict[str, float]:
    return {name: float(value) for name, value in (line.split() for line in output.splitlines())}


def hashes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def on_terminal(*arguments: str, **environment: str) -> str:
    """What a script prints on stdout if that is a terminal."""
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        with (
            os.fdopen(theirs, "wb") as out,
            subprocess.Popen(
                [sys.executable, *arguments],
                env=os.environ | environment,
                cwd=EXAMPLES,
                stdout=out,
                stderr=subprocess.PIPE,
            ) as process,
        ):
            _, errors = process.communicate(timeout=150)
            assert process.returncode == 0, errors.decode()
            assert len(errors.splitlines()) >= 4
        return terminal.read(1 << 16).decode().replace("\r\n", "\n")


@pytest.mark.parametrize(("script", "arguments"), [("digits", ("--epochs", "4")), ("own_loop", ())])
def test_digits_learns_and_a_chart_of_its_loss_stays_on_a_terminal(tmp_path, script, arguments):
    told = on_terminal(f"digits/{script}.py", *arguments, DIGITS_DATA=str(tmp_path))
    chart, measured = re.sub(r"accuracy (\S+)\n", "", told), re.findall(r"accuracy (\S+)\n", told)
    assert [float(accuracy) > 0.9 for accuracy in measured] == [True]
    assert chart.splitlines()[1].startswith("loss (last 0.")
    assert re.search(r"^ +0 +step \d+$", chart.splitlines()[-1])


def test_charlm_learns(tmp_path):
    code = "import corpus, runpy; corpus.TRAIN_BYTES = 1 << 15; corpus.VALID_BYTES = 1 << 12; "
    code += "runpy.run_path('charlm/charlm.py', run_name='__main__')"
    done = python(
        "-c", code, "--global-batch-size", "8", CHARLM_DATA=str(tmp_path), PYTHONPATH=str(EXAMPLES / "charlm")
    )
    found = metrics(done.stdout)
    assert found["bits_per_byte"] < 6.5
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / 0.693147, rel=1e-3)


def test_digits_are_all_there_once_in_several_files_and_row_groups(tmp_path):
    python("digits/prepare.py", str(tmp_path))
    files = sorted(tmp_path.iterdir())
    assert [path.name for path in files] == [
        "test.parquet",
        "train-0.parquet",
        "train-1.parquet",
        "train-2.parquet",
    ]
    assert [pq.read_metadata(path).num_rows for path in files] == [359, 480, 479, 479]
    assert all(pq.read_metadata(path).num_row_groups > 1 for path in files)


def test_processes_that_prepare_the_same_folder_at_once_agree(tmp_path):
    command = [sys.executable, "digits/prepare.py", str(tmp_path / "shared")]
    started = [subprocess.Popen(command, cwd=EXAMPLES, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [process.wait(150) for process in started] == [0, 0]
    python("digits/prepare.py", str(tmp_path / "alone"))
    assert hashes(tmp_path / "shared") == hashes(tmp_path / "alone")


def test_the_corpus_is_the_same_each_time(tmp_path):
    code = "import corpus, pathlib, sys; corpus.prepare(pathlib.Path(sys.argv[1]))"
    for name in ("one", "two"):
        python("-c", code, str(tmp_path / name), PYTHONPATH=str(EXAMPLES / "charlm"))
    assert hashes(tmp_path / "one") == hashes(tmp_path / "two")
    assert sorted(path.stat().st_size for path in (tmp_path / "one").iterdir()) == [1 << 16, 1 << 20]


def test_a_loop_of_ones_own_differs_from_a_plain_one_by_five_lines_which_the_docs_show():
    plain, own = (
        (EXAMPLES / "digits" / f"{name}_loop.py").read_text().splitlines() for name in ("plain", "own")
    )
    found = [line for line in difflib.ndiff(plain, own) if line[0] in "+-" and line[1:].strip()]
    gone, come = ([line[2:] for line in found if line[0] == sign] for sign in "-+")
    assert (len(gone), len(come)) == (4, 5)
    page = (EXAMPLES.parent / "docs" / "loop.md").read_text()
    rows = [
        line.split("|")[2:4]
        for line in page.splitlines()
        if line[:4] in {f"| {number} " for number in range(1, 6)}
    ]
    shown = [[cell.strip().strip("`").strip() for cell in row] for row in rows]
    assert [row[0] for row in shown[1:]] == [line.strip() for line in gone]
    assert [row[1] for row in shown] == [line.strip() for line in come]


@pytest.mark.soak
def test_the_plain_loop_learns_digits(tmp_path):
    done = python("digits/plain_loop.py", DIGITS_DATA=str(tmp_path))
    assert metrics(done.stdout)["accuracy"] > 0.93


@pytest.mark.soak
def test_a_new_head_learns_on_the_frozen_trunk_of_another_job(tmp_path):
    def trained(name: str, *flags: str) -> dict[str, float]:
        done = python(
            f"finetune/{name}.py", "--export", str(tmp_path / name), *flags, FINETUNE_DATA=str(tmp_path)
        )
        return metrics("\n".join(line for line in done.stdout.splitlines() if line.startswith("accuracy")))

    assert trained("pretrain", "--epochs", "2")["accuracy"] > 0.7
    start = tmp_path / "pretrain" / "model.safetensors"
    assert trained("finetune", "--epochs", "3", "--init-from", str(start))["accuracy"] > 0.7
    before, after = load_file(start), load_file(tmp_path / "finetune" / "model.safetensors")
    trunk = [name for name in before if name.startswith("0.")]
    assert len(trunk) == 4
    assert all(before[name].tobytes() == after[name].tobytes() for name in trunk)
