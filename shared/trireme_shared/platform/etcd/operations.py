"""What goes to etcd and comes back, as values, and the interface that carries it. etcd's limits are checked
before sending.

    Compare, Put, Delete, Get ─► Transport: one attempt of one request or stream
        ─► KeyValue, RangeResult, TxnResult, WatchBatch

Everything above Transport is the same for a real etcd (etcd3_transport.py) and the simulated one of the
tests. Bodies are dicts with etcd's JSON field names, but native values: keys and values are bytes, int64 are
ints, absent fields are zero.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from trireme_shared.platform.etcd.errors import Fatal, LimitExceeded

Body = dict[str, Any]

RANGE, PUT, DELETE, TXN, COMPACT = "/kv/range", "/kv/put", "/kv/deleterange", "/kv/txn", "/kv/compaction"
GRANT, REVOKE, KEEP_ALIVE, TIME_TO_LIVE = (
    "/lease/grant",
    "/lease/revoke",
    "/lease/keepalive",
    "/lease/timetolive",
)
WATCH, STATUS, AUTHENTICATE = "/watch", "/maintenance/status", "/auth/authenticate"

_WRITES = frozenset({PUT, DELETE, COMPACT, GRANT, REVOKE})

MAX_OPERATIONS = 128
MAX_BYTES = 1 << 20  # etcd accepts 1.5 MiB including its own framing

Relation = Literal["==", "!=", ">", "<"]
_RELATIONS: dict[str, str] = {"==": "EQUAL", "!=": "NOT_EQUAL", ">": "GREATER", "<": "LESS"}


def prefix_end(prefix: bytes) -> bytes:
    r"""First key after all keys that start with `prefix`; b"\0" (etcd's "to the end") if there is none."""
    trimmed = prefix.rstrip(b"\xff")
    return trimmed[:-1] + bytes((trimmed[-1] + 1,)) if trimmed else b"\0"


def interval(key: str, end: str | None, prefix: bool) -> tuple[bytes, bytes]:
    """(key, range_end) as etcd wants them; an empty range_end means the single key."""
    first = key.encode()
    if prefix:
        return first or b"\0", prefix_end(first)
    return first, b"" if end is None else end.encode()


@dataclass(frozen=True, slots=True)
class Compare:
    """One condition of a transaction: `Compare.create(key, "==", 0)` holds while the key does not exist.

    On a missing key create, mod, version and lease are 0, and every comparison of the value is false.
    """

    key: str
    target: Literal["CREATE", "MOD", "VERSION", "VALUE", "LEASE"]
    relation: Relation
    operand: int | bytes

    @classmethod
    def create(cls, key: str, relation: Relation, revision: int) -> Compare:
        return cls(key, "CREATE", relation, revision)

    @classmethod
    def mod(cls, key: str, relation: Relation, revision: int) -> Compare:
        return cls(key, "MOD", relation, revision)

    @classmethod
    def version(cls, key: str, relation: Relation, version: int) -> Compare:
        return cls(key, "VERSION", relation, version)

    @classmethod
    def value(cls, key: str, relation: Relation, value: bytes) -> Compare:
        return cls(key, "VALUE", relation, value)

    @classmethod
    def lease(cls, key: str, relation: Relation, lease: int) -> Compare:
        return cls(key, "LEASE", relation, lease)

    def body(self) -> Body:
        field = {"CREATE": "create_revision", "MOD": "mod_revision"}.get(self.target, self.target.lower())
        return {
            "key": self.key.encode(),
            "target": self.target,
            "result": _RELATIONS[self.relation],
            field: self.operand,
        }


@dataclass(frozen=True, slots=True)
class Put:
    """`lease` 0 detaches the key from any lease it had: an update of a leased key repeats its lease."""

    key: str
    value: bytes
    lease: int = 0

    def body(self) -> Body:
        return {"key": self.key.encode(), "value": self.value, "lease": self.lease}


@dataclass(frozen=True, slots=True)
class Delete:
    key: str
    end: str | None = None
    prefix: bool = False

    def body(self) -> Body:
        first, end = interval(self.key, self.end, self.prefix)
        return {"key": first, "range_end": end} if end else {"key": first}


@dataclass(frozen=True, slots=True)
class Get:
    """`limit` 0 is none; `revision` 0 is now."""

    key: str
    end: str | None = None
    prefix: bool = False
    limit: int = 0
    count_only: bool = False
    keys_only: bool = False
    revision: int = 0

    def body(self) -> Body:
        first, end = interval(self.key, self.end, self.prefix)
        body: Body = {"key": first}
        if end:
            body["range_end"] = end
        for name in ("limit", "count_only", "keys_only", "revision"):
            if value := getattr(self, name):
                body[name] = value
        return body


Operation = Put | Delete | Get


def request_op(operation: Operation) -> Body:
    match operation:
        case Put():
            return {"request_put": operation.body()}
        case Delete():
            return {"request_delete_range": operation.body()}
        case Get():
            return {"request_range": operation.body()}


def txn_body(compares: Sequence[Compare], success: Sequence[Operation], failure: Sequence[Operation]) -> Body:
    """The request of a transaction. Raises LimitExceeded before anything is sent."""
    for name, items in (("compares", compares), ("success", success), ("failure", failure)):
        if len(items) > MAX_OPERATIONS:
            msg = f"a transaction holds at most {MAX_OPERATIONS} {name}, got {len(items)}; split it"
            raise LimitExceeded(msg)
    size = sum(len(c.key) + (len(c.operand) if isinstance(c.operand, bytes) else 8) for c in compares)
    for branch in (success, failure):
        size += sum(len(op.key) + (len(op.value) if isinstance(op, Put) else 0) for op in branch)
        _refuse_duplicates(branch)
    check_size(size, "the transaction")
    return {
        "compare": [compare.body() for compare in compares],
        "success": [request_op(operation) for operation in success],
        "failure": [request_op(operation) for operation in failure],
    }


def check_size(size: int, what: str) -> None:
    if size > MAX_BYTES:
        msg = f"{what} holds {size} bytes, at most {MAX_BYTES} are allowed; keep big state out of etcd"
        raise LimitExceeded(msg)


def _refuse_duplicates(branch: Sequence[Operation]) -> None:
    """etcd refuses a key that is put twice, or put and deleted, in one branch."""
    deletes = [interval(op.key, op.end, op.prefix) for op in branch if isinstance(op, Delete)]
    seen = {first for first, end in deletes if not end}
    ranges = [(first, end) for first, end in deletes if end]
    for op in branch:
        if not isinstance(op, Put):
            continue
        key = op.key.encode()
        if key in seen or any(covers(first, end, key) for first, end in ranges):
            msg = f"the transaction writes {op.key} twice; one branch may touch a key once"
            raise LimitExceeded(msg)
        seen.add(key)


def covers(first: bytes, end: bytes, key: bytes) -> bool:
    """Whether etcd's interval (first, range_end) holds `key`."""
    if not end:
        return key == first
    return key >= first and (end == b"\0" or key < end)


@dataclass(frozen=True, slots=True)
class KeyValue:
    """`lease` 0: none. `version` counts the puts since creation."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    version: int
    lease: int

    @classmethod
    def of(cls, body: Body) -> KeyValue:
        get = body.get
        return cls(
            body["key"].decode("utf-8", "surrogateescape"),
            get("value", b""),
            get("create_revision", 0),
            get("mod_revision", 0),
            get("version", 0),
            get("lease", 0),
        )


@dataclass(frozen=True, slots=True)
class RangeResult:
    """Keys in order at `revision`; `count` is the number in the whole range, also when a limit cut `kvs`
    (`more`)."""

    revision: int
    kvs: tuple[KeyValue, ...] = ()
    count: int = 0
    more: bool = False

    @classmethod
    def of(cls, body: Body, revision: int) -> RangeResult:
        kvs = tuple([KeyValue.of(kv) for kv in body.get("kvs", ())])
        return cls(revision, kvs, body.get("count", 0), body.get("more", False))

    @property
    def first(self) -> KeyValue | None:
        return self.kvs[0] if self.kvs else None


@dataclass(frozen=True, slots=True)
class TxnResult:
    """`revision` is that of the transaction's writes if it succeeded. One result per operation of the branch
    taken: a RangeResult for Get, the number of deleted keys for Delete, None for Put."""

    succeeded: bool
    revision: int
    results: tuple[RangeResult | int | None, ...] = ()

    @classmethod
    def of(cls, body: Body) -> TxnResult:
        revision = body["header"]["revision"]
        return cls(
            body.get("succeeded", False),
            revision,
            tuple([_op_result(response, revision) for response in body.get("responses", ())]),
        )

    def range(self, index: int) -> RangeResult:
        """The result of the Get at `index` of the branch taken."""
        result = self.results[index]
        assert isinstance(result, RangeResult), f"operation {index} was not a Get: {result!r}"
        return result


def _op_result(response: Body, revision: int) -> RangeResult | int | None:
    if "response_range" in response:
        return RangeResult.of(response["response_range"], revision)
    if "response_delete_range" in response:
        return int(response["response_delete_range"].get("deleted", 0))
    if "response_put" in response:
        return None
    raise Fatal(f"etcd answered an operation with {sorted(response)}; this client does not know it")


@dataclass(frozen=True, slots=True)
class Space:
    """`full`: etcd has used up its quota and takes no writes (its alarm NOSPACE)."""

    used_bytes: int
    full: bool


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """A delete's `kv` has only `key` and `mod_revision`."""

    type: Literal["put", "delete"]
    kv: KeyValue

    @classmethod
    def of(cls, body: Body) -> WatchEvent:
        return cls("delete" if body.get("type") == "DELETE" else "put", KeyValue.of(body["kv"]))


@dataclass(frozen=True, slots=True)
class WatchBatch:
    """`reset`: replace the known state by `kvs` (all keys of the range at `revision`); else apply
    `events`."""

    revision: int
    events: Sequence[WatchEvent] = ()
    reset: bool = False
    kvs: Sequence[KeyValue] = ()


class Transport(Protocol):
    async def call(self, method: str, body: Body, timeout_s: float) -> Body:
        """One attempt of at most `timeout_s`. Raises the errors of errors.py; Retryable means: nothing was
        written."""
        ...

    def stream(self, method: str, body: Body) -> AsyncGenerator[Body, None]:
        """The messages of a server stream until it ends or breaks (Retryable): also when it is quiet and etcd
        answers nothing else either. Close it (`contextlib.aclosing`)."""
        ...

    async def close(self) -> None: ...


def is_write(method: str, body: Body) -> bool:
    """Whether repeating the request after a lost answer could do something twice."""
    if method == TXN:
        return any(
            "request_range" not in op for branch in ("success", "failure") for op in body.get(branch, ())
        )
    return method in _WRITES
