"""etcd's data model in memory, without time and network: revisions, ranges, transactions, leases, compaction,
history.

Every write makes one revision, whatever it touches; a transaction that changes nothing makes none. `history`
holds all events since the beginning and is never cut (it is the truth for tests); `compacted` only limits
what may be asked.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Any

from trireme_shared.platform.etcd.errors import Compacted, Fatal, LeaseLost, LimitExceeded
from trireme_shared.platform.etcd.operations import (
    COMPACT,
    DELETE,
    MAX_OPERATIONS,
    PUT,
    RANGE,
    STATUS,
    TXN,
    Body,
    covers,
)

REQUEST_BYTES = 3 << 19  # etcd's --max-request-bytes
_TO_THE_END = b"\0"

_COMPARE_FIELDS = {"CREATE": "create_revision", "MOD": "mod_revision", "VERSION": "version", "LEASE": "lease"}
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "EQUAL": lambda a, b: a == b,
    "NOT_EQUAL": lambda a, b: a != b,
    "GREATER": lambda a, b: a > b,
    "LESS": lambda a, b: a < b,
}


class Store:
    """Kvs and events are dicts in the transport's native form; they are replaced, never changed."""

    def __init__(self) -> None:
        self.revision = 1
        self.compacted = 0
        self.out_of_space = False  # as its status tells it; writes are taken all the same
        self.history: list[Body] = []
        self.leases: dict[int, set[bytes]] = {}
        self._kvs: dict[bytes, Body] = {}
        self._order: list[bytes] = []
        self._events: list[Body] = []

    def __repr__(self) -> str:
        return f"<Store revision {self.revision}: {len(self._kvs)} keys, {len(self.leases)} leases>"

    # ------------------------------------------------------------ requests

    def execute(self, method: str, body: Body) -> Body:
        """The answer without its header. Raises what etcd would answer; then nothing was changed."""
        match method:
            case "/kv/range":
                return self._range(body)
            case "/kv/put":
                self._check_put(body)
                self._put(body)
                return self._committed({})
            case "/kv/deleterange":
                return self._committed(self._delete(body))
            case "/kv/txn":
                return self._txn(body)
            case "/kv/compaction":
                return self._compact(body["revision"])
            case "/maintenance/status":
                return {"dbSize": 0, "errors": ["memberID:1 alarm:NOSPACE"] if self.out_of_space else []}
            case _:
                raise Fatal(f"the simulated etcd has no {method}")

    def _txn(self, body: Body) -> Body:
        for name in ("compare", "success", "failure"):
            operations = body.get(name, [])
            if len(operations) > MAX_OPERATIONS:
                raise LimitExceeded(f"too many operations in txn request: {len(operations)}")
            if name != "compare":
                _refuse_duplicates(operations)
        succeeded = all(self._holds(compare) for compare in body.get("compare", ()))
        branch = body.get("success" if succeeded else "failure", [])
        for operation in branch:
            if put := operation.get("request_put"):
                self._check_put(put)
            elif read := operation.get("request_range"):
                self._check_revision(read.get("revision", 0))
        responses: list[Body] = []
        for operation in branch:
            if put := operation.get("request_put"):
                self._put(put)
                responses.append({"response_put": {}})
            elif read := operation.get("request_range"):
                responses.append({"response_range": self._range(read)})
            else:
                responses.append({"response_delete_range": self._delete(operation["request_delete_range"])})
        return self._committed({"succeeded": succeeded, "responses": responses})

    def _holds(self, compare: Body) -> bool:
        kv = self._kvs.get(compare["key"])
        compares = _COMPARISONS[compare["result"]]
        if compare["target"] == "VALUE":
            return kv is not None and compares(kv["value"], compare["value"])
        field = _COMPARE_FIELDS[compare["target"]]
        return compares(kv[field] if kv else 0, compare[field])

    def _check_put(self, body: Body) -> None:
        if len(body["key"]) + len(body["value"]) > REQUEST_BYTES:
            raise LimitExceeded("request is too large")
        lease = body.get("lease", 0)
        if lease and lease not in self.leases:
            raise LeaseLost(f"requested lease not found: {lease:x}")

    def _put(self, body: Body) -> None:
        key, lease, revision = body["key"], body.get("lease", 0), self.revision + 1
        old = self._kvs.get(key)
        kv = {
            "key": key,
            "value": body["value"],
            "create_revision": old["create_revision"] if old else revision,
            "mod_revision": revision,
            "version": old["version"] + 1 if old else 1,
            "lease": lease,
        }
        if old is None:
            insort(self._order, key)
        elif old["lease"] != lease and old["lease"]:
            self.leases[old["lease"]].discard(key)
        if lease:
            self.leases[lease].add(key)
        self._kvs[key] = kv
        self._events.append({"type": "PUT", "kv": kv})

    def _delete(self, body: Body) -> Body:
        keys = self._keys(body["key"], body.get("range_end", b""))
        for key in keys:
            self._remove(key)
        return {"deleted": len(keys)}

    def _remove(self, key: bytes) -> None:
        kv = self._kvs.pop(key)
        del self._order[bisect_left(self._order, key)]
        if kv["lease"]:
            self.leases[kv["lease"]].discard(key)
        self._events.append({"type": "DELETE", "kv": {"key": key, "mod_revision": self.revision + 1}})

    def _committed(self, answer: Body) -> Body:
        if self._events:
            self.revision += 1
            self.history.extend(self._events)
            self._events = []
        return answer

    # ------------------------------------------------------------ reads

    def _keys(self, first: bytes, end: bytes) -> list[bytes]:
        if not end:
            return [first] if first in self._kvs else []
        last = len(self._order) if end == _TO_THE_END else bisect_left(self._order, end)
        return self._order[bisect_left(self._order, first) : last]

    def _range(self, body: Body) -> Body:
        first, end, revision = body["key"], body.get("range_end", b""), body.get("revision", 0)
        self._check_revision(revision)
        if revision and revision < self.revision:
            kvs = self._kvs_at(first, end, revision)
        else:
            kvs = [self._kvs[key] for key in self._keys(first, end)]
        if body.get("count_only"):
            return {"count": len(kvs)}
        limit, count = body.get("limit", 0), len(kvs)
        if limit:
            kvs = kvs[:limit]
        if body.get("keys_only"):
            kvs = [{**kv, "value": b""} for kv in kvs]
        return {"kvs": kvs, "count": count, "more": len(kvs) < count}

    def _kvs_at(self, first: bytes, end: bytes, revision: int) -> list[Body]:
        found: dict[bytes, Body] = {}
        for event in self.history:
            kv = event["kv"]
            if kv["mod_revision"] > revision:
                break
            if covers(first, end, kv["key"]):
                if event["type"] == "PUT":
                    found[kv["key"]] = kv
                else:
                    found.pop(kv["key"], None)
        return [found[key] for key in sorted(found)]

    def _check_revision(self, revision: int) -> None:
        if 0 < revision < self.compacted:
            raise Compacted(
                f"required revision {revision} has been compacted up to {self.compacted}",
                compact_revision=self.compacted,
            )
        if revision > self.revision:
            raise Fatal(f"required revision {revision} is a future revision, now is {self.revision}")

    def _compact(self, revision: int) -> Body:
        if revision <= self.compacted:
            raise Compacted(
                f"required revision has been compacted: {revision}", compact_revision=self.compacted
            )
        self._check_revision(revision)
        self.compacted = revision
        return {}

    def events_since(self, revision: int, first: bytes, end: bytes) -> list[Body]:
        """Events of the interval from `revision` on."""
        position = bisect_left(self.history, revision, key=lambda event: event["kv"]["mod_revision"])
        return [event for event in self.history[position:] if covers(first, end, event["kv"]["key"])]

    def size_bytes(self, first: bytes, end: bytes) -> int:
        return sum(len(key) + len(self._kvs[key]["value"]) for key in self._keys(first, end))

    # ------------------------------------------------------------ leases

    def grant(self, lease: int) -> None:
        if lease in self.leases:
            raise Fatal(f"lease already exists: {lease:x}")
        self.leases[lease] = set()

    def revoke(self, lease: int) -> None:
        """Delete the lease and its keys, in one revision."""
        if lease not in self.leases:
            raise LeaseLost(f"requested lease not found: {lease:x}")
        for key in sorted(self.leases[lease]):
            self._remove(key)
        del self.leases[lease]
        self._committed({})


def _refuse_duplicates(operations: list[Body]) -> None:
    deletes = [op["request_delete_range"] for op in operations if "request_delete_range" in op]
    seen: set[bytes] = set()
    for op in operations:
        if put := op.get("request_put"):
            key = put["key"]
            if key in seen or any(covers(d["key"], d.get("range_end", b""), key) for d in deletes):
                raise LimitExceeded(f"duplicate key given in txn request: {key!r}")
            seen.add(key)


STORE_METHODS = frozenset({RANGE, PUT, DELETE, TXN, COMPACT, STATUS})
