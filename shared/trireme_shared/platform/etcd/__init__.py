"""The etcd client of all services; `connect(urls)` makes one."""

from __future__ import annotations

from collections.abc import Sequence

from trireme_shared.platform.etcd.client import Etcd, Lease
from trireme_shared.platform.etcd.errors import (
    Compacted,
    Fatal,
    LeaseLost,
    LimitExceeded,
    NoSpace,
    OutcomeUnknown,
    Refused,
    Retryable,
    Unauthenticated,
    WentBack,
)
from trireme_shared.platform.etcd.operations import (
    Compare,
    Delete,
    Get,
    KeyValue,
    Operation,
    Put,
    Space,
    TxnResult,
    WatchBatch,
    WatchEvent,
)

__all__ = [
    "Compacted",
    "Compare",
    "Delete",
    "Etcd",
    "Fatal",
    "Get",
    "KeyValue",
    "Lease",
    "LeaseLost",
    "LimitExceeded",
    "NoSpace",
    "Operation",
    "OutcomeUnknown",
    "Put",
    "Refused",
    "Retryable",
    "Space",
    "TxnResult",
    "Unauthenticated",
    "WatchBatch",
    "WatchEvent",
    "WentBack",
    "connect",
]


def connect(
    urls: Sequence[str],
    *,
    user: str = "",
    password: str = "",
    ca: str = "",
    cert: str = "",
    key: str = "",
    share_watches: bool = False,
) -> Etcd:
    """A client of the etcd cluster at `urls` (http:// or https://host:port). Touches no network; close it at
    the end.

    `ca`, `cert`, `key`: PEM files; `https` without `ca` trusts the system's authorities. Host names are
    checked. With users switched on, etcd's gateway refuses client certificates that have a CommonName: make
    them without. `share_watches`: all over one connection, of a process with many.
    """
    # etcd3-py and aiohttp cost 0.2 s to import
    from trireme_shared.platform.etcd.etcd3_transport import Etcd3Transport  # noqa: PLC0415

    login = {"user": user, "password": password, "ca": ca, "cert": cert, "key": key}
    return Etcd(Etcd3Transport(urls, share_watches=share_watches, **login))
