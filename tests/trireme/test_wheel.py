"""The wheel, in an environment without the checkout: it holds our packages alone, trains, and every command
says what it does."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.equipment.forked import clean_environment

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]
ROOT = Path(__file__).parents[2]
PACKAGES = {"master_service", "pserver_service", "trainer_agent", "trireme", "trireme_shared"}
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
EVERY_HELP = """
import typer
from typer.testing import CliRunner
from trireme.cli.app import app
command, count = typer.main.get_command(app), 0

def ask(command, words):
    global count
    done = CliRunner().invoke(app, [*words, "--help"])
    assert done.exit_code == 0 and "Usage:" in done.output, (words, done.output, done.exception)
    count += 1
    for name, below in getattr(command, "commands", {}).items():
        ask(below, [*words, name])

ask(command, [])
print(count)
"""


def run(folder: Path, *command: object, limit_s: float = 150) -> str:
    """What the command printed, from `folder` and without what leads to the checkout."""
    environment = {
        name: value
        for name, value in clean_environment().items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    done = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    assert done.returncode == 0, f"{command}: {done.stdout}\n{done.stderr}"
    return done.stdout


def built(folder: Path) -> Path:
    """The wheel, built from a copy of the sources, since a build leaves folders in them."""
    sources = folder / "sources"
    ignored = shutil.ignore_patterns("__pycache__", "node_modules")
    for name in (*sorted(PACKAGES - {"trireme_shared"}), "shared"):
        shutil.copytree(ROOT / name, sources / name, ignore=ignored)
    for other in ("tests", "benchmarks", "docker"):  # they lie beside the packages of a checkout
        (sources / other).mkdir()
        (sources / other / "__init__.py").touch()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    return folder / run(sources, sys.executable, "-c", BUILD, folder).split()[-1]


def installed(folder: Path, wheel: Path) -> Path:
    """The interpreter of a new environment with the wheel. What it needs is that of this environment (a path
    file without its path files, which would lead to the checkout)."""
    run(folder, sys.executable, "-m", "venv", "--without-pip", "venv")
    python = folder / "venv" / "bin" / "python"
    run(
        folder,
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--no-compile",
        wheel,
    )
    packages = Path(
        run(folder, python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    )
    (packages / "what_it_needs.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def test_the_wheel_trains_without_the_checkout(tmp_path: Path) -> None:
    wheel = built(tmp_path)
    with ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == PACKAGES
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)
    shutil.rmtree(tmp_path / "sources")
    python = installed(tmp_path, wheel)
    found = run(
        tmp_path, python, "-c", "import trireme, trireme_shared as s; print(trireme.__file__, s.__file__)"
    ).split()
    assert all(Path(file).is_relative_to(tmp_path / "venv") for file in found), found
    assert int(run(tmp_path, python, "-c", EVERY_HELP)) > 40
    digits = tmp_path / "digits"
    digits.mkdir()
    for name in ("digits.py", "prepare.py"):
        shutil.copy(ROOT / "examples" / "digits" / name, digits)
    settings = ("--trainers", 1, "--pservers", 1, "--epochs", 1, "--json")
    result = json.loads(run(tmp_path, python.with_name("trireme"), "run", digits / "digits.py", *settings))
    assert (result["phase"], Path(result["exports"]["safetensors"]).is_file()) == ("COMPLETED", True)
