"""The modules beside a user's script, found as `python script.py` finds them: before ours, those of libraries, and the standard library's.

A process of ours has imported many modules before it runs the script, and they stay in sys.modules for whoever uses them. Where a
module of the script's folder has the name of one of them, modules of the folder get the folder's by an `__import__` of their own.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import FrozenImporter, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

OURS = ("master_service", "pserver_service", "trainer_agent", "trireme", "trireme_shared")
_folders: dict[str, ScriptFolder] = {}


class ScriptFolder:
    """The folder of a script, whose modules `names` other modules of this process have as well."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.names = frozenset(name for name in _modules_in(path) if _is_taken(name, path))
        self._modules: dict[str, ModuleType] = {}
        self._builtins = {**vars(builtins), "__import__": self._import}

    def __repr__(self) -> str:
        return f"<ScriptFolder {self._path}: {', '.join(sorted(self.names))}>"

    def prepare(self, module: ModuleType) -> None:
        """Look for what `module` imports in this folder first: call it before a module of the folder is executed."""
        if self.names:
            vars(module)["__builtins__"] = self._builtins

    def has(self, name: str) -> bool:
        """Whether a module of this folder has the name of another one that this process has."""
        return name.partition(".")[0] in self.names

    def load(self, name: str) -> ModuleType:
        """The module of the folder, executed once. Raises ImportError, and whatever the module raises."""
        known = self._modules if self.has(name) else sys.modules
        if name in known:
            return known[name]
        parent, _, last = name.rpartition(".")
        package = self.load(parent) if parent else None
        if package is not None and not hasattr(package, "__path__"):
            raise ModuleNotFoundError(f"No module named {name!r}; {parent!r} is not a package", name=name)
        spec = PathFinder.find_spec(name, list(package.__path__) if package is not None else [self._path])
        if spec is None or spec.loader is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        module = importlib.util.module_from_spec(spec)
        self.prepare(module)
        known[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del known[name]
            raise
        if package is not None:
            setattr(package, last, module)
        return known[name]

    def _import(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,  # noqa: A002  as the built-in function calls it
        locals: Mapping[str, Any] | None = None,  # noqa: A002
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        """In place of the built-in `__import__`, for modules of this folder."""
        full = importlib.util.resolve_name("." * level + name, (globals or {}).get("__package__")) if level else name
        first = full.partition(".")[0]
        if not self.has(full) and (first in sys.modules or first not in _modules_in(self._path)):
            return __import__(name, globals, locals, fromlist or (), level)
        found = self.load(full)
        if not fromlist:
            return self.load(first)
        if hasattr(found, "__path__"):
            for each in getattr(found, "__all__", ()) if "*" in fromlist else fromlist:
                if not hasattr(found, each):
                    self._load_if_there(f"{full}.{each}")
        return found

    def _load_if_there(self, name: str) -> None:
        try:
            self.load(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise


def enter(folder: Path, *, first: bool = True) -> ScriptFolder:
    """Make the modules of a script's folder importable here. `first`: the folder comes first on sys.path, as where the script runs, else last."""
    path = str(folder)
    for name in OURS:  # else they would be looked for in the script's folder later
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name)
    if path not in _folders:
        _folders[path] = ScriptFolder(path)
    if path not in sys.path:
        sys.path.insert(0 if first else len(sys.path), path)
        importlib.invalidate_caches()
    return _folders[path]


def import_named(name: str) -> ModuleType:
    """The module that a script's `import name` finds, by the folders that were entered here. Raises ImportError."""
    mine = next((folder for path, folder in _folders.items() if path in sys.path and folder.has(name)), None)
    return mine.load(name) if mine is not None else importlib.import_module(name)


def _modules_in(path: str) -> set[str]:
    """The modules and packages of a folder. A folder without __init__.py is found after all modules of its name, in plain Python, too."""
    return {each.stem for each in Path(path).glob("*.py") if each.name != "__init__.py"} | {
        each.parent.name for each in Path(path).glob("*/__init__.py")
    }


def _is_taken(name: str, path: str) -> bool:
    """Whether this process has another module of that name. What is built into the interpreter is found before the script's folder."""
    if name in sys.builtin_module_names or FrozenImporter.find_spec(name) is not None:
        return False
    there = sys.modules.get(name)
    if there is None:
        return False
    places = [getattr(there, "__file__", None), *getattr(there, "__path__", ())]
    return not any(Path(place).is_relative_to(path) for place in places if place)
