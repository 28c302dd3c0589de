"""The rendezvous store of one epoch's group, over etcd: what a member sets reaches the others by the watch that they have anyway.

No member hosts anything. Keys hang on the lease of who wrote them, and the decider deletes them with the epoch.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol

from torch._C._distributed_c10d import Store  # torch.distributed exports it only where types are not checked

TIMEOUT_S = 10.0


class Shelf(Protocol):
    """Where the values of an epoch are; calls block, from any thread, and raise TimeoutError or Superseded."""

    def put(self, name: str, value: bytes, timeout_s: float) -> None: ...

    def take(self, names: list[str], timeout_s: float) -> list[bytes]:
        """The values, as soon as all are there."""
        ...

    def held(self, names: list[str]) -> bool:
        """Whether all are there now."""
        ...


class EtcdStore(Store):
    """What torch's groups ask of a store: each key is written once. Keep a reference to it as long as the group."""

    def __init__(self, shelf: Shelf, prefix: str, timeout_s: float = TIMEOUT_S) -> None:
        super().__init__()
        self._shelf, self._prefix, self._timeout_s = shelf, prefix, timeout_s

    def set(self, key: str, value: Any) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._shelf.put(self._prefix + key, data, self._timeout_s)

    def get(self, key: str) -> bytes:
        return self._shelf.take([self._prefix + key], self._timeout_s)[0]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        limit_s = max(timeout.total_seconds() if timeout is not None else 0.0, self._timeout_s)
        self._shelf.take([self._prefix + key for key in keys], limit_s)

    def check(self, keys: list[str]) -> bool:
        return self._shelf.held([self._prefix + key for key in keys])

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()
