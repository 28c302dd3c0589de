"""Which methods each path has and which query parameters they take, from the API's document.

Starlette's own 405 names only the methods of the first route that matches. A path of the only job is documented with the job's name
in it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from starlette.routing import compile_path

Methods = dict[str, frozenset[str] | None]  # method -> names of its query parameters; None: it may have any


class DocumentedPaths:
    """`document` is asked for at the first request. `beside`: paths that can be read, which the document leaves out."""

    def __init__(self, document: Callable[[], dict[str, Any]], beside: Iterable[str] = ()) -> None:
        self._document = document
        self._beside = frozenset(beside)
        self._patterns: list[tuple[re.Pattern[str], Methods]] | None = None

    def methods(self, path: str) -> Methods:
        """Without HEAD and OPTIONS. Empty: the path is not documented."""
        named = "/v1/jobs/_" + path.removeprefix("/v1").removeprefix("/job")
        found: Methods = {"GET": None} if path in self._beside else {}
        for pattern, methods in self._compiled():
            if pattern.match(path) or pattern.match(named):
                found = {**methods, **found}
        return found

    def allowed(self, path: str) -> list[str]:
        """All methods, for the header Allow. Empty: as for `methods`."""
        found = set(self.methods(path))
        if "GET" in found:
            found.add("HEAD")
        return sorted(found | {"OPTIONS"}) if found else []

    def _compiled(self) -> list[tuple[re.Pattern[str], Methods]]:
        if self._patterns is None:
            self._patterns = [
                (compile_path(path)[0], {method.upper(): _query(operation) for method, operation in methods.items()})
                for path, methods in self._document()["paths"].items()
            ]
        return self._patterns


def _query(operation: dict[str, Any]) -> frozenset[str]:
    return frozenset(each["name"] for each in operation.get("parameters", []) if each["in"] == "query")
