#!/usr/bin/env python3
"""What Trireme needs, one requirement a line, for `pip install -r`: docker/dependencies.py PYPROJECT [EXTRA
...].

The image installs these in a layer of its own, before the code is copied.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def dependencies(pyproject: Path, extras: list[str]) -> list[str]:
    """Of the project and of these extras. Raises KeyError: there is no such extra."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    return [
        *project["dependencies"],
        *(each for extra in extras for each in project["optional-dependencies"][extra]),
    ]


if __name__ == "__main__":
    sys.stdout.write("\n".join(dependencies(Path(sys.argv[1]), sys.argv[2:])) + "\n")
