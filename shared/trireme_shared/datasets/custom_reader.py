"""The user's own reader of a `Custom` dataset, imported by name in the master (which counts) and the trainers (which read)."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from trireme_shared.datasets.random_state import START_SEED, seeded
from trireme_shared.datasets.user_modules import enter, import_named
from trireme_shared.protocol.errors import DatasetError, is_interrupt


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
