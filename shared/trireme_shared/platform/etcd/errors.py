"""What can go wrong between a member and etcd, one class per thing the caller can do about it.

An answer of etcd's gateway names its error in one of three shapes: `{error, code, message}` (gateway v1),
`{code, message}` (v2), and in streams `{"error": {grpc_code|code, message, ...}}`.
"""

from __future__ import annotations

from typing import Any, Self

from trireme_shared.protocol.errors import CallerError, PeerError, TriremeError


class Retryable(PeerError):
    """etcd is unreachable or has no leader; nothing was written. The client has repeated it until the
    caller's deadline."""

    code = "ETCD_UNAVAILABLE"


class Refused(Retryable):
    """Nobody listens at any endpoint: etcd is down. No lease runs out meanwhile; an etcd that starts gives
    each its full TTL again."""


class OutcomeUnknown(PeerError):
    """A write was sent and its answer was lost: it may be applied already, later, or never. Read back, never
    repeat blindly."""

    code = "ETCD_OUTCOME_UNKNOWN"


class NoSpace(PeerError):
    """etcd's space quota is used up: it accepts reads and deletes only. Compact, defragment, disarm the
    alarm."""

    code, status = "ETCD_NO_SPACE", 507

    @classmethod
    def told(cls, where: str) -> Self:
        """By an answer from `where`."""
        return cls(
            f"etcd is out of space, it takes no writes until its operator frees some ({where})",
            hint=FREE_SPACE,
        )


class Compacted(CallerError):
    """The revision was compacted away; `details['compact_revision']` is the oldest one kept (0 if unknown).
    Read the current state."""

    code, status = "ETCD_COMPACTED", 410


class LeaseLost(CallerError):
    """The lease expired or was revoked: the role it carried is over, register again."""

    code, status = "LEASE_LOST", 409


class WentBack(CallerError):
    """etcd's revision is lower than one it gave this process before: what this process knows is not valid any
    more."""

    code, status = "ETCD_WENT_BACK", 500

    @classmethod
    def between(cls, now: int, before: int) -> Self:
        """etcd is at revision `now` and was at `before`."""
        return cls(
            f"etcd is at revision {now}, and was at {before} before: it was restored from an older "
            "backup, or lost its newest "
            "writes. Decisions made since then are lost, so no process may go on from its own memory",
            hint="start the job again: it goes on from what etcd holds now and the checkpoints that it names",
            now=now,
            before=before,
        )


class Unauthenticated(CallerError):
    """User or password refused, also after one more log-in."""

    code, status = "ETCD_UNAUTHENTICATED", 401


class LimitExceeded(CallerError):
    """More operations or bytes than one request may hold, or one key written twice: split it. Nothing was
    sent."""

    code, status = "ETCD_LIMIT_EXCEEDED", 413


class Fatal(CallerError):
    """etcd refused for good (permission, corruption, a future revision, another cluster)."""

    code, status = "ETCD_FATAL", 500


class Damaged(Fatal):
    """An etcd of ours cannot read its own files: a disk that lost writes, or somebody who changed them."""

    code = "ETCD_DAMAGED"


#: Errors with which no process goes on: from this etcd every task of it would get them again, or what it
#: knows is not valid any more.
UNUSABLE = (Fatal, Unauthenticated, WentBack)

FREE_SPACE = (
    "free space: `etcdctl compact REVISION` (the newest: `etcdctl endpoint status`), `etcdctl "
    "defrag`, then `etcdctl alarm "
    "disarm`; give it more with --quota-backend-bytes, and keep less with "
    "--auto-compaction-retention=1m. Training goes on by itself then"
)
_CANCELLED, _UNKNOWN, _DEADLINE, _NOT_FOUND, _RESOURCE_EXHAUSTED = 1, 2, 4, 5, 8
_ABORTED, _INTERNAL, _UNAVAILABLE, _UNAUTHENTICATED = 10, 13, 14, 16
_TRANSIENT = {_CANCELLED, _UNKNOWN, _DEADLINE, _RESOURCE_EXHAUSTED, _ABORTED, _INTERNAL, _UNAVAILABLE}

# (part of etcd's message, meaning); etcd's gRPC codes alone do not tell these apart
_BY_MESSAGE: tuple[tuple[str, type[TriremeError]], ...] = (
    ("required revision has been compacted", Compacted),
    ("requested lease not found", LeaseLost),
    ("database space exceeded", NoSpace),
    ("request is too large", LimitExceeded),
    ("too many operations", LimitExceeded),
    ("duplicate key given", LimitExceeded),
    ("invalid auth token", Unauthenticated),
    ("user name is empty", Unauthenticated),
    ("revision of auth store is old", Unauthenticated),
    ("authentication failed", Unauthenticated),
    # with auth on, a certificate alone does not log in through the gateway
    ("commonname of client", Unauthenticated),
    # refused before anything was proposed: safe to repeat even for a write
    ("no leader", Retryable),
    ("too many requests", Retryable),
    ("not a primary lessor", Retryable),
    ("learner", Retryable),
    ("not capable", Retryable),
    ("error while dialing", Retryable),
)


def of_answer(document: Any, status: int, *, where: str, write: bool) -> TriremeError:
    """The exception for an error answer of any of the three shapes; `where` names endpoint and call in the
    message."""
    code, text = _parts(document, status)
    message = f"{where}: {text} (gRPC code {code}, HTTP {status})"
    lowered = text.lower()
    for part, kind in _BY_MESSAGE:
        if part in lowered:
            return NoSpace.told(message) if kind is NoSpace else kind(message)
    if code == _UNAUTHENTICATED:
        return Unauthenticated(message)
    if code in _TRANSIENT or status >= 500:
        return unanswered(message, write=write)
    return Fatal(message)


def unanswered(message: str, *, write: bool) -> OutcomeUnknown | Retryable:
    """The exception for a request that was sent and got no (usable) answer."""
    if write:
        return OutcomeUnknown(message, hint="read back what was to be written; do not repeat it blindly")
    return Retryable(message)


def _parts(document: Any, status: int) -> tuple[int, str]:
    if not isinstance(document, dict):
        return (_UNAVAILABLE if status >= 500 else _UNKNOWN), str(document)[:500]
    inner = document.get("error")
    if isinstance(inner, dict):
        document = inner
    code = document.get("grpc_code", document.get("code", _UNKNOWN))
    text = document.get("message") or (inner if isinstance(inner, str) else "") or "no message"
    return (code if isinstance(code, int) else _UNKNOWN), str(text)
