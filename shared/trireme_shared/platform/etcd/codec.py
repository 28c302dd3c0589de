"""Native bodies <-> the JSON of etcd's gateway: bytes are base64, int64 are decimal strings, zero values are absent."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from typing import Any

from trireme_shared.platform.etcd.transport import Body

_BYTES = frozenset({"key", "value", "range_end"})
_INTEGERS = frozenset(
    {
        "revision",
        "create_revision",
        "mod_revision",
        "version",
        "lease",
        "ID",
        "TTL",
        "grantedTTL",
        "count",
        "deleted",
        "compact_revision",
        "raft_term",
        "cluster_id",
        "member_id",
        "watch_id",
        "dbSize",
        "dbSizeInUse",
        "leader",
        "raftIndex",
        "raftTerm",
    }
)


def encode(body: Body) -> bytes:
    """Integers may be JSON numbers on the way in: the gateway reads all 64 bits."""
    return json.dumps(body, default=_base64, separators=(",", ":")).encode()


def _base64(value: Any) -> str:
    if isinstance(value, bytes):
        return b64encode(value).decode("ascii")
    msg = f"{type(value).__name__} cannot be sent to etcd"
    raise TypeError(msg)


def decode(text: bytes) -> Any:
    """A JSON document in native form. Raises ValueError for invalid JSON or invalid base64."""
    return _native(json.loads(text))


def _native(value: Any) -> Any:
    if isinstance(value, dict):
        for name, item in value.items():
            if isinstance(item, str):
                if name in _BYTES:
                    value[name] = b64decode(item, validate=True)
                elif name in _INTEGERS and item.lstrip("-").isdigit():
                    value[name] = int(item)
            elif isinstance(item, dict | list):
                _native(item)
    elif isinstance(value, list):
        for item in value:
            _native(item)
    return value
