"""Which methods each path has and which query parameters they take, from the API's document.

Starlette's own 405 names only the methods of the first route that matches. A path of the only job is documented with the job's name
in it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from starlette.routing import compile_path

Methods = dict[str, frozenset[str] | None]  # method -> names of its query parameters; None: it may have any
IF_MATCH = "If-Match"
offload = asyncio.to_thread


class DocumentedPaths:
    """`document` is asked for by `ready`, in a thread: it takes a second of a processor, in which the event loop would renew no lease. `beside`: paths that
    can be read, which the document leaves out."""

    def __init__(self, document: Callable[[], dict[str, Any]], beside: Iterable[str] = ()) -> None:
        self._document = document
        self._beside = frozenset(beside)
        self._patterns: list[tuple[re.Pattern[str], Methods, frozenset[str]]] | None = None

    async def ready(self) -> None:
        """Before any of the questions."""
        if self._patterns is None:
            self._patterns = await offload(self._read)

    def methods(self, path: str) -> Methods:
        """Without HEAD and OPTIONS. Empty: the path is not documented."""
        found: Methods = {"GET": None} if path in self._beside else {}
        for methods, _ in self._matching(path):
            found = {**methods, **found}
        return found

    def takes_if_match(self, method: str, path: str) -> bool:
        return any(method in conditional for _, conditional in self._matching(path))

    def allowed(self, path: str) -> list[str]:
        """All methods, for the header Allow. Empty: as for `methods`."""
        found = set(self.methods(path))
        if "GET" in found:
            found.add("HEAD")
        return sorted(found | {"OPTIONS"}) if found else []

    def _matching(self, path: str) -> Iterator[tuple[Methods, frozenset[str]]]:
        """The methods of each path of the document that it is, and those of them that take If-Match."""
        assert self._patterns is not None, "not ready"
        named = "/v1/jobs/_" + path.removeprefix("/v1").removeprefix("/job")
        for pattern, methods, conditional in self._patterns:
            if pattern.match(path) or pattern.match(named):
                yield methods, conditional

    def _read(self) -> list[tuple[re.Pattern[str], Methods, frozenset[str]]]:
        return [
            (
                compile_path(template)[0],
                {method.upper(): _names(operation, "query") for method, operation in methods.items()},
                frozenset(method.upper() for method, each in methods.items() if IF_MATCH in _names(each, "header")),
            )
            for template, methods in self._document()["paths"].items()
        ]


def _names(operation: dict[str, Any], place: str) -> frozenset[str]:
    return frozenset(each["name"] for each in operation.get("parameters", []) if each["in"] == place)
