"""A file system in memory that can be out of reach: `away://`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


class AwayFileSystem(MemoryFileSystem):
    """`error`: what every request gets, if anything."""

    protocol = "away"
    cachable = False
    error: ClassVar[OSError | None] = None

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("away://").strip("/")

    def open(self, *args: Any, **kwargs: Any) -> Any:
        self._answer()
        return super().open(*args, **kwargs)

    def info(self, path: str, **kwargs: Any) -> Any:
        self._answer()
        return super().info(path, **kwargs)

    def _answer(self) -> None:
        if AwayFileSystem.error is not None:
            raise AwayFileSystem.error


@contextmanager
def unreachable(error: OSError) -> Iterator[None]:
    AwayFileSystem.error = error
    try:
        yield
    finally:
        AwayFileSystem.error = None


fsspec.register_implementation("away", AwayFileSystem, clobber=True)
