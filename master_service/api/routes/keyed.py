"""Requests with an Idempotency-Key: what they ask for, as a digest, and their answer, which the next master gives as well.

The same key with the same route, names in the path and body (as JSON, however it is written) is the same request. What only says
how long to wait is in the query, and does not count. A job and a cluster have keys of their own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable
from typing import Annotated, Generic, Protocol, TypeVar

from fastapi import Depends, Header, Request

from master_service.api.routes.dependencies import MasterOf, answered
from master_service.core.decisions.requests import AnsweredBefore, Keyed, Once
from trireme_shared.platform.runtime import clock
from trireme_shared.protocol.records.record import Record
from trireme_shared.protocol.rest import Empty

A = TypeVar("A")
A_contra = TypeVar("A_contra", contravariant=True)
A_co = TypeVar("A_co", covariant=True)
R = TypeVar("R", bound=Record)
KEY = "the same key and request have the same effect once, and the same answer, for a day"

Key = Annotated[str, Header(alias="Idempotency-Key", max_length=200, description=KEY)]


class Call(Protocol[A]):
    """Asks a master. `once` None: without a key."""

    def __call__(self, *, once: Once[A] | None) -> Awaitable[A]: ...


class Answering:
    """How a POST is answered. `keyed` None: it came without a key."""

    def __init__(self, keyed: Keyed | None) -> None:
        self.keyed = keyed

    async def answer(self, kind: type[R], call: Call[A], view: Callable[[A], R]) -> R:
        """`view` of what `call` answers; `kind`: the record that it makes. Raises what `call` raises, DeadlineExceeded,
        IdempotencyKeyReused."""
        if self.keyed is None:
            return view(await answered(call(once=None)))
        shown = _Shown(view)
        try:
            await answered(call(once=Once(self.keyed, shown)))
        except AnsweredBefore as before:
            return kind.model_validate_json(before.kept.answer)
        return shown.last


class _Shown(Generic[A_contra, R]):
    """A view that keeps what it made last: a decision may be taken again, and the last one is written."""

    last: R

    def __init__(self, view: Callable[[A_contra], R]) -> None:
        self._view = view

    def __call__(self, answer: A_contra) -> R:
        self.last = self._view(answer)
        return self.last


async def keyed_request(request: Request, key: str, **names: str) -> Keyed | None:
    """`names`: those that the path does not hold. None: there is no key."""
    if not key:
        return None
    operation = str(request.scope["route"].operation_id)
    asked = json.dumps([operation, {**request.path_params, **names}, _plain(await request.body())], sort_keys=True)
    return Keyed(_digest(key)[:32], _digest(asked), operation, clock.wall_time())


async def _of_job(master: MasterOf, request: Request, idempotency_key: Key = "") -> Answering:
    return Answering(await keyed_request(request, idempotency_key, job=master.keys.job))


async def _of_cluster(request: Request, idempotency_key: Key = "") -> Answering:
    return Answering(await keyed_request(request, idempotency_key))


def empty(_: object) -> Empty:
    return Empty()


def _plain(body: bytes) -> object:
    """Bodies that are equal as JSON are equal."""
    try:
        return json.loads(body, parse_float=_number) if body else None
    except (ValueError, RecursionError):
        return body.decode("utf-8", "replace")


def _number(text: str) -> float:
    """60.0 is 60."""
    number = float(text)
    return int(number) if number.is_integer() else number


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


AnsweringInJob = Annotated[Answering, Depends(_of_job)]
AnsweringInCluster = Annotated[Answering, Depends(_of_cluster)]
