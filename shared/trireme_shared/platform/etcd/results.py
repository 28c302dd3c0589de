"""etcd's answers as values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from trireme_shared.platform.etcd.errors import Fatal
from trireme_shared.platform.etcd.transport import Body


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
    """Keys in order at `revision`; `count` is the number in the whole range, also when a limit cut `kvs` (`more`)."""

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
    """`revision` is that of the transaction's writes if it succeeded. One result per operation of the branch taken:
    a RangeResult for Get, the number of deleted keys for Delete, None for Put."""

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
    """`reset`: replace the known state by `kvs` (all keys of the range at `revision`); else apply `events`."""

    revision: int
    events: Sequence[WatchEvent] = ()
    reset: bool = False
    kvs: Sequence[KeyValue] = ()
