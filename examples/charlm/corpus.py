"""Text that every machine with Python has: the sources of its standard library, in order of their paths.

    data/stdlib-3.11.7-train.txt    the first TRAIN_BYTES
    data/stdlib-3.11.7-valid.txt    the VALID_BYTES after them

Deterministic for one Python version; any number of processes may prepare the same folder at once.
"""

from __future__ import annotations

import os
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path

TRAIN_BYTES = 1 << 20
VALID_BYTES = 1 << 16
NOT_LIBRARY = {
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "encodings",
}


def prepare(folder: Path) -> dict[str, Path]:
    """Write the files that do not exist yet; returns {"train": path, "valid": path}."""
    paths = {name: folder / f"stdlib-{platform.python_version()}-{name}.txt" for name in ("train", "valid")}
    if all(path.exists() for path in paths.values()):
        return paths
    text = b"".join(_sources(Path(sysconfig.get_paths()["stdlib"]), TRAIN_BYTES + VALID_BYTES))
    folder.mkdir(parents=True, exist_ok=True)
    for path, content in ((paths["train"], text[:TRAIN_BYTES]), (paths["valid"], text[TRAIN_BYTES:])):
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        temporary.write_bytes(content)
        temporary.replace(path)
    return paths


def _sources(library: Path, limit: int) -> Iterator[bytes]:
    """The library's sources, cut after `limit` bytes."""
    for path in sorted(library.rglob("*.py"), key=lambda path: path.relative_to(library).as_posix()):
        if not NOT_LIBRARY.isdisjoint(path.relative_to(library).parts):
            continue
        content = path.read_bytes()[:limit]
        limit -= len(content)
        yield content
        if limit == 0:
            return
