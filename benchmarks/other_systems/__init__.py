"""Other systems that push, step and pull: Ray and MXNet, each in a virtual environment of its own (they want
other versions of Python and numpy than we do).

    python -m venv FOLDER/ray       FOLDER/ray/bin/pip install ray numpy
    python3.8 -m venv FOLDER/mxnet  FOLDER/mxnet/bin/pip install mxnet==1.9.1 'numpy<1.24'
    python -m benchmarks.dense --peers FOLDER --optimizers SGD
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

from benchmarks.baselines import LR, PERIOD, free_port, gradient_of

HERE = Path(__file__).resolve().parent
NAMES = ("ray", "mxnet")


def python_of(folder: Path, name: str) -> Path | None:
    """The interpreter of its virtual environment, None if that does not exist or cannot import it."""
    python = folder / name / "bin" / "python"
    if not python.exists():
        return None
    asked = subprocess.run([str(python), "-c", f"import {name}"], capture_output=True, check=False)
    return python if asked.returncode == 0 else None


class OtherSystem:
    """A contender of dense.py; with SGD only. `python`: of its virtual environment."""

    def __init__(self, name: str, python: Path) -> None:
        roles = {"ray": [{}], "mxnet": _dmlc()}[name]
        self._processes = [self._start(name, python, role) for role in roles]
        self._worker = self._processes[-1]

    def _start(self, name: str, python: Path, role: dict[str, str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(python), str(HERE / f"{name}_worker.py")],
            env={**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1", **role},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def _ask(self, name: str, **given):
        self._worker.stdin.write(json.dumps([name, given]) + "\n")
        self._worker.stdin.flush()
        line = self._worker.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._worker.args} ended: run it by hand to see why")
        return json.loads(line)["answer"]

    def setup(self, mib: int, optimizer: str) -> None:
        if optimizer != "SGD":
            raise ValueError(f"--peers have SGD only, not {optimizer}: say --optimizers SGD")
        self._ask("setup", elements=mib << 18, lr=LR["SGD"], period=gradient_of(PERIOD).tolist())

    def round(self) -> float:
        return self._ask("round")

    def cpu(self) -> list[float]:
        ticks = os.sysconf("SC_CLK_TCK")
        return [sum(map(int, _stat(process.pid)[11:13])) / ticks for process in self._processes]

    def check(self) -> bool:
        rounds, first = self._ask("first", count=PERIOD)
        expected = [-LR["SGD"] * rounds * value for value in gradient_of(PERIOD).tolist()]
        return all(abs(a - b) <= 1e-4 * max(1.0, abs(b)) for a, b in zip(first, expected, strict=True))

    def close(self) -> None:
        for process in self._processes:
            process.stdin.close()
        time.sleep(0.2)
        for process in self._processes:
            process.terminate()
            process.wait(10)


def _dmlc() -> list[dict[str, str]]:
    """Of a scheduler, a server and a worker."""
    common = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(free_port()), "DMLC_INTERFACE": "lo"}
    common |= {"DMLC_NUM_SERVER": "1", "DMLC_NUM_WORKER": "1"}
    return [{**common, "DMLC_ROLE": role} for role in ("scheduler", "server", "worker")]


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
