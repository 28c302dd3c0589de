"""The object that a MapStyle or IterableStyle dataset names: of the script, or of a module that is importable here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

from trireme_shared.datasets.custom_reader import load_named
from trireme_shared.datasets.random_state import seeded
from trireme_shared.protocol.errors import DatasetError, is_interrupt
from trireme_shared.protocol.records.datasets import IterableStyle, MapStyle

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
