"""The object that a MapStyle or IterableStyle dataset names: of the script, or of a module that is importable here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shared.datasets.custom_reader import load_named
from shared.errors import DatasetError, is_interrupt
from shared.records.datasets import IterableStyle, MapStyle


def load_object(dataset: MapStyle | IterableStyle, beside: Path | None = None) -> Any:
    """What the name stands for; a function or class is called. `beside`: see `load_named`. Raises DatasetError."""
    found = load_named(dataset.reader, beside)
    needed = ("__getitem__",) if isinstance(dataset, MapStyle) else ("__iter__",)
    if isinstance(found, type) or (callable(found) and not all(hasattr(found, name) for name in needed)):
        try:
            found = found()
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


def count_object(dataset: MapStyle | IterableStyle, beside: Path | None = None) -> int:
    """`records` as it is stated, else the object's length. Raises DatasetError."""
    if dataset.records is not None:
        return dataset.records
    found = load_object(dataset, beside)
    try:
        return len(found)
    except BaseException as error:  # the user's code may raise anything
        if is_interrupt(error):
            raise
        msg = f"{dataset.reader} has no length: {type(error).__name__}: {error}"
        raise DatasetError(msg, hint="give records=N", url=dataset.reader) from error
