"""Whether a comparison measures the tree that it says, not the one that is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.compare import environment_of

PACKAGES = {"trireme_shared": "shared", "trireme": ".", "trainer_agent": ".", "pserver_service": "."}


def test_every_package_comes_from_the_tree_that_is_measured(tmp_path: Path) -> None:
    """Also in members, which are started without their folder on the path (-P)."""
    made = [tmp_path / place / package / "__init__.py" for package, place in PACKAGES.items()]
    for file in made:
        file.parent.mkdir(parents=True)
        file.touch()

    asked = "import importlib\n" + "".join(
        f"print(importlib.import_module({package!r}).__file__)\n" for package in PACKAGES
    )
    found = subprocess.run(
        [sys.executable, "-P", "-c", asked],
        env=environment_of(tmp_path),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )

    assert found.stdout.splitlines() == [str(file) for file in made]
