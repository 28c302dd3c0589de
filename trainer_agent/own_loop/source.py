"""Scripts with a training loop of their own: recognised by their text, and run as `python script.py` runs
them.

model, optimizer, batches = trireme.prepare(model, optimizer, dataset)
for batch in batches: ...
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from trireme_shared.datasets.user_modules import enter
from trireme_shared.protocol.errors import InvalidArgument

MAIN = "__main__"
_mains: list[ModuleType] = []
_before: list[Any] = []


class FromSource(SourceFileLoader):
    """Never from compiled bytecode beside the file: that is taken for the source if both are of one second
    and one size, also after an edit, and nobody compares its digest."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def has_own_loop(path: Path) -> bool:
    """Whether the script calls trireme.prepare. False for what is no Python. Raises InvalidArgument if its
    loop over the batches is in another loop."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return False
    names = _names_of_prepare(tree)
    calls = [
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) in names
    ]
    if not calls:
        return False
    batches = {
        name for node in ast.walk(tree) if isinstance(node, ast.Assign) for name in _batches(node, calls)
    }
    for outer in (node for node in ast.walk(tree) if isinstance(node, ast.For | ast.While)):
        for inner in ast.walk(outer):
            if inner is not outer and isinstance(inner, ast.For) and ast.unparse(inner.iter) in batches:
                raise InvalidArgument(
                    f"{path.name}, line {inner.lineno}: the loop over the batches is in the loop "
                    f"of line {outer.lineno}, but the "
                    "batches are those of all epochs",
                    hint="remove the outer loop, and say how many epochs there are: "
                    "trireme.prepare(..., epochs=5)",
                )
    return True


def run_as_main(path: Path) -> None:
    """Run the script, as `python script.py` does, with its folder first on sys.path. Other threads see its
    `sys.argv`, and it as `__main__`, until it ends."""
    spec = importlib.util.spec_from_file_location(MAIN, path, loader=FromSource(MAIN, str(path)))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    module.__spec__ = None  # as that of `python script.py`: multiprocessing then finds the script by its path
    enter(path.parent).prepare(module)
    with _as_main(module, [str(path)]):
        spec.loader.exec_module(module)


@contextmanager
def _as_main(module: ModuleType, arguments: list[str]) -> Iterator[None]:
    """In tests several trainers are one process: the last one to end puts back what was there before the
    first."""
    if not _mains:
        _before[:] = [sys.modules[MAIN], sys.argv]
    _mains.append(module)
    sys.modules[MAIN], sys.argv = module, arguments
    try:
        yield
    finally:
        _mains.remove(module)
        if not _mains:
            sys.modules[MAIN], sys.argv = _before


def _names_of_prepare(tree: ast.Module) -> set[str]:
    """What trireme.prepare is called in the script."""
    names = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {
                f"{alias.asname or 'trireme'}.prepare" for alias in node.names if alias.name == "trireme"
            }
        elif isinstance(node, ast.ImportFrom) and node.module == "trireme" and not node.level:
            names |= {alias.asname or alias.name for alias in node.names if alias.name == "prepare"}
    return names


def _batches(node: ast.Assign, calls: list[ast.Call]) -> Iterator[str]:
    """The name that an assignment gives to the batches of trireme.prepare."""
    for target in node.targets:
        if node.value in calls and isinstance(target, ast.Tuple) and len(target.elts) == 3:
            yield ast.unparse(target.elts[2])
