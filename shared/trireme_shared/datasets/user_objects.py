"""The user's objects that a dataset names: a `Custom` reader, which the master counts with and trainers read with, and MapStyle and
IterableStyle datasets. They are of the script, or of a module that is importable here.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from trireme_shared.datasets.random_state import START_SEED, seeded
from trireme_shared.datasets.user_modules import enter, import_named
from trireme_shared.protocol.errors import DatasetError, is_interrupt
from trireme_shared.protocol.records.datasets import IterableStyle, MapStyle


class CustomReader(Protocol):
    """The interface of the object that `Custom.reader` names."""

    def count(self, url: str) -> int: ...

    def read(self, url: str, first: int, count: int) -> Iterable[dict[str, Any]]: ...


def find_beside(script: str) -> None:
    """Makes modules in the script's folder importable here, as they are where the script runs; the script itself too. Last on
    sys.path: they must not shadow what this process imports later."""
    enter(Path(script).parent, first=False)


def load_custom(reader: str, beside: Path | None = None) -> CustomReader:
    """The reader that `pkg.mod:name` names; `beside`: see `load_named`. Raises DatasetError if it cannot be imported or lacks count or
    read."""
    found = load_named(reader, beside)
    missing = [method for method in ("count", "read") if not callable(getattr(found, method, None))]
    if missing:
        msg = f"the reader {reader} has no method {missing[0]!r}"
        raise DatasetError(msg, hint="define count(url) -> int and read(url, first, count) -> iterator of dicts")
    return found  # type: ignore[no-any-return]


def load_named(reader: str, beside: Path | None = None) -> Any:
    """The object that `pkg.mod:name` names. A module that lies in the folder `beside` is executed for this call alone: a process that
    counts for many jobs may meet several of one name. Raises DatasetError if it cannot be imported."""
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
            hint="put it beside the script, install its package, or put its folder on PYTHONPATH of master and trainers",
        ) from error


def _executed(path: Path) -> ModuleType:
    """Stays in sys.modules under a name of its own, since classes and dataclasses look for their module there."""
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


#: What functions and classes have made in this process, and with which seed. An object that several readers use is made once.
_made: WeakKeyDictionary[Any, tuple[int, Any]] = WeakKeyDictionary()


def make(maker: Callable[[], Any], seed: int, *, alone: bool = True) -> Any:
    """What `maker()` returns, with the random numbers that `seed` gives: the same in each process, and each time. It is called once in a process for
    each seed, unless what it returns can be used once only (a generator)."""
    keeps = alone and isinstance(
        maker, type | FunctionType
    )  # a process of several jobs would keep the objects of all of them
    kept = _made.get(maker) if keeps else None
    if kept is not None and kept[0] == seed:
        return kept[1]
    with seeded(seed, alone=alone):
        found = maker()
    if keeps and not isinstance(found, Iterator):
        _made[maker] = seed, found
    return found


def made_objects() -> dict[str, Any]:
    """What `make` has kept in this process, by the name of its maker: `dataset()`."""
    return {f"{maker.__name__}()": found for maker, (_, found) in _made.items()}


def load_object(dataset: MapStyle | IterableStyle, beside: Path | None = None, seed: int = 0) -> Any:
    """What the name stands for; a function or class is called, see `make`. `beside`: see `load_named`. `seed`: of the job. Raises DatasetError."""
    found = load_named(dataset.reader, beside)
    needed = ("__getitem__",) if isinstance(dataset, MapStyle) else ("__iter__",)
    if isinstance(found, type) or (callable(found) and not all(hasattr(found, name) for name in needed)):
        try:
            found = make(found, seed, alone=beside is None)
        except BaseException as error:  # the user's code may raise anything
            if is_interrupt(error):
                raise
            msg = f"{dataset.reader}() failed: {type(error).__name__}: {error}"
            raise DatasetError(msg, hint="correct the function that makes the dataset", url=dataset.reader) from error
    if not all(hasattr(found, name) for name in needed):
        msg = f"{dataset.reader} is {type(found).__name__}, which has no {needed[0]}"
        hint = "MapStyle needs len(it) and it[number]; IterableStyle needs iter(it)"
        raise DatasetError(msg, hint=hint, url=dataset.reader)
    return found


def count_object(dataset: MapStyle | IterableStyle, beside: Path | None = None, seed: int = 0) -> int:
    """`records` as it is stated, else the object's length. `seed`: of the job. Raises DatasetError."""
    if dataset.records is not None:
        return dataset.records
    found = load_object(dataset, beside, seed)
    try:
        return len(found)
    except BaseException as error:  # the user's code may raise anything
        if is_interrupt(error):
            raise
        msg = f"{dataset.reader} has no length: {type(error).__name__}: {error}"
        raise DatasetError(msg, hint="give records=N", url=dataset.reader) from error
