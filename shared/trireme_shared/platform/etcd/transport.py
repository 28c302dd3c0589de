"""The interface below the client: one attempt of one request or one stream. Everything above it is the same for a real etcd
(etcd3_transport.py) and the simulated one of the tests.

Bodies are dicts with etcd's JSON field names, but native values: keys and values are bytes, int64 are ints, absent
fields are zero. Only the real transport speaks base64 and decimal strings (codec.py).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Protocol

Body = dict[str, Any]

RANGE, PUT, DELETE, TXN, COMPACT = "/kv/range", "/kv/put", "/kv/deleterange", "/kv/txn", "/kv/compaction"
GRANT, REVOKE, KEEP_ALIVE, TIME_TO_LIVE = "/lease/grant", "/lease/revoke", "/lease/keepalive", "/lease/timetolive"
WATCH, STATUS, AUTHENTICATE = "/watch", "/maintenance/status", "/auth/authenticate"

_WRITES = frozenset({PUT, DELETE, COMPACT, GRANT, REVOKE})


class Transport(Protocol):
    async def call(self, method: str, body: Body, timeout_s: float) -> Body:
        """One attempt of at most `timeout_s`. Raises the errors of errors.py; Retryable means: nothing was written."""
        ...

    def stream(self, method: str, body: Body) -> AsyncGenerator[Body, None]:
        """The messages of a server stream until it ends or breaks (Retryable): also when it is quiet and etcd answers nothing else
        either. Close it (`contextlib.aclosing`)."""
        ...

    async def close(self) -> None: ...


def is_write(method: str, body: Body) -> bool:
    """Whether repeating the request after a lost answer could do something twice."""
    if method == TXN:
        return any("request_range" not in op for branch in ("success", "failure") for op in body.get(branch, ()))
    return method in _WRITES
