"""The document of the master's API in tests: made once for all applications, since it takes a second, and in
virtual time without a thread."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

from tests.equipment.replaced import replaced
from tests.equipment.virtual_loop import VirtualLoop

_documents: dict[int, Any] = {}  # by the number of routers: those of a cluster's leader are more


@contextmanager
def documents_made_once() -> Iterator[None]:
    """Nothing, as long as nobody has loaded the API."""
    document = sys.modules.get("master_service.api.openapi.document")
    documentation = sys.modules.get("master_service.api.openapi.documentation")
    with ExitStack() as both:
        if document is not None and documentation is not None:
            both.enter_context(replaced(document, "new_document", _once(document.new_document)))
            both.enter_context(replaced(documentation, "offload", _offload))
        yield


def _once(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @wraps(make)
    def made(app: Any) -> Any:
        size = len(app.routes)
        if size not in _documents:
            _documents[size] = make(app)
        return _documents[size]

    return made


async def _offload(work: Callable[..., Any], *given: Any) -> Any:
    if isinstance(asyncio.get_running_loop(), VirtualLoop):
        return work(*given)
    return await asyncio.to_thread(work, *given)
