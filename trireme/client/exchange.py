"""What both clients share: a call of the REST API, what its answer means, whether it is sent again, and how
long a client waits for a job or an operation. Nothing here sends or sleeps.

Call --send--> answer --read--> record
          `--> TriremeError --Attempts.failed--> a pause, then send again | raise it
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ValidationError

from trireme_shared.platform.runtime import ids
from trireme_shared.platform.runtime.telemetry import without_user
from trireme_shared.protocol.errors import (
    BadFrame,
    CursorExpired,
    DeadlineExceeded,
    InvalidArgument,
    NotLeader,
    NotReady,
    PeerError,
    TriremeError,
    Unauthorized,
    from_map,
)
from trireme_shared.protocol.records import Phase, Record
from trireme_shared.protocol.records.cluster import Standing
from trireme_shared.protocol.records.operations import Operation, OperationState
from trireme_shared.protocol.rest import JobView, ResizeView

MASTERLESS = "etcd+"  # etcd+http://HOST:PORT/JOB is the address of a job without a master
#: Stands for the job's name in calls to a master that has one job only. No job can have this name.
ONLY_JOB = "_"
PAUSE_S = 0.2
CONNECT_S = 2.0
LONGEST_PAUSE_S = 5.0
LONG_POLL_S = 10.0
POLL_S = 0.5
PAGE = 500
AGENT = "trireme-client"
FINAL = frozenset(
    {*(phase.value for phase in Phase if phase.final), *(each.value for each in Standing if each.final)}
)

R = TypeVar("R", bound=BaseModel)
P = TypeVar("P", bound=BaseModel)
T = TypeVar("T")
Ended = TypeVar("Ended", Operation, ResizeView)


@dataclass(frozen=True, slots=True)
class Call(Generic[R]):
    """`answer`: the record that the answer's body is. `key`: every POST has one, so a repeated one has no
    second effect. `wait_s`: the master may take that much longer to answer. `if_match`: a version, as in
    records, or an ETag."""

    method: str
    path: str
    answer: type[R]
    query: Mapping[str, Any] = field(default_factory=dict)
    body: Record | None = None
    key: str = ""
    wait_s: float = 0.0
    if_match: str = ""

    def request(self, client: httpx.Client | httpx.AsyncClient, url: str, timeout_s: float) -> httpx.Request:
        query = {name: value for name, value in self.query.items() if value is not None}
        headers = {"Accept": "application/json"}
        if self.method == "POST":
            headers["Idempotency-Key"] = self.key
        if self.if_match:
            tag = self.if_match
            headers["If-Match"] = tag if tag == "*" or tag.startswith(('"', "W/")) else f'"{tag}"'
        content = None
        if self.body is not None:
            headers["Content-Type"] = "application/json"
            content = self.body.to_bytes()
        limits = httpx.Timeout(timeout_s, connect=min(CONNECT_S, timeout_s))
        return client.build_request(
            self.method, f"{url}{self.path}", params=query, headers=headers, content=content, timeout=limits
        )

    def read(self, response: httpx.Response) -> R:
        """Raises the TriremeError that the answer is; BadFrame if it is none of this API."""
        if not response.is_success:
            raise error_of(response)
        try:
            return self.answer.model_validate_json(response.content, extra="ignore")  # a newer master's
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or "the body"
            msg = (
                f"{response.url} answered {response.status_code} with no {self.answer.__name__}: "
                f"{where}: {first['msg']}"
            )
            hint = "is it a Trireme master, of a version like this client's? getVersion tells its own"
            raise BadFrame(msg, hint=hint) from error


def post(
    path: str,
    answer: type[R],
    key: str,
    body: Record | None = None,
    query: Mapping[str, Any] | None = None,
    if_match: str = "",
) -> Call[R]:
    """`key` empty: a new one."""
    wait_s = float((query or {}).get("wait_s", 0.0))
    return Call("POST", path, answer, query or {}, body, key or ids.new_id("client"), wait_s, if_match)


def get(path: str, answer: type[R], **query: Any) -> Call[R]:
    return Call("GET", path, answer, query, wait_s=float(query.get("wait_s", 0.0)))


def path_of(*names: str) -> str:
    """`/v1/names[0]/...`, each quoted: no name can become another path. Raises InvalidArgument for an empty
    one."""
    if not all(names):
        raise InvalidArgument(f"a name in /{'/'.join(('v1', *names))} is empty")
    if dots := [name for name in names if name in (".", "..")]:
        raise InvalidArgument(f"{dots[0]!r} is no name")
    return "/".join(("/v1", *(quote(name, safe="") for name in names)))


def path_in(job: str, *names: str) -> str:
    """The path of what belongs to a job. `job` may be ONLY_JOB. Raises as path_of does."""
    if job != ONLY_JOB:
        return path_of("jobs", job, *names)
    return path_of("job", *names) if names in ((), ("explanation",)) else path_of(*names)


def body_of(kind: type[R], **values: Any) -> R:
    """The body of a request. Raises InvalidArgument for a value that no master takes."""
    try:
        return kind(**values)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        told = "; ".join(
            f"{'.'.join(map(str, each['loc']))} = {each['input']!r}: {each['msg']}" for each in problems
        )
        raise InvalidArgument(told) from error


@dataclass(frozen=True, slots=True)
class Listing(Generic[P, T]):
    """A list in pages. `split`: the items of a page, and the token of the next one (empty: it was the
    last)."""

    path: str
    page: type[P]
    split: Callable[[P], tuple[Sequence[T], str]]
    query: Mapping[str, Any] = field(default_factory=dict)

    def call(self, page_token: str) -> Call[P]:
        return Call(
            "GET", self.path, self.page, {"page_size": PAGE, **self.query, "page_token": page_token or None}
        )


class Masters:
    """The addresses that were given, and the one that calls go to now."""

    def __init__(self, urls: str) -> None:
        given = [url.strip().rstrip("/") for url in urls.split(",")]
        for url in given:
            if url.startswith(MASTERLESS):
                msg = f"{without_user(url)} is a masterless job: no master can answer this"
                raise InvalidArgument(msg, hint="see docs/masterless.md for the commands that work")
            if not url.startswith(("http://", "https://")) or "/v1/" in f"{httpx.URL(url).path}/":
                msg = (
                    f"{url!r} is no address of a master; write http://HOST:PORT, with the path of a "
                    "proxy before /v1 if there is one"
                )
                raise InvalidArgument(msg)
        self._given = tuple(given)
        self.url = self._given[0]

    def failed(self, url: str, error: TriremeError) -> None:
        """Go on with the leader that a standby named, else with the next address that was given."""
        leader = str(error.details.get("leader") or "").rstrip("/") if isinstance(error, NotLeader) else ""
        if leader.startswith(url.partition("://")[0] + "://"):  # a token for https never goes to http
            self.url = leader
        elif url in self._given:
            self.url = self._given[(self._given.index(url) + 1) % len(self._given)]
        else:
            self.url = self._given[0]


class Attempts(Generic[R]):
    """One call until it is answered, for at most `timeout_s` (and the time that the master may wait).
    `wait_for_leader`: as in AsyncClient."""

    def __init__(
        self, masters: Masters, call: Call[R], timeout_s: float, now: float, *, wait_for_leader: bool = True
    ) -> None:
        self._masters, self._call, self._wait_for_leader = masters, call, wait_for_leader
        self._deadline = now + timeout_s + call.wait_s
        self._url = masters.url

    def request(self, client: httpx.Client | httpx.AsyncClient, now: float) -> httpx.Request:
        self._url = self._masters.url
        return self._call.request(client, self._url, max(0.05, self._deadline - now))

    def told(self, error: httpx.TransportError) -> TriremeError:
        what = f"{self._call.method} {self._url}{self._call.path}"
        if isinstance(error, httpx.TimeoutException) and not isinstance(error, httpx.ConnectTimeout):
            return DeadlineExceeded(f"{what} gave no answer in time ({type(error).__name__})")
        msg = f"{self._url} cannot be reached: {error}"
        return PeerError(
            msg, hint="is the job running? `trireme run` and `trireme up` print the master's address"
        )

    def failed(self, error: TriremeError, now: float) -> float:
        """How long to wait before the next attempt, in seconds. Raises `error` if there is none."""
        if not error.retryable or not (self._wait_for_leader or isinstance(error, NotReady)):
            raise error
        self._masters.failed(self._url, error)
        pause_s = min(float(error.details.get("retry_after_s") or ids.jitter(PAUSE_S)), LONGEST_PAUSE_S)
        if now + pause_s >= self._deadline:
            raise error
        return pause_s


def error_of(response: httpx.Response) -> TriremeError:
    """The error that an answer is. `details` also has the answer's `request_id` (of the master's log),
    `errors` (each value that is wrong), a `code` that this version does not know, and `retry_after_s`."""
    try:
        problem = response.json()
    except ValueError:
        problem = None
    if isinstance(problem, dict) and "code" in problem:
        error = from_map({"message": problem.get("detail", ""), **problem})
        error.details.update({name: problem[name] for name in ("request_id", "errors") if problem.get(name)})
        if error.code != problem["code"]:
            error.details["code"] = problem["code"]
    elif response.status_code == Unauthorized.status:
        error = Unauthorized(f"{response.url} refused the token; give the job's token in TRIREME_TOKEN")
    else:
        error = PeerError(f"{response.url} answered {response.status_code} {response.reason_phrase}")
    if (after := response.headers.get("Retry-After", "")).isdecimal():
        error.details["retry_after_s"] = int(after)
    return error


def given_token() -> str:
    """TRIREME_TOKEN, else the content of the file TRIREME_TOKEN_FILE, else "". Raises InvalidArgument if that
    cannot be read."""
    path = os.environ.get("TRIREME_TOKEN_FILE", "")
    if (token := os.environ.get("TRIREME_TOKEN", "")) or not path:
        return token
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        msg = f"the token file {path} (TRIREME_TOKEN_FILE) cannot be read: {error}"
        raise InvalidArgument(msg) from error


def has_ended(job: JobView) -> bool:
    """COMPLETED, FAILED or CANCELLED. In a cluster its standing says so: its phase may be that of its last
    term."""
    return (job.standing or job.state) in FINAL


def result_of(ended: Ended) -> Ended:
    """Raises the error that it FAILED with."""
    if ended.state is OperationState.FAILED:
        raise from_map(
            {
                "code": ended.error_code,
                "message": ended.reason,
                "details": {"ended": ended.model_dump(mode="json")},
            }
        )
    return ended


@dataclass(frozen=True, slots=True)
class EventGap:
    """Events that the log had forgotten before they were asked for. `after`: the last cursor. `resume_after`:
    where what is kept begins. `lost`: how many are between them; None if `after` is of another log (the job
    was made anew), so nobody knows."""

    after: int
    resume_after: int
    lost: int | None

    @classmethod
    def of(cls, after: int, error: CursorExpired) -> EventGap:
        """Raises `error` if it does not say where to go on."""
        oldest, newest = error.details.get("oldest"), error.details.get("newest")
        if not isinstance(oldest, int) or not isinstance(newest, int):
            raise error
        resume_after = max(0, oldest - 1)
        return cls(after, resume_after, resume_after - after if after < resume_after else None)

    @property
    def error(self) -> CursorExpired:
        """For who did not say what to do about it."""
        many = "events were" if self.lost is None else f"{self.lost} events after {self.after} were"
        return CursorExpired(
            f"{many} forgotten before they were read",
            hint=f"go on with after={self.resume_after}, or give on_gap",
            after=self.after,
            resume_after=self.resume_after,
            lost=self.lost,
        )


class Wait:
    """For `what`, at most `timeout_s`. Raises DeadlineExceeded with what it waits for."""

    def __init__(self, what: str, timeout_s: float, now: float) -> None:
        self._what, self._timeout_s, self._deadline = what, timeout_s, now + timeout_s

    def left(self, at_most_s: float, now: float) -> float:
        return min(at_most_s, max(0.0, self._deadline - now))

    def check(self, reason: str, now: float) -> None:
        if now >= self._deadline:
            msg = f"waited {self._timeout_s:g} s for {self._what}: {reason}"
            raise DeadlineExceeded(msg, hint="it goes on; wait longer with timeout_s")

    def pause(self, seconds: float, reason: str, now: float) -> float:
        self.check(reason, now)
        return self.left(seconds, now)
