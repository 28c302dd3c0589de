"""What routes get of a request: the master, its state as etcd has it, the parameters of pages, the version
that it expects, its Idempotency-Key."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Awaitable, Callable
from typing import Annotated, Generic, Protocol, TypeVar

from fastapi import Depends, Header, Path, Query, Request, Response
from pydantic import ValidationError
from starlette.types import Receive

from master_service.api.render import TOKEN_PATTERN
from master_service.cluster.leader import ClusterMaster, JobsLed
from master_service.core.decisions.requests import ANY, AnsweredBefore, Expected, Keyed, Once
from master_service.leadership.master import Master
from trireme_shared.platform.runtime import clock
from trireme_shared.platform.security.access import CALLER
from trireme_shared.protocol.errors import Conflict, DeadlineExceeded, InvalidArgument, NotReady, PeerError
from trireme_shared.protocol.records.operations import KeptAnswer
from trireme_shared.protocol.records.record import Record
from trireme_shared.protocol.rest import Empty

ANSWER_S = 8.0

T = TypeVar("T")


async def _jobs(request: Request) -> JobsLed:  # not a plain function: those run in a thread each
    jobs: JobsLed = request.app.state.jobs
    return jobs


JobsOf = Annotated[JobsLed, Depends(_jobs)]


def find_led(jobs: JobsLed, job: str | None) -> Master | None:
    """None: a job of the cluster that nobody leads now, or not yet. Raises NotFound, NotLeader, NotReady;
    Conflict if `job` is None and there are several."""
    if not isinstance(jobs, ClusterMaster) or job is None:
        return jobs.find(job)
    try:
        master = jobs.find(job)
    except (Conflict, NotReady):
        jobs.check_leading()
        return None
    # its term may be about to begin, or have just ended with the job
    return master if master.current_term is not None else None


async def _master(request: Request, jobs: JobsOf) -> Master:
    return jobs.find(request.path_params.get("job"))


JobName = Annotated[str, Path(max_length=200, description="name of the job")]


async def job_in_path(job: JobName) -> str:
    """Documents the parameter of every path below /v1/jobs/{job}."""
    return job


def asked_by(request: Request) -> str:
    """For people."""
    caller = CALLER.get()
    return f"asked by {caller or (request.client.host if request.client else 'REST')}"


async def answered(call: Awaitable[T], longer_s: float = 0.0) -> T:
    """Raises DeadlineExceeded if etcd does not answer for too long. The same request, sent again, finds its
    result."""
    try:
        async with asyncio.timeout(ANSWER_S + longer_s):
            return await call
    except TimeoutError as error:
        msg = f"the master got no answer from etcd within {ANSWER_S:g} s; ask again"
        raise DeadlineExceeded(msg) from error


async def unless_gone(call: Awaitable[T], receive: Receive) -> T:
    """For requests that may wait: `call` is cancelled when the caller closes the connection, so that no task
    is given to nobody. Call it when the body was received. Raises PeerError then."""
    calling, leaving = asyncio.ensure_future(call), asyncio.ensure_future(receive())
    try:
        await asyncio.wait({calling, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not calling.done():
            raise PeerError("the caller has closed the connection")
        return calling.result()
    finally:
        calling.cancel()
        leaving.cancel()
        await asyncio.wait({calling, leaving})


async def committed(master: Master, view: Callable[[], T]) -> T:
    """What `view` shows now, once etcd has all of it: another master would show it, too. Raises what `view`
    raises; NotLeader if the term ends before; DeadlineExceeded."""
    writer = master.term.writer
    shown = view()
    await answered(writer.settled())
    return shown


MasterOf = Annotated[Master, Depends(_master)]
WaitS = Annotated[float, Query(ge=0, le=30, description="wait at most so many seconds for the end")]
PageSize = Annotated[int, Query(ge=1, le=1000, description="at most so many items")]
PageToken = Annotated[str, Query(pattern=TOKEN_PATTERN, description="next_page_token of the page before")]


# ------------------------------------------------------------ conditional requests (RFC 9110)
# an ETag is "<version>.<digest of the body>"
# If-None-Match ─► the whole tag is the same: 304, without a body
# If-Match ─► the version in it is another one: PreconditionFailed (412)
#
# The body shows progress, too, and a cache must not show that of an hour ago: so the tag changes with it. A
# job is paused though a step was trained since it was read: so If-Match compares the version alone.
#
# If-None-Match and 304 are no parameter and answer of the document, as little as HEAD is: generated clients
# would have to tell a record from no answer at each call.

TAGS = r'^(\*|(W/)?"[!#-~]*"([ \t]*,[ \t]*(W/)?"[!#-~]*")*)$'
_TAG = re.compile(r'(W/)?"([!#-~]*)"')

IfMatch = Annotated[str | None, Header(alias="If-Match", max_length=1000, pattern=TAGS)]


class Reading:
    """A GET. `if_none_match`: the tags that the caller has. Raises InvalidArgument."""

    def __init__(self, if_none_match: str | None) -> None:
        if if_none_match is not None and not re.fullmatch(TAGS, if_none_match):
            raise InvalidArgument(
                f"If-None-Match {if_none_match[:100]!r} is neither * nor a list of tags in quotes"
            )
        self._known = if_none_match

    def answer(self, view: Record, version: str) -> Response:
        """`view`, or that the caller has it."""
        body = view.model_dump_json()
        tag = f"{version}.{hashlib.sha256(body.encode()).hexdigest()[:16]}"
        headers = {"ETag": f'"{tag}"'}
        if self._known is not None and (
            self._known == "*" or tag in {known for _, known in _TAG.findall(self._known)}
        ):
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers, media_type="application/json")


async def _reading(request: Request) -> Reading:
    return Reading(request.headers.get("if-none-match"))


async def _expected(if_match: IfMatch = None) -> Expected:
    """Weak tags match nothing: they do not say that two versions are the same."""
    if if_match is None or if_match == "*":
        return ANY
    return Expected(frozenset(tag.partition(".")[0] for weak, tag in _TAG.findall(if_match) if not weak))


ReadingIf = Annotated[Reading, Depends(_reading)]
ExpectedVersion = Annotated[Expected, Depends(_expected)]


# ------------------------------------------------------------ requests with an Idempotency-Key
# The key and what they ask for are kept as digests, with their answer, which the next master gives as well.
# Each token has keys of its own for each operation: a key that another user, or another operation, took says
# nothing here. The same key with the same names in the path and the same body (as JSON, however it is
# written) is the same request. What only says how long to wait is in the query, and does not count. A job and
# a cluster have keys of their own.

A = TypeVar("A")
A_contra = TypeVar("A_contra", contravariant=True)
R = TypeVar("R", bound=Record)
KEY = "the same key and request, of one token, have the same effect once, and the same answer, for a day"

Key = Annotated[str, Header(alias="Idempotency-Key", max_length=200, description=KEY)]


class Call(Protocol[A]):
    """Asks a master. `once` None: without a key."""

    def __call__(self, *, once: Once[A] | None) -> Awaitable[A]: ...


class Answering:
    """How a POST is answered. `keyed` None: it came without a key."""

    def __init__(self, keyed: Keyed | None) -> None:
        self.keyed = keyed

    async def answer(
        self,
        kind: type[R],
        call: Call[A],
        view: Callable[[A], R],
        otherwise: Callable[[], R] | None = None,
    ) -> R:
        """`view` of what `call` answers; `kind`: the record that it makes. `otherwise`: what is answered if
        another version has kept its answer in a form that this one cannot read. Raises what `call` raises,
        DeadlineExceeded, IdempotencyKeyReused, Conflict."""
        if self.keyed is None:
            return view(await answered(call(once=None)))
        shown = _Shown(view)
        try:
            await answered(call(once=Once(self.keyed, shown)))
        except AnsweredBefore as before:
            try:
                return kept_answer(kind, before.kept)
            except Conflict:
                if otherwise is None:
                    raise
                return otherwise()
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
    asked = json.dumps(
        [operation, {**request.path_params, **names}, _plain(await request.body())], sort_keys=True
    )
    own_key = json.dumps([request.headers.get("authorization", ""), operation, key])
    wall_time, older_key = clock.wall_time(), _digest(key)[:32]
    return Keyed(_digest(own_key)[:32], _digest(asked), operation, wall_time, older_key)


async def _of_job(master: MasterOf, request: Request, idempotency_key: Key = "") -> Answering:
    return Answering(await keyed_request(request, idempotency_key, job=master.keys.job))


async def _of_cluster(request: Request, idempotency_key: Key = "") -> Answering:
    return Answering(await keyed_request(request, idempotency_key))


def kept_answer(kind: type[R], kept: KeptAnswer) -> R:
    """Raises Conflict: another version has given it in another form."""
    try:
        return kind.model_validate_json(kept.answer)
    except ValidationError as error:
        msg = (
            f"{kept.operation} was carried out at {kept.create_time} with this Idempotency-Key, by another "
            "version of Trireme, whose answer this one cannot read"
        )
        raise Conflict(msg, hint="ask for what it was about; docs/upgrades.md") from error


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
