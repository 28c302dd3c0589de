"""Every error that the services raise on purpose, split by whose fault it is.

    TriremeError
      CallerError   the request can never succeed: do not repeat it
      PeerError     another process or machine is at fault: repeat it, later or elsewhere

A message is fact + both values + what to do. `code` is stable and crosses the wire (problem+json at the
master, a msgpack map at the parameter servers); `from_code` turns it back into the same class.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, ClassVar, TypeVar

Leaf = TypeVar("Leaf", bound=BaseException)


class TriremeError(Exception):
    """Root. `details` holds values (JSON types) that a program may want; the message holds the same for
    people."""

    code: ClassVar[str] = "INTERNAL"
    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, hint: str = "", **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details = details

    def to_map(self) -> dict[str, Any]:
        return {
            "code": self.code,
            "message": self.message,
            "retryable": self.retryable,
            "hint": self.hint,
            "details": self.details,
        }


class CallerError(TriremeError):
    code, status = "INVALID_ARGUMENT", 400


class PeerError(TriremeError):
    code, status, retryable = "UNAVAILABLE", 503, True


class InvalidArgument(CallerError):
    """The request's values are invalid, or do not fit together."""


class NotFound(CallerError):
    code, status = "NOT_FOUND", 404


class Conflict(CallerError):
    code, status = "CONFLICT", 409


class PreconditionFailed(CallerError):
    """What the request expects to change has changed meanwhile: read it again, then decide anew. `details`:
    version, expected."""

    code, status = "PRECONDITION_FAILED", 412


class IdempotencyKeyReused(CallerError):
    """The key came with another request before: use a new key."""

    code, status = "IDEMPOTENCY_KEY_REUSED", 422


class Unauthorized(CallerError):
    """No token, or one that is not known."""

    code, status = "UNAUTHENTICATED", 401


class Forbidden(CallerError):
    """The token is known, but its role does not include this."""

    code, status = "PERMISSION_DENIED", 403


class ForeignOrigin(CallerError):
    """A web page of another site sent the request."""

    code, status = "ORIGIN_NOT_ALLOWED", 403


class UnknownHost(CallerError):
    """The request names a host that this service is not."""

    code, status = "HOST_NOT_ALLOWED", 421


class UnsupportedMediaType(CallerError):
    code, status = "UNSUPPORTED_MEDIA_TYPE", 415


class StaleAttempt(CallerError):
    """A report about an attempt that is not the pending one any more: fetch a new task."""

    code, status = "STALE_ATTEMPT", 409


class StepTorn(CallerError):
    """Blocks of the step hold data of a lane that was discarded later. The job goes back to a checkpoint;
    wait for it."""

    code, status = "STEP_TORN", 409


class FrozenDiffer(InvalidArgument):
    """Two lanes of a step differ in whether a parameter is trained; the job ends. `details`: parameter (its
    number in the layout), step, kind ("frozen": it requires no gradient; "resting": its optimizer has no
    loss)."""

    code, status = "FROZEN_DIFFER", 409


class StaleGeneration(CallerError):
    """The membership has changed: read lanes and addresses again."""

    code, status = "STALE_GENERATION", 409


class WrongOwner(CallerError):
    """Another parameter server owns the block: read the slot map again."""

    code, status = "WRONG_OWNER", 421


class Gone(CallerError):
    """The version is no longer kept: join again."""

    code, status = "GONE", 410


class CursorExpired(CallerError):
    """What follows the cursor is not kept any more, or the cursor is of something else: begin again.
    `details`: oldest, newest."""

    code, status = "CURSOR_EXPIRED", 410


class LayoutMismatch(CallerError):
    """The caller's model is not the job's model."""

    code, status = "LAYOUT_MISMATCH", 409


class TooLarge(CallerError):
    code, status = "TOO_LARGE", 413


class BadFrame(CallerError):
    """Bytes that violate the protocol: truncated, wrong types, wrong sizes. Nothing was changed."""

    code, status = "BAD_FRAME", 400


class DatasetError(CallerError):
    """The dataset cannot be read, is empty, or its records do not fit the model."""

    code, status = "DATASET_INVALID", 422


class CheckpointUnusable(CallerError):
    """A checkpoint that must not be loaded: damaged, incomplete, or of another job or model. Try the one
    before."""

    code, status = "CHECKPOINT_UNUSABLE", 422


class StateUnreadable(CallerError):
    """This version cannot read one of the job's own keys in etcd. No decision is based on a guess."""

    code, status = "STATE_UNREADABLE", 500


class UserCodeError(CallerError):
    """The user's module raised. `details`: error_type, traceback, task."""

    code, status = "USER_CODE_ERROR", 422


class TooEarly(PeerError):
    """The block has not reached that version yet."""

    code, status = "TOO_EARLY", 425


class TooManyRequests(PeerError):
    """As many of this kind are served already: later there may be room."""

    code, status = "TOO_MANY_REQUESTS", 429


class NotReady(PeerError):
    """Started, but without parameters (or not serving yet)."""

    code = "NOT_READY"


class AnotherProcess(PeerError):
    """Another process than the one that was meant listens there by now: read its address again."""

    code, status = "ANOTHER_PROCESS", 421


class NotLeader(PeerError):
    """A standby answered; `details['leader']` is the leader's URL when known."""

    code = "NOT_LEADER"


class StorageUnreachable(PeerError):
    """The job's storage does not answer; what it holds is not known to be lost."""

    code = "STORAGE_UNREACHABLE"


class ResourceExhausted(PeerError):
    """A machine has no descriptor, memory or disk space left for this, or its disk fails: somebody there must
    act."""

    code = "RESOURCE_EXHAUSTED"


class DeadlineExceeded(PeerError):
    """A wait reached its time limit; the message says what it waited for."""

    code, status = "DEADLINE_EXCEEDED", 504


def is_interrupt(error: BaseException) -> bool:
    """Whether `error` is a real Ctrl-C: Python raises it in the main thread only. Elsewhere user code has
    raised it."""
    return isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


def subclasses(root: type[TriremeError]) -> dict[str, type[TriremeError]]:
    found: dict[str, type[TriremeError]] = {}
    for child in root.__subclasses__():
        found.update(subclasses(child))
        found[child.code] = child
    return found


def from_map(error: dict[str, Any]) -> TriremeError:
    """The exception a peer sent with `to_map` (unknown codes become CallerError or PeerError by
    `retryable`)."""
    fallback = PeerError if error.get("retryable") else CallerError
    kind = subclasses(TriremeError).get(str(error.get("code")), fallback)
    details = error.get("details")
    return kind(
        str(error.get("message", "")),
        hint=str(error.get("hint", "")),
        **(details if isinstance(details, dict) else {}),
    )


def leaves(group: BaseExceptionGroup[Leaf]) -> Iterator[Leaf]:
    """The errors in a group and in the groups inside it."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from leaves(error)
        else:
            yield error
