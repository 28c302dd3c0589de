"""The modules beside a user's script, found as `python script.py` finds them: before ours, those of
libraries, and the standard library's; and the objects of them that a dataset names: a `Custom` reader,
MapStyle and IterableStyle datasets.

A process of ours has imported many modules before it runs the script, and they stay in sys.modules for
whoever uses them. Where a module of the script's folder has the name of one of them, modules of the folder
get the folder's by an `__import__` of their own.
"""

from __future__ import annotations

import builtins
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.machinery import FrozenImporter, PathFinder
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from trireme_shared.datasets.random_state import START_SEED, seeded
from trireme_shared.protocol.errors import DatasetError, is_interrupt
from trireme_shared.protocol.records.datasets import IterableStyle, MapStyle

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
        """Look for what `module` imports in this folder first: call it before a module of the folder is
        executed."""
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
        full = (
            importlib.util.resolve_name("." * level + name, (globals or {}).get("__package__"))
            if level
            else name
        )
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
    """Make the modules of a script's folder importable here. `first`: the folder comes first on sys.path, as
    where the script runs, else last."""
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
    """The module that a script's `import name` finds, by the folders that were entered here. Raises
    ImportError."""
    mine = next((folder for path, folder in _folders.items() if path in sys.path and folder.has(name)), None)
    return mine.load(name) if mine is not None else importlib.import_module(name)


def _modules_in(path: str) -> set[str]:
    """The modules and packages of a folder. A folder without __init__.py is found after all modules of its
    name, in plain Python, too."""
    return {each.stem for each in Path(path).glob("*.py") if each.name != "__init__.py"} | {
        each.parent.name for each in Path(path).glob("*/__init__.py")
    }


def _is_taken(name: str, path: str) -> bool:
    """Whether this process has another module of that name. What is built into the interpreter is found
    before the script's folder."""
    if name in sys.builtin_module_names or FrozenImporter.find_spec(name) is not None:
        return False
    there = sys.modules.get(name)
    if there is None:
        return False
    places = [getattr(there, "__file__", None), *getattr(there, "__path__", ())]
    return not any(Path(place).is_relative_to(path) for place in places if place)


class CustomReader(Protocol):
    """The interface of the object that `Custom.reader` names."""

    def count(self, url: str) -> int: ...

    def read(self, url: str, first: int, count: int) -> Iterable[dict[str, Any]]: ...


def load_custom(reader: str) -> CustomReader:
    """The reader that `pkg.mod:name` names. Raises DatasetError if it cannot be imported or lacks count or
    read."""
    found = load_named(reader)
    missing = [method for method in ("count", "read") if not callable(getattr(found, method, None))]
    if missing:
        msg = f"the reader {reader} has no method {missing[0]!r}"
        raise DatasetError(
            msg, hint="define count(url) -> int and read(url, first, count) -> iterator of dicts"
        )
    return found  # type: ignore[no-any-return]


def load_named(reader: str, beside: Path | None = None) -> Any:
    """The object that `pkg.mod:name` names. A module that lies in the folder `beside` is executed for this
    call alone. Raises DatasetError if it cannot be imported."""
    module_name, _, name = reader.partition(":")
    own = beside / f"{module_name}.py" if beside is not None else None
    try:
        with seeded(START_SEED, alone=beside is None):
            module = _executed(own) if own is not None and own.is_file() else import_named(module_name)
        return getattr(module, name)
    except BaseException as error:  # the user's module may raise anything
        if is_interrupt(error):
            raise
        msg = f"the reader {reader} cannot be imported: {type(error).__name__}: {error}"
        raise DatasetError(
            msg,
            hint="put it beside the script, install its package, or put its folder on PYTHONPATH of "
            "master and trainers",
        ) from error


def _executed(path: Path) -> ModuleType:
    """Stays in sys.modules under a name of its own, since classes and dataclasses look for their module
    there."""
    name = f"trireme_script_{hashlib.sha256(str(path).encode()).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


#: What functions and classes have made in this process, and with which seed. An object that several readers
# use is made once.
_made: WeakKeyDictionary[Any, tuple[int, Any]] = WeakKeyDictionary()


def make(maker: Callable[[], Any], seed: int) -> Any:
    """What `maker()` returns, with the random numbers that `seed` gives: the same in each process, and each
    time. It is called once in a process for each seed, unless what it returns can be used once only (a
    generator)."""
    keeps = isinstance(maker, type | FunctionType)
    kept = _made.get(maker) if keeps else None
    if kept is not None and kept[0] == seed:
        return kept[1]
    with seeded(seed):
        found = maker()
    if keeps and not isinstance(found, Iterator):
        _made[maker] = seed, found
    return found


#: Objects that a script with a loop of its own has given to trireme.prepare in this process, or what makes
# them, by the name that stands for them in a dataset.
_given: dict[str, Any] = {}


def give(name: str, found: Any) -> None:
    """`found`, or what the function `found` returns, is what the dataset called `name` reads here."""
    _given[name] = found


def is_below(path: Path, folder: Path) -> bool:
    """Whether a file of code is the user's: in the script's folder, and of no library that is installed
    there."""
    return path.is_relative_to(folder) and "site-packages" not in path.parts


def made_objects() -> dict[str, Any]:
    """What `make` has kept in this process, by the name of its maker: `dataset()`; and what was given."""
    made = {f"{maker.__name__}()": found for maker, (_, found) in _made.items()}
    return made | {name: found for name, found in _given.items() if not callable(found)}


def load_object(dataset: MapStyle | IterableStyle, seed: int = 0) -> Any:
    """What the name stands for; a function or class is called, see `make`. `seed`: of the job. Raises
    DatasetError."""
    known = dataset.reader in _given
    found = _given[dataset.reader] if known else load_named(dataset.reader)
    needed: tuple[str, ...] = ("__getitem__",) if isinstance(dataset, MapStyle) else ("__iter__",)
    if dataset.loader:
        needed = "dataset", "collate_fn"
    if isinstance(found, type) or (callable(found) and not all(hasattr(found, name) for name in needed)):
        try:
            found = make(found, seed)
        except BaseException as error:  # the user's code may raise anything
            if is_interrupt(error):
                raise
            msg = f"{dataset.reader}() failed: {type(error).__name__}: {error}"
            raise DatasetError(
                msg, hint="correct the function that makes the dataset", url=dataset.reader
            ) from error
    if not all(hasattr(found, name) for name in needed):
        msg = f"{dataset.reader} is {type(found).__name__}, which has no {needed[0]}"
        hint = "MapStyle needs len(it) and it[number], IterableStyle iter(it), with loader=True a DataLoader"
        raise DatasetError(msg, hint=hint, url=dataset.reader)
    return found


def count_object(dataset: MapStyle, seed: int = 0) -> int:
    """`records` as it is stated, else the object's length. `seed`: of the job. Raises DatasetError."""
    if dataset.records is not None:
        return dataset.records
    found = load_object(dataset, seed)
    try:
        return len(found)
    except BaseException as error:  # the user's code may raise anything
        if is_interrupt(error):
            raise
        msg = f"{dataset.reader} has no length: {type(error).__name__}: {error}"
        raise DatasetError(msg, hint="give records=N", url=dataset.reader) from error
