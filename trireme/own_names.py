"""`python script.py` with a user's module that has the name of one of our services beside it: both are found.

The script's `import master_service` gives the user's module, as in plain Python. Its `__path__` has our
folder, too, so our own `from master_service.core import ...` goes on to find ours below that name.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import FrameType, ModuleType

# without pathlib: the import of trireme is quick
_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
_SERVICES = ("master_service", "pserver_service", "trainer_agent")


class BesideUsers:
    """Finds the services: the user's module for the user's imports, our package for ours."""

    @staticmethod
    def find_spec(
        name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """None: it is looked for as any other module."""
        if name not in _SERVICES:
            return None
        folder = os.path.join(_FOLDER, name)  # noqa: PTH118
        first = os.path.join(folder, "__init__.py")  # noqa: PTH118
        found = PathFinder.find_spec(name)
        if found is None or found.origin == first or _is_asked_by_us(sys._getframe(1)):  # noqa: SLF001
            return importlib.util.spec_from_file_location(name, first, submodule_search_locations=[folder])
        found.submodule_search_locations = [*(found.submodule_search_locations or ()), folder]
        return found


def make_room() -> None:
    """Install the finder, once in a process; it serves modules of the user that are imported already, too."""
    if BesideUsers in sys.meta_path:
        return
    sys.meta_path.insert(0, BesideUsers)
    for name in _SERVICES:
        folder, there = os.path.join(_FOLDER, name), sys.modules.get(name)  # noqa: PTH118
        places = list(getattr(there, "__path__", ()))
        if there is not None and folder not in places:
            there.__path__ = [*places, folder]


def _is_asked_by_us(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename.startswith(
        ("<frozen importlib", importlib.__file__)
    ):
        frame = frame.f_back
    name = str(frame.f_globals.get("__package__") or "") if frame is not None else ""
    return name.partition(".")[0] in (*_SERVICES, "trireme", "trireme_shared")
