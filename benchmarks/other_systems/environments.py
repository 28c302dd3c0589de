"""Virtual environments of other systems, each its own: they want other versions of numpy and protobuf than we
do.

    FOLDER/paddle, FOLDER/tfra      FOLDER: what TRIREME_PEERS names, else trireme/peers in the user's cache
                                    folder

`python -m benchmarks.other_systems paddle tfra` makes them (0.6 and 1.8 GB); what is not there is left out of
tables, with that command.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

PACKAGES = {
    "paddle": ("paddlepaddle==2.6.2", "protobuf==4.25.3", "numpy<2", "setuptools"),
    "tfra": ("tensorflow-cpu==2.16.2", "tensorflow-recommenders-addons==0.8.1", "tf_keras==2.16.0"),
}
MARK = "installed.txt"  # written last: the packages that are all there
HERE = Path(__file__).resolve().parent


def folder() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return Path(os.environ.get("TRIREME_PEERS", cache / "trireme" / "peers"))


def how_to_install(name: str) -> str:
    return f"not installed: python -m benchmarks.other_systems {name}"


def interpreter(name: str) -> Path | None:
    """None if that system is not installed, or not the versions that PACKAGES names."""
    home = folder() / name
    mark = home / MARK
    if not mark.is_file() or mark.read_text().split() != list(PACKAGES[name]):
        return None
    return home / "bin" / "python"


def install(name: str) -> None:
    """Raises CalledProcessError; nothing is left then."""
    home = folder() / name
    shutil.rmtree(home, ignore_errors=True)
    try:
        venv.create(home, with_pip=True)
        pip = [
            str(home / "bin" / "python"),
            "-m",
            "pip",
            "install",
            "--no-compile",
            "--disable-pip-version-check",
        ]
        subprocess.run([*pip, "--quiet", *PACKAGES[name]], check=True)
    except BaseException:
        shutil.rmtree(home, ignore_errors=True)
        raise
    (home / MARK).write_text("\n".join(PACKAGES[name]) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+", choices=PACKAGES, help="what to install")
    for name in parser.parse_args().names:
        if interpreter(name) is None:
            print(f"==> {name}: {' '.join(PACKAGES[name])} in {folder() / name}", flush=True)
            try:
                install(name)
            except (OSError, subprocess.CalledProcessError) as error:
                print(f"{name} could not be installed: {error}", file=sys.stderr)
                return 1
        print(f"{name} is in {folder() / name}")
    return 0
